"""Predicted for CUDA on a machine without one, beside what was measured on an H200."""

import json
from pathlib import Path

import pytest
import torch

from shoestring import Checkpointing, Microbatching, Plan, Precision, Sparsity
from shoestring.records.run import read
from shoestring.train.predict import predict_step
from shoestring.train.settings import build_model

ROOT = Path(__file__).parents[2]
LEAN = [Precision("fp16"), Checkpointing("residual-2*"), Microbatching(10)]


@pytest.fixture
def no_workspaces(monkeypatch):
    """As training has it, and as it was when it was measured."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "0")


def predicted(name, parts):
    model, loss = build_model(name, 10)
    images = torch.zeros(100, 3, 32, 32, dtype=torch.float16)
    return predict_step(
        Plan.of(parts),
        model.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        (images.to(memory_format=torch.channels_last), torch.zeros(100, dtype=torch.int64)),
        loss=loss,
        optimizer=torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True
        ),
        device="cuda",
    ).peak_bytes


def test_a_run_in_fp16(no_workspaces):
    """The run holds its minibatch a second time, and the order of an epoch, 1.8 MB."""
    (folder,) = (ROOT / "results/cifar10/runs").glob("wrn-28-2-pool-test-seed0-95fabc91f0")
    measured = read(folder)[-1]["measured_peak_bytes"]
    assert predicted("wrn-28-2-pool", [Precision("fp16")]) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("density", [1, 0.3])
def test_a_step_of_the_benchmark(no_workspaces, density):
    text = (ROOT / "benchmarks/results/measured_memory_h200.json").read_text()
    rows = {row["name"]: row["peak_bytes"] for row in json.loads(text)["rows"]}
    measured = rows[f"density {density} microbatch 10, channels_last"]
    parts = LEAN if density == 1 else [Sparsity(density), *LEAN]
    assert predicted("wrn-28-2", parts) == pytest.approx(measured, rel=0.05)


def test_with_workspaces_it_is_as_much_more(no_workspaces, monkeypatch):
    without = predicted("wrn-10-1", LEAN)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert predicted("wrn-10-1", LEAN) - without == 2 * (2 * 4096 + 8 * 16) * 1024
