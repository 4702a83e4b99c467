"""Calls of the command line with odd arguments: no traceback, and a refusal writes nothing."""

import json
import os
import textwrap
from random import Random

import pytest
from calling import call, listed
from test_refusals import MODELS

from chaos import COUNTS, SEED, asked

BIG = "9" * 5000
NUMBERS = ("0", "1", "-1", "3", "nan", "inf", "1e400", BIG, "", "x", "0.5", "\u0663", "1_000")
NAMES = ("", ".", "..", "/", "../../evil", "nosuch", "\n", "é", "a" * 5000, "--", "-x", "a b")
MODELS_NAMED = (
    "odd_models:good", "odd_models:raises", "odd_models:ends", "odd_models:leaves", "odd_models:",
    "odd_models:frozen", "odd_models:shape", "odd_models:backward", "leaves_at_import:x", ":",
    "a:b:c",
    "wrn-10-1", "wrn-0-0", f"wrn-{BIG}-1", "dc-transformer-tiny", *NAMES,
)  # fmt: skip
FILES = (
    "empty.toml", "deep.toml", "deep.json", "noise", "folder", "zeros.toml",
    *(name for name in NAMES if name != "/"),  # a report of all there is would be one
)  # fmt: skip
SIZES = ("1 MB", "0", "-1 MB", "6M", BIG, f"{BIG} GB", "1e9", "", "nan MB", "1 PB")
FLAGS = {
    "profile": {
        "--batch": NUMBERS, "--density": NUMBERS, "--microbatch": NUMBERS, "--precision": NAMES,
        "--checkpoint": ("every-0", f"every-{BIG}", "keep*9", "[" * 3000, "[keep]*99999", *NAMES),
        "--optimizer": ("none", "sgd", *NAMES), "--accounting": NAMES, "--device": NAMES,
        "--loss": MODELS_NAMED, "--html": ("", "folder", "no/such/folder/x.html", "/"),
        "--trace": ("", "folder", "no/such/folder/x"), "--svg": ("x", "", "no/such/folder/x.svg"),
        "--snapshot": ("", "folder", "no/such/folder/x"),
    },
    "cards": {
        "--card": NUMBERS, "--gpus": ("0", "-1", BIG), "--sharding": NAMES, "--batch": NUMBERS,
        "--lora": ("x", "r=0", f"r={BIG}", "r=1" + "0" * 30, "r=4,targets=nosuch", ""),
        "--dtype": NAMES, "--quantize": NAMES, "--html": ("", "folder", "no/such/folder/x"),
        "--optimizer": NAMES, "--tokens": ("0", "-1", BIG),
    },
    "explain": {
        "--batch": NUMBERS, "--microbatch": NUMBERS, "--precision": NAMES, "--device": NAMES,
        "--optimizer": NAMES, "--tokens": ("0", BIG), "--loss": MODELS_NAMED,
    },
    "check": {}, "doctor": {"--nosuch": NAMES},
    "plan": {
        "--data": (*FILES, "deep.jsonl", "noise.npy"), "--eval-data": FILES,
        "--eval-batch": NUMBERS, "--svg": ("x.svg", "folder", "no/such/folder/x.svg"),
        "--html": ("", "folder", "no/such/folder/x"), "--gpus": ("0", "-1", BIG),
        "--budget": SIZES, "--allow": NAMES, "--batch": NUMBERS, "--device": NAMES,
        "--out": ("", "folder", "no/such/folder/x.toml", "/"), "--optimizer": NAMES,
    },
    "verify": {
        "--plan": FILES, "--batch": NUMBERS, "--steps": NUMBERS, "--microbatch": NUMBERS,
        "--density": NUMBERS, "--precision": NAMES, "--loss": MODELS_NAMED,
    },
    "train": {
        "--data": NAMES, "--data-dir": FILES, "--split": NAMES, "--plan": FILES, "--budget": SIZES,
        "--density": NUMBERS, "--microbatch": NUMBERS, "--set": ("x", "=", f"a.b={BIG}", "a.b=[[["),
        "--epochs": ("0", "-1", BIG, "x"), "--batch": ("0", "-1", BIG, "99999", "nan"),
        "--lr": ("0", "nan", "inf", "-1", "x"), "--seed": ("-1", BIG, "x"), "--device": NAMES,
        "--stop-after": ("0", BIG, "x", "-3 steps", f"{BIG} steps"), "--out": ("empty.toml",),
        "--snapshot-every": ("0", "-1", BIG), "--threads": ("0", "-1"), "--parallel": NAMES,
        "--data-on": NAMES, "--dropout": NUMBERS, "--beam": NUMBERS, "--languages": NAMES,
    },
    "study": {
        "--workers": ("0", "-1", BIG), "--only": ("x", "=", f"seed={BIG}", "lr=[[["),
        "--run-seconds": ("0", "-1", "nan"), "--ray": ("127.0.0.1:1", "::::", ":99999999"),
    },
    "report": {"--budget": SIZES, "--out": ("empty.toml", "/dev/null/x")},
    "translate": {"--beam": NUMBERS, "--device": NAMES},
    "prepare": {"--out": ("folder", "empty.toml", "/"), "--merges": NUMBERS, "--languages": NAMES},
}  # fmt: skip
CONFIGURATIONS = (
    "hf:", "hf:.", "hf:folder", "hf:nosuch", "hf:deep.json", "hf:noise", "hf:huge", "hf:evil",
    "timm:", "timm:nosuch", "hf:\n", f"hf:{'a' * 5000}", "hf:/",
)  # fmt: skip
INPUTS = ("4x3x32x32", "0", "4x0", BIG, "x", "4x3x32x32:int64", "a=4x3", "", f"4x{BIG}")


def sandbox(folder):
    """A working folder with odd files in it."""
    for name, text in {
        "odd_models.py": textwrap.dedent(MODELS), "leaves_at_import.py": "import sys; sys.exit(5)",
        "empty.toml": "", "deep.toml": "a = " + "[" * 50_000, "deep.json": "[" * 50_000,
        "zeros.toml": "\0" * 4096, "noise": os.urandom(500).decode("latin1"),
    }.items():  # fmt: skip
        (folder / name).write_text(text)
    (folder / "deep.jsonl").write_text("[" * 50_000)
    (folder / "noise.npy").write_bytes(os.urandom(500))
    odd = {"huge": {"num_labels": 10**30}, "evil": {"auto_map": {"AutoConfig": "evil.C"}}}
    for name, held in odd.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(held))
    (folder / "evil" / "evil.py").write_text("raise SystemExit('it ran')")
    (folder / "folder").mkdir()
    (folder / "folder" / "x").write_text("x")


def drawn(chance):
    """A verb with one odd thing or two; a training never gets far, if it begins."""
    verb = chance.choice(list(FLAGS))
    flags = dict(FLAGS[verb])
    given = {}
    for name in chance.sample(list(flags), min(chance.randint(1, 2), len(flags))):
        given[name] = chance.choice(flags[name])
    named = chance.choice(MODELS_NAMED) if chance.random() < 0.5 else "odd_models:good"
    first = named
    if verb in ("study", "report", "translate", "prepare", "check"):
        first = chance.choice(FILES)
    elif verb == "cards" or (verb in ("profile", "plan", "explain") and chance.random() < 0.2):
        first = named = chance.choice(CONFIGURATIONS)
    call_of = [verb, first] if verb != "doctor" else [verb]
    if verb in ("profile", "plan", "verify", "explain"):
        if (":" in named and named not in CONFIGURATIONS) or chance.random() < 0.2:
            call_of += ["--input", chance.choice(INPUTS) if chance.random() < 0.3 else INPUTS[0]]
        if verb == "plan":
            given.setdefault("--budget", "1 MB")
    if verb == "train":
        given.setdefault("--data", "digits")
        given.setdefault("--epochs", "1")
        given.setdefault("--batch", "700")
        given.setdefault("--device", "cpu")
        call_of += ["--no-predict"]
    if verb == "prepare":
        given.setdefault("--out", "folder")
    for name, value in given.items():
        call_of += [name, value]
    return call_of


def attack(count, chance, tmp_path, monkeypatch):
    """So many calls, in a folder that is looked at before and after each."""
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(here))
    sandbox(here)
    for _ in range(count):
        arguments = drawn(chance)
        shown = " ".join(arguments)[:300]
        before = listed(tmp_path)
        found = call(*arguments)
        COUNTS["calls of the command line"] += 1
        COUNTS[f"calls of the command line that ended with {found.status}"] += 1
        assert found.raised is None and "Traceback" not in found.err, (shown, found)
        assert found.status in (0, 1, 2), (shown, found)
        if found.status == 2:
            written = listed(tmp_path) != before
            COUNTS["writes on refusal"] += written
            assert not written, (shown, found, listed(tmp_path).keys() ^ before.keys())


def test_a_few_odd_calls(tmp_path, monkeypatch):
    attack(12, Random(2), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_many_odd_calls(tmp_path, monkeypatch):
    attack(asked("CALLS", 20), Random(f"calls {SEED}"), tmp_path, monkeypatch)
