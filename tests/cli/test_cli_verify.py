"""`shoestring verify`: what it prints where, its exit status, and one line for every mistake."""

from __future__ import annotations

import json
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoestring.cli.main import main
from shoestring.techniques import Checkpointing

FACTORIES = """
    import torch
    from torch import nn


    def build():
        layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(4)]
        return nn.Sequential(*layers)


    def words():
        return nn.Sequential(nn.Embedding(2, 4), nn.Linear(4, 2))


    def longer():
        return nn.Sequential(nn.Embedding(2, 4), nn.Linear(4, 2), nn.Hardtanh(-0.1, 0.1))


    def total(model, batch):
        return model(*batch).square().sum()


    def mixed(model, batch):
        made = model(*batch)
        return (made * made[torch.randperm(len(made))]).mean()
"""


@dataclass(frozen=True)
class Ran:
    """What a call left behind."""

    status: int
    out: str
    err: str

    @property
    def said(self) -> list[str]:
        """Lines on stderr that are not progress."""
        return [line for line in self.err.splitlines() if not line.startswith("verifying ")]

    @property
    def data(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        assert self.out.count("\n") == 1, self.err
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture(scope="module", autouse=True)
def factories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on the import path with the module `verify_factories`."""
    folder = tmp_path_factory.mktemp("verify")
    (folder / "verify_factories.py").write_text(textwrap.dedent(FACTORIES))
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("verify_factories", None)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the command line in this process."""

    def call(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["shoestring", *arguments])
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main() replaces it
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        return Ran(int(left.value.code or 0), captured.out, captured.err)

    return call


BUILD = "verify verify_factories:build --input 6x4"


def test_lossless_as_a_table(run: Run) -> None:
    ran = run(*BUILD.split(), "--checkpoint", "every-2")
    assert (ran.status, ran.said) == (0, [])
    lines = [line.split() for line in ran.out.splitlines()]
    assert ["verify_factories:build", "·", "6", "examples", "·", "sgd"] in lines
    for what in ("loss", "gradients", "buffers", "parameters"):
        assert [what, "equal", "equal"] in lines
    assert ["verified"] in lines
    assert "peak: predicted" in ran.out


def test_flags_reach_the_plan(run: Run) -> None:
    flags = "--density 0.5 --precision bf16 --checkpoint no-bn --microbatch 3 --steps 2 --json"
    ran = run(*BUILD.split(), *flags.split(), "--optimizer", "adam")
    data = ran.data
    assert ran.status == 0
    assert data["ok"] is True
    assert data["plan"] == {
        "sparsity": {"density": 0.5},
        "precision": {"kind": "bf16"},
        "checkpointing": {"strategy": "no-bn"},
        "microbatching": {"size": 3, "units": "examples"},
    }
    assert (data["batch"], data["batch_unit"], data["optimizer"]) == (6, "examples", "adam")
    assert data["steps"] == 2
    assert data["checkpointing"]["found"] == "equal"
    assert data["buffers"]["claimed"] == "lossy"
    for key in ("predicted_peak_bytes", "measured_peak_bytes", "plain_peak_bytes"):
        assert type(data[key]) is int


def test_a_plan_from_a_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('[checkpointing]\nstrategy = "residual-1"\nblocks = ["0", "1"]\n')
    ran = run(*BUILD.split(), "--plan", str(path), "--json")
    assert ran.status == 0
    assert ran.data["plan"]["checkpointing"] == {"strategy": "residual-1", "blocks": ["0", "1"]}


def test_integers_are_zero_or_one(run: Run) -> None:
    ran = run("verify", "verify_factories:words", "--input", "6x3:int64", "--precision", "fp16")
    assert (ran.status, ran.said) == (0, [])


def test_a_built_in_model(run: Run) -> None:
    ran = run(*"verify wrn-10-0.5 --checkpoint residual-1 --steps 1 --json".split())
    assert ran.status == 0
    assert (ran.data["batch"], ran.data["batch_unit"]) == (8, "images")


def test_a_batch_of_two_microbatches(run: Run) -> None:
    ran = run(*"verify wrn-10-0.5 --microbatch 5 --steps 1 --json".split())
    assert ran.data["batch"] == 10
    assert ran.data["plan"] == {"microbatching": {"size": 5, "units": "1 != -100"}}


@pytest.mark.slow
def test_tokens(run: Run) -> None:
    flags = "--microbatch 250 --checkpoint residual-1 --steps 1 --json"
    ran = run("verify", "dc-transformer-width-64-encoder-2-decoder-2", *flags.split())
    assert ran.status == 0
    assert (ran.data["batch"], ran.data["batch_unit"]) == (500, "tokens")
    assert ran.data["plan"]["microbatching"] == {
        "size": 250,
        "unit": "tokens",
        "units": "target_out != 1",
    }


def test_status_one_when_a_lossless_claim_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that moves the running statistics once more."""
    plain = Checkpointing.apply

    def twice(self: Any, setup: Any) -> None:
        plain(self, setup)
        inner = setup.run
        setup.run = lambda batch: (inner(batch), inner(batch))[1]

    monkeypatch.setattr(Checkpointing, "apply", twice)
    ran = run(*BUILD.split(), "--checkpoint", "every-2")
    assert ran.status == 1
    assert "NOT verified" in ran.out and "BROKEN" in ran.out
    assert ran.said[0].startswith("VerificationError: buffers claimed equal, found differs")
    assert ran.said[1].startswith("hint: ")
    ran = run(*BUILD.split(), "--checkpoint", "every-2", "--json")
    assert ran.status == 1
    assert ran.data["ok"] is False and ran.data["buffers"]["ok"] is False


def test_units_of_a_plan_are_compared(run: Run, tmp_path: Path) -> None:
    """A summed loss splits by itself; by examples it does not."""
    command = "verify verify_factories:words --input 6x3:int64 --loss verify_factories:total"
    assert run(*command.split(), "--microbatch", "2").status == 0
    plan = tmp_path / "plan.toml"
    plan.write_text('[microbatching]\nsize = 2\nunits = "examples"\n')
    ran = run(*command.split(), "--plan", str(plan))
    assert ran.status == 1
    assert "does not split" in ran.said[1]


def test_another_model_to_compare_with(run: Run) -> None:
    command = "verify verify_factories:words --input 6x3:int64 --loss verify_factories:total"
    ran = run(*command.split(), "--against", "verify_factories:words")
    assert ran.status == 0 and "beside the model given" in ran.out
    ran = run(*command.split(), "--against", "verify_factories:longer")
    assert ran.status == 1 and "loss claimed within rounding, found differs" in ran.said[0]


def test_what_is_unproven_must_be_accepted_by_name(run: Run) -> None:
    command = "verify verify_factories:words --input 6x3:int64 --loss verify_factories:mixed"
    ran = run(*command.split(), "--microbatch", "2", "--json")
    assert ran.status == 1 and ran.data["gradients"]["found"] == "UNPROVEN"
    rows = ("loss", "gradients", "optimizer state", "parameters")
    accepted = [word for row in rows for word in ("--accept", row)]
    assert run(*command.split(), "--microbatch", "2", *accepted).status == 0


MISTAKES = {
    "verify wnr-10-1": ("'wnr-10-1'", "wrn-10-1"),
    "verify verify_factories:build": ("shapes of its inputs", "--input"),
    f"{BUILD} --precision fp8": ("'fp8'", "fp32, fp16, bf16"),
    f"{BUILD} --density 2": ("density 2 ", "0.3"),
    f"{BUILD} --checkpoint sqrt": ("'sqrt'", "residual-M*"),
    f"{BUILD} --microbatch 0": ("microbatch 0", ""),
    f"{BUILD} --microbatch 7": ("no microbatches of 7", "--batch"),
    f"{BUILD} --optimizer none": ("optimizer", "sgd"),
    f"{BUILD} --optimizer sgdd": ("'sgdd'", "sgd"),
    f"{BUILD} --precision fp16 --steps 0": ("0 steps", "from 1"),
    f"{BUILD} --plan nowhere.toml": ("cannot read the plan nowhere.toml", "-o FILE"),
    f"{BUILD} --plan nowhere.toml --density 0.3": ("--plan and --density", "plan's file"),
    "verify verify_factories:build --input 6x5 --precision fp16": (
        "failed on this batch",
        "training",
    ),
    "verify verify_factories:words --input 6x3 --precision fp16": (
        "failed on this batch",
        "training",
    ),
    "verify dc-transformer --microbatch 50 --batch 100": ("1 × 100 tokens", "--batch"),
    "verify wrn-10-1 --input 2x4": ("wrn-10-1", "--batch"),
    BUILD: ("nothing to verify", "--plan"),
}


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes(run: Run, command: str) -> None:
    """One line with the numbers, one with the way out, status 2, no data."""
    message, hint = MISTAKES[command]
    ran = run(*command.split())
    assert (ran.status, ran.out) == (2, "")
    assert len(ran.said) == 2, ran.err
    assert ran.said[0].startswith("InputError: ") and message in ran.said[0]
    assert hint in ran.said[-1]


def test_help(run: Run) -> None:
    ran = run("verify", "--help")
    assert ran.status == 0
    for option in ("--plan", "--density", "--microbatch", "--steps", "--json"):
        assert option in ran.out
