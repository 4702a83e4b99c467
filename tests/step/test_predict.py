"""Predicted for CUDA on a machine without one, beside what was measured on an H200."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shoestring import Checkpointing, Microbatching, Plan, Precision, Sparsity, kernels
from shoestring.lab.models import builtin
from shoestring.lab.records.run import read
from shoestring.lab.runs.settings import build_model
from shoestring.lab.tasks.token_batches import Shape, TextFeed
from shoestring.step.predict import predict_step
from shoestring.trace.cuda import CudaKernels
from shoestring.trace.fakes import make_optimizer
from tiers import slow_but

ROOT = Path(__file__).parents[2]
LEAN = [Precision("fp16"), Checkpointing("residual-2*")]


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


def test_a_run_with_simulated_microbatches(no_workspaces):
    """The whole minibatch is there at once."""
    (folder,) = (ROOT / "results/cifar10/runs").glob("*-seed0-4ea2e4841d")
    parts = [Sparsity(0.2), Precision("fp16"), Microbatching(10, simulated=True)]
    measured = read(folder)[-1]["measured_peak_bytes"]
    assert predicted("wrn-28-2-pool", parts) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(
    "row", slow_but(1, [(1, 100), (1, 10), (0.3, 10), (0.2, 10), (0.2, 4), (0.1, 4)])
)
def test_a_step_of_the_benchmark(no_workspaces, row):
    density, size = row
    text = (ROOT / "benchmarks/results/measured_memory_h200.json").read_text()
    rows = {row["name"]: row["peak_bytes"] for row in json.loads(text)["rows"]}
    measured = rows[f"density {density} microbatch {size}, channels_last"]
    parts = LEAN if size == 100 else [*LEAN, Microbatching(size)]
    parts = parts if density == 1 else [Sparsity(density), *parts]
    assert predicted("wrn-28-2", parts) == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("plan", ["lean, cheap*2, keep*9", "fp16 + cheap*3, keep*9"])
def test_a_planned_step_to_a_thousandth(monkeypatch, plan):
    """Contiguous images, with cuBLAS's workspaces: as `plan_holds` measured it."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE", raising=False)
    table = (ROOT / "benchmarks/results/plan_holds_h200.txt").read_text().splitlines()
    row = next(line.split() for line in table if line.startswith("wrn-28-2 ") and plan in line)
    measured = float(row[4]) * 1e6
    schedule = tuple(plan.removeprefix("fp16 + ").split(", "))
    blocks = [f"group{g}.{b}" for g in (1, 2, 3) for b in range(4)]
    parts = [Precision("fp16")] if plan.startswith("fp16") else []
    parts += [Checkpointing("per-block", blocks=blocks, schedule=schedule)]
    known = builtin("wrn-28-2")
    model = known.build()
    optimizer = make_optimizer("sgd", model, {id(p): p for p in model.parameters()})
    step = predict_step(
        parts, model, known.batch(100), loss=known.loss, optimizer=optimizer, device="cuda"
    )
    assert step.peak_bytes == pytest.approx(measured, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_on_text(no_workspaces, precision):
    runs = [read(folder) for folder in (ROOT / "results/translation/multi30k/runs").glob("*seed0*")]
    (start, *_, end) = next(
        run for run in runs if run[0]["settings"]["plan"]["precision"]["kind"] == precision
    )
    settings, about = start["settings"], start["data"]
    known = builtin(settings["model"])
    source, target = about["vocabulary"]
    model = known.build(source_vocabulary=source, target_vocabulary=target, dropout=0.3)
    seen = SimpleNamespace(shapes=[Shape(*shape) for shape in about["batch_shapes"]])
    adam = torch.optim.Adam(model.parameters(), fused=True, capturable=precision == "fp32")
    plan = Plan.from_dict(settings["plan"])
    batch = TextFeed.sample(seen, plan.microbatching.size)  # type: ignore[arg-type]
    found = predict_step(plan, model, batch, loss=known.loss, optimizer=adam, device="cuda")
    # It was measured with a region for each layer; now each of its connections is one, and keeps
    # its input: 1 more in each of 4 encoder layers, 2 more in each of 4 decoder layers.
    kept = 12 * plan.microbatching.size * 256 * (2 if precision == "fp16" else 4)
    assert found.peak_bytes - kept == pytest.approx(end["measured_peak_bytes"], rel=0.025)


def test_with_workspaces_it_is_as_much_more(no_workspaces, monkeypatch):
    without = predicted("wrn-10-1", [*LEAN, Microbatching(10)])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    more = predicted("wrn-10-1", [*LEAN, Microbatching(10)]) - without
    assert more == 2 * (2 * 4096 + 8 * 16) * 1024


def test_where_there_is_no_triton_it_is_the_same(no_workspaces, monkeypatch):
    """The GPU that it is predicted for has it."""
    parts = [Sparsity(0.3), *LEAN, Microbatching(10)]
    here = predicted("wrn-10-1", parts)
    monkeypatch.setattr(kernels, "has_triton", lambda: False)
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [n for n in sys.modules if n.startswith("shoestring.") and n.endswith("kernels")]:
        if name != kernels.__name__:
            monkeypatch.delitem(sys.modules, name)
    assert predicted("wrn-10-1", parts) == here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not kernels.expected()


def test_other_fake_tensors_are_no_prediction():
    """Whoever traces a model for CUDA gets the functions, not the room for their results."""
    with FakeTensorMode():
        fake = torch.empty(2, device="cuda")
    assert not kernels.in_prediction(fake)
    with CudaKernels():
        assert kernels.in_prediction(fake) and not kernels.in_prediction(torch.empty(2))
