"""A technique from outside goes through everything without an edit in src/."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.lab.target import at_once, resolve
from shoestring.planning.planner import Planner
from shoestring.planning.settings import Setting
from shoestring.techniques.offers import Offer
from shoestring.techniques.registry import register, unregister
from tiny_nets import TINY

TESTS = Path(__file__).parents[1]
TOY = TESTS / "toy"
WIDE = 256


@pytest.fixture(scope="module")
def toy() -> Iterator[Any]:
    """The technique, registered as an entry point would do it."""
    sys.path.insert(0, str(TOY))
    from narrow_state import NarrowState

    yield register(NarrowState)
    unregister(NarrowState.name)
    sys.path.remove(str(TOY))


def step() -> tuple[nn.Module, torch.Tensor, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    given = {"loss": lambda m, b: m(b).square().mean(), "optimizer": optimizer}
    return model, torch.randn(4, WIDE), given


def momentum_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


@pytest.fixture(scope="module")
def small_images(toy: Any) -> Iterator[Any]:
    """Of another kind: it changes the batch, not the update."""
    from small_images import SmallImages

    yield register(SmallImages)
    unregister(SmallImages.name)


def test_it_is_written_and_read(toy: Any, tmp_path: Path) -> None:
    plan = ss.Plan([toy("bf16"), ss.Microbatching(2)])
    for name in ("plan.toml", "plan.json"):
        plan.save(tmp_path / name)
        assert ss.Plan.load(tmp_path / name) == plan
    assert plan.short() == "state bf16 + microbatch 2"
    with pytest.raises(ss.InputError, match="has no setting 'bits'"):
        ss.Plan.from_dict({"narrow_state": {"bits": 8}})


def test_it_is_profiled_in_both_accountings(toy: Any) -> None:
    model, batch, given = step()
    saved = momentum_bytes(model) // 2
    for accounting in ("fundamental", "device"):
        plain = ss.profile(model, batch, **given, accounting=accounting)
        narrow = ss.profile(model, batch, **given, accounting=accounting, techniques=[toy("bf16")])
        assert plain.peak_bytes - narrow.peak_bytes == pytest.approx(saved, rel=0.05), accounting


def test_it_is_planned_when_nothing_else_fits_and_keeps_its_word(
    toy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for host in (ss.Offload, ss.WeightOffload):
        monkeypatch.setattr(host, "offers", classmethod(lambda cls, context: ()))
    model, batch, given = step()
    plain = ss.profile(model, batch, **given, accounting="device").peak_bytes
    with pytest.raises(ss.BudgetError, match="no plan fits") as refused:
        ss.plan(model, batch, **given, budget="100 KB", allow="lossless")
    assert "allow 'near'" in str(refused.value.hint)
    budget = refused.value.smallest_bytes - momentum_bytes(model) // 4
    plan = ss.plan(model, batch, **given, budget=budget, allow="lossless,narrow_state")
    assert plan.narrow_state == toy("bf16") and plan.kind == "near-lossless"
    assert any("less lossy plans need" in choice.why for choice in plan.choices)
    certificate = ss.verify(plan, model, [batch], **given)
    assert certificate.ok and certificate["gradients"].error == 0
    made = ss.apply(plan, model, given["optimizer"], loss=given["loss"])
    made(batch)
    measured = made.measure(batch)
    assert measured.peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.01)
    assert measured.peak_bytes <= budget < plain
    states = given["optimizer"].state.values()
    assert {s["momentum_buffer"].dtype for s in states} == {torch.bfloat16}


def test_what_it_refuses_is_not_planned(toy: Any) -> None:
    model, batch, given = step()
    given["optimizer"] = torch.optim.Adam(model.parameters())
    with pytest.raises(ss.InputError, match="Adam has no narrow state"):
        ss.apply([toy("bf16")], model, given["optimizer"], loss=given["loss"])
    plan = ss.plan(model, batch, **given, budget="40 MB", allow="narrow_state")
    assert plan.narrow_state is None


def test_a_batch_is_changed_once(small_images: Any) -> None:
    """Also where a target made the part of it that runs at once."""
    given = {"loss": lambda m, b: m(b[0]).square().mean(), "optimizer": "sgd"}
    whole = ss.Plan([small_images(2), ss.Microbatching(4)])
    target = resolve(TINY, ["8x3x32x32"], plan=whole)
    found = ss.profile(target.model, target.batch, **given, techniques=at_once(whole))
    small = resolve(TINY, ["4x3x16x16"])
    assert found.peak_bytes == ss.profile(small.model, small.batch, **given).peak_bytes


def test_a_changed_batch_is_planned_and_keeps_its_word(small_images: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    given = {"loss": lambda m, b: m(b).square().mean(), "optimizer": optimizer}
    batch = torch.randn(1, 3, 64, 64)
    plan = ss.plan(model, batch, **given, budget="810 KB", allow="lossless,small_images")
    assert plan.small_images == small_images(2) and plan.kind == "lossy"
    made = ss.apply(plan, model, optimizer, loss=given["loss"])
    assert made.measure(batch).peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.01)


def test_a_changed_batch_is_counted_apart_from_one_that_is_as_large(small_images: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
    planner = Planner(model, torch.randn(8, 3, 32, 32), loss=lambda m, b: m(b).square().mean(),
                      optimizer="sgd", accounting="fundamental")  # fmt: skip
    parts, small = Offer(ss.Microbatching(4), ""), Offer(small_images(2), "")
    traces = [planner.estimates._trace(Setting(some)) for some in ((small, parts), (parts,))]
    assert len(set(map(id, traces))) == 2


STUDY = """
[base]
model = "tiny_nets:tiny_linear"
data = "digits"
batch = 200
epochs = 1

[[grid]]
state_type = ["fp32", "bf16"]
"""


CALLS = """
import json, sys
from cli.calling import call

said = []
for words in json.load(sys.stdin):
    done = call(*words)
    if done.status:
        sys.exit(f"{words}: {done.err} {done.raised}")
    said.append(done.out)
json.dump(said, sys.stdout)
"""


@pytest.mark.slow
def test_its_flag_is_on_the_command_line_and_in_studies(tmp_path: Path) -> None:
    """In a process that knows it by its entry point alone, and in those of a study's runs."""
    tiny = ("tiny_nets:tiny_linear", "--data", "digits", "--epochs", "1", "--batch", "200")
    (tmp_path / "toy.toml").write_text(STUDY)
    calls = [
        ("train", "--help"),
        ("profile", "wrn-10-1", "--state-type", "fp32", "--json"),
        ("profile", "wrn-10-1", "--state-type", "bf16", "--json"),
        ("verify", "tiny_nets:tiny_linear", "--input", "8x3x32x32", "--state-type", "bf16",
         "--near", "0.05"),
        ("study", "toy.toml", "--out", "out"),
        ("report", "out"),
        ("train", *tiny, "--state-type", "fp32", "--out", "runs/fp32"),
        ("train", *tiny, "--state-type", "bf16", "--out", "runs/bf16"),
        ("report", "runs", "--out", "loose"),
        ("profile", TINY, "--input", "8x3x32x32", "--shrink", "2", "--json"),
        ("profile", TINY, "--input", "8x3x16x16", "--json"),
    ]  # fmt: skip
    paths = [str(TOY), str(TESTS), str(TESTS.parent / "src")]
    done = subprocess.run(
        [sys.executable, "-c", CALLS], input=json.dumps(calls), cwd=tmp_path, capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    help_text, plain, narrow, *_, shrunk, small = json.loads(done.stdout)
    assert "--state-type" in help_text
    plain, narrow = json.loads(plain), json.loads(narrow)
    assert narrow["optimizer_state_bytes"] * 2 == plain["optimizer_state_bytes"]
    assert narrow["state_type"] == "bf16"
    assert json.loads(shrunk)["peak_bytes"] == json.loads(small)["peak_bytes"]
    table = next((tmp_path / "out").rglob("tables.md")).read_text()
    assert "state type" in table and "bf16" in table
    assert "bf16" in next((tmp_path / "loose").rglob("tables.md")).read_text()
