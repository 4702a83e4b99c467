"""`torchrun -m shoestring train`: from two ranks to one and back; a script of one's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoestring.lab.runs import snapshot
from shoestring.techniques.distance import relative_error
from shoestring.lab.runs.command import Call, start

ROOT = Path(__file__).parents[3]
CALL = Call(
    model="wrn-10-0.5", data="digits", epochs=1, batch=24, techniques={"microbatch": 6},
    learning_rate=0.02, device="cpu",
)  # fmt: skip
"""Few updates of it, at a small rate: rounding grows up to tenfold with every one."""
FLAGS = ("wrn-10-0.5", "--data", "digits", "--epochs", "1", "--batch", "24", "--microbatch", "6")
MORE_FLAGS = ("--lr", "0.02", "--device", "cpu")


def torchrun(*arguments: str) -> str:
    """What two ranks print on stdout."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *launcher, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def train_on_two(folder: Path, updates: int, *more: str) -> None:
    stop = ("--stop-after", f"{updates} steps", "--out", str(folder))
    shown = torchrun("-m", "shoestring", "train", *FLAGS, *MORE_FLAGS, *stop, *more)
    assert shown.count("wrn-10-0.5") == 1  # one rank speaks


def train_alone(folder: Path, updates: int, **more: Any) -> None:
    start(replace(CALL, out=str(folder), stop_after=f"{updates} steps", **more))


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
    train_alone(folder, 4, snapshot_every=2)
    return folder


@pytest.mark.slow
def test_from_two_ranks_to_one(alone: Path, tmp_path: Path) -> None:
    train_on_two(tmp_path / "run", 2, "--parallel", "ddp")
    train_alone(tmp_path / "run", 4, resume=True)
    expected, found = tensors(alone, 4), tensors(tmp_path / "run", 4)
    assert relative_error([(expected[k], found[k]) for k in expected]) < 1e-4


@pytest.mark.slow
def test_from_one_rank_to_two(alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for path in alone.iterdir():
        if "000000004" not in path.name:  # as it was after two updates
            (folder / path.name).write_bytes(path.read_bytes())
    train_on_two(folder, 4, "--resume", "--parallel", "fsdp")
    expected, found = tensors(alone, 4), tensors(folder, 4)
    assert relative_error([(expected[k], found[k]) for k in expected]) < 1e-4


@pytest.mark.slow
def test_the_example_runs() -> None:
    shown = torchrun(str(ROOT / "examples" / "torchrun.py"), "ddp").splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in shown if line.startswith("step")]
    assert losses == sorted(losses, reverse=True) and len(losses) == 4
    assert shown[-1].endswith("numbers to save")
