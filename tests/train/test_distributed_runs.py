"""`torchrun -m shoestring train`: from two ranks to one and back; a script of one's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoestring.train import snapshot
from shoestring.train.certificate import relative_error

ROOT = Path(__file__).parents[2]
RUN = ("wrn-10-0.5", "--data", "digits", "--epochs", "1", "--batch", "24", "--microbatch", "6")
FEW = ("--lr", "0.02", "--device", "cpu")
"""Few updates, at a small rate: rounding grows tenfold with every update of so small a network."""


def command(*arguments: str, ranks: int = 1) -> str:
    """What it prints; with several ranks under torchrun."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    launcher = torchrun if ranks > 1 else ()
    done = subprocess.run(
        [sys.executable, *launcher, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(folder: Path, updates: int, *more: str, ranks: int = 1) -> None:
    stop = ("--stop-after", f"{updates} steps", "--out", str(folder))
    shown = command("-m", "shoestring", "train", *RUN, *FEW, *stop, *more, ranks=ranks)
    assert shown.count("wrn-10-0.5") == 1  # one rank speaks


def tensors(folder: Path, updates: int) -> dict[str, torch.Tensor]:
    """Weights and momentum of the last snapshot."""
    state = snapshot.load_latest(folder)[0]
    assert state is not None and state["done"] == updates
    step = state["step"]
    moments = {f"momentum {i}": s["momentum_buffer"] for i, s in step["optimizer"]["state"].items()}
    weights = {k: v for k, v in step["model"].items() if k.endswith(("weight", "bias"))}
    assert len(weights) == len(moments)
    return {**weights, **moments}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process: two updates, and two more."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    train(folder, 4, "--snapshot-every", "2")
    return folder


def test_from_two_ranks_to_one(alone: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", 2, "--parallel", "ddp", ranks=2)
    train(tmp_path / "run", 4, "--resume")
    expected, found = tensors(alone, 4), tensors(tmp_path / "run", 4)
    assert relative_error([(expected[k], found[k]) for k in expected]) < 1e-4


def test_from_one_rank_to_two(alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for path in alone.iterdir():
        if "000000004" not in path.name:  # as it was after two updates
            (folder / path.name).write_bytes(path.read_bytes())
    train(folder, 4, "--resume", "--parallel", "fsdp", ranks=2)
    expected, found = tensors(alone, 4), tensors(folder, 4)
    assert relative_error([(expected[k], found[k]) for k in expected]) < 1e-4


def test_the_example_runs() -> None:
    shown = command(str(ROOT / "examples" / "torchrun.py"), "ddp", ranks=2).splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in shown if line.startswith("step")]
    assert losses == sorted(losses, reverse=True) and len(losses) == 4
    assert shown[-1].endswith("numbers to save")
