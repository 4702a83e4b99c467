"""Configurations, data sets and baselines of strangers: each is refused in one line, runs nothing
and is not waited for."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.calling import Called, call, listed
from shoestring.errors import InputError
from shoestring.integrations.configurations import Configured
from shoestring.integrations.limits import check_sizes

pytest.importorskip("transformers")

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16,
    "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32,
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def refused(folder: Path, *arguments: object) -> Called:
    before = listed(folder)
    found = call(*arguments)
    assert found.refused, found
    assert listed(folder) == before
    return found


def planned(folder: Path, *more: object) -> Called:
    return refused(folder, "plan", "hf:llama", "--budget", "1 GB", "--tokens", "8", *more)


@pytest.mark.parametrize(
    "held",
    [
        b"", b"null", b"[]", b"3", b"\xff", b"[" * 200_000, b'{"a":' * 100_000,
        *(
            json.dumps({**LLAMA, name: value}).encode()
            for name, value in (
                ("hidden_size", 10**30), ("hidden_size", -1), ("hidden_size", "x"),
                ("num_hidden_layers", 10**9), ("num_hidden_layers", 10**6),
                ("num_labels", 10**30), ("architectures", 3), ("model_type", 3),
                ("attn_implementation", "some/kernel"), ("auto_map", 3),
            )
        ),
    ],
    ids=lambda held: str(held[-70:]),
)  # fmt: skip
def test_a_configuration_that_cannot_be(here: Path, held: bytes) -> None:
    if b'"architectures": 3' in held:  # which class it names does not matter then
        (here / "llama" / "config.json").write_bytes(held)
        Configured("hf:llama", tokens=4).build()
        return
    (here / "llama" / "config.json").write_bytes(held)
    planned(here)


def test_a_model_of_too_many_modules_is_not_built(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoestring.integrations.limits._MOST_MODULES", 9)
    assert "more than 9 modules" in planned(here).err


@pytest.mark.parametrize("kind", ["evil", "llama"])
def test_code_beside_a_configuration_never_runs(
    here: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if something says yes to what transformers asks on stdin."""
    code = f"open({str(here / 'owned')!r}, 'w')\nfrom transformers import PreTrainedConfig\n"
    (here / "llama" / "evil.py").write_text(f"{code}class C(PreTrainedConfig): pass\n")
    held = {**LLAMA, "model_type": kind, "auto_map": {"AutoConfig": "evil.C"}}
    (here / "llama" / "config.json").write_text(json.dumps(held))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    if kind == "evil":
        planned(here)
    else:  # transformers has a class of its own for it
        Configured("hf:llama", tokens=4).build()
    assert not (here / "owned").exists()


@pytest.mark.parametrize(
    "held",
    [
        {"attn_implementation": "some/kernel"},
        {"_attn_implementation": {"text_config": "kernels-community/flash-attn"}},
        {"text_config": {"experts_implementation": "some/kernel@v1:f"}},
    ],
)
def test_a_kernel_on_the_hub_is_not_fetched(held: dict[str, Any]) -> None:
    """With the package `kernels` transformers would download and run it."""
    with pytest.raises(ValueError, match="names code on the hub"):
        check_sizes({**LLAMA, **held})
    check_sizes({**LLAMA, "attn_implementation": "sdpa", "name_or_path": "a/b"})


@pytest.mark.parametrize("where", ["llama/config.json", "config"])
def test_a_fifo_is_not_waited_for(here: Path, where: str) -> None:
    (here / where).unlink(missing_ok=True)
    os.mkfifo(here / where)
    with pytest.raises(InputError, match=r"no config\.json|not a plain file"):
        Configured("hf:" + ("llama" if "/" in where else where)).build()


def array(values: Any) -> bytes:
    held = io.BytesIO()
    np.save(held, values)
    return held.getvalue()


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("d.jsonl", b"[" * 200_000), ("d.jsonl", b"[" * 900 + b"]" * 900),
        ("d.jsonl", b'{"length": 1' + b"0" * 30 + b"}"), ("d.jsonl", b"9" * 5000),
        ("d.jsonl", b'{"length": true}'), ("d.jsonl", b"\xff\n"), ("d.jsonl", b""),
        ("d.jsonl", b'{"text": "\\ud800"}'), ("d.txt", b"\xff"), ("d.txt", b"9" * 5000),
        ("d.txt", b"-3"), ("d.npy", b""), ("d.npy", array([np.nan])), ("d.npy", array(["a"])),
        ("d.npy", array(np.zeros(2, [("a", "i4")]))),
    ],
    ids=lambda held: str(held[:20]),
)  # fmt: skip
@pytest.mark.parametrize("flag", ["--data", "--eval-data"])
def test_a_data_set_that_cannot_be(here: Path, name: str, held: bytes, flag: str) -> None:
    (here / name).write_bytes(held)
    assert name in planned(here, flag, name).err


CHECK = '[a]\nmodel = "small:made"\ninput = ["4x8"]\ndevice = "cpu"\n'


@pytest.fixture
def checks(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (here / "small.py").write_text("from torch import nn\ndef made(): return nn.Linear(8, 4)\n")
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.delitem(sys.modules, "small", raising=False)
    (here / "m.toml").write_text(CHECK)
    return here


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 100_000, CHECK.replace('["4x8"]', "3"), CHECK.replace('["4x8"]', "[3]"),
        CHECK.replace('"cpu"', "3"),
        *(
            CHECK + line
            for line in (
                "batch = 'x'", "batch = true", "tolerance = nan", "tolerance = 'x'", "plan = 3",
                "tolerance = -1", "budget = 1.5", "lora = 3", "loss = 3", "optimizer = 3",
            )
        ),
    ],
    ids=lambda text: text[-20:],
)  # fmt: skip
def test_a_check_that_cannot_be(checks: Path, text: str) -> None:
    (checks / "m.toml").write_text(text)
    refused(checks, "check", "m.toml")


BASELINES = (
    b"", b"[" * 100_000, b"[]", b'{"a": 0}', b'{"a": -1}', b'{"a": NaN}', b'{"a": Infinity}',
    b'{"a": "x"}', b'{"a": ' + b"9" * 4000 + b"}", b"\xff",
)  # fmt: skip


@pytest.mark.parametrize("held", [*BASELINES, None], ids=lambda held: str(held and held[:20]))
def test_a_baseline_that_cannot_be(checks: Path, held: bytes | None) -> None:
    path = checks / "m.baseline.json"
    os.mkfifo(path) if held is None else path.write_bytes(held)
    assert "--update" in refused(checks, "check", "m.toml").err
    if held is not None:
        assert call("check", "m.toml", "--update").status == 0  # as the hint says
        assert call("check", "m.toml").status == 0


@pytest.mark.parametrize(
    "given",
    [
        ("cards", "--card", "9" * 5000), ("cards", "--lora", "r=1" + "0" * 30),
        ("profile", "--html", "x.html", "--trace", "no/such/file"),
        ("profile", "--svg", "x.svg", "--snapshot", "no/such/file"), ("profile", "--trace", "\0"),
    ],
    ids=lambda given: " ".join(given)[:40],
)  # fmt: skip
def test_odd_flags_write_nothing(here: Path, given: tuple[str, ...]) -> None:
    verb, *more = given
    refused(here, verb, "hf:llama", "--tokens", "8", *more)
