"""On CUDA: SGD's fused kernel, no synchronization, and a whole step in one graph."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from shoestring.techniques import Checkpointing, Microbatching, Precision
from shoestring.techniques.precision.update import NarrowUpdate
from techniques.precision.precision_helpers import (
    OPTIMIZERS,
    assert_same,
    everything,
    make_step,
    own_state,
)
from techniques.small_models import SMALL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_cuda(batch: Any) -> Any:
    return tuple(t.cuda() for t in batch)


def started(name: str, optimizer: str, *techniques: Any) -> Any:
    torch.manual_seed(0)
    small = SMALL[name]
    model, batch = small.build().cuda(), on_cuda(small.batch())
    made = OPTIMIZERS[optimizer](model.parameters())
    return make_step(model, made, small.loss, *techniques), batch


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_every_model_learns_what_it_learns_in_fp32(name, optimizer, kind):
    (wide, batch), (narrow, _) = started(name, optimizer), started(name, optimizer, Precision(kind))
    wide.use_graph(False)
    start = wide(batch).item()
    narrow(batch)
    for _ in range(24):
        a, b = wide(batch).item(), narrow(batch).item()
    assert abs(a - b) < (0.05 if kind == "fp16" else 0.15) * start


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-plain"])
def test_the_fused_kernel_computes_what_the_copies_do(monkeypatch, optimizer):
    fused, batch = started("mlp", optimizer, Precision("fp16"))
    copied, _ = started("mlp", optimizer, Precision("fp16"))
    copied.use_graph(False)  # told apart from the other by hand, step by step
    for _ in range(10):
        fused(batch)
        with monkeypatch.context() as plain:
            plain.setattr(NarrowUpdate, "_can_fuse", lambda self, work: False)
            plain.setattr(NarrowUpdate, "_has_kernels", lambda self, work: False)
            copied(batch)
    for a, b in zip(fused.model.parameters(), copied.model.parameters(), strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_nothing_waits_for_the_device(optimizer):
    step, batch = started(
        "cnn", optimizer, Precision("fp16"), Microbatching(4, accumulate="compensated")
    )
    step.use_graph(False)
    step(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode itself is called a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("optimizer", [o for o in OPTIMIZERS if o != "sgd-damped"])
def test_an_overflow_changes_nothing(optimizer):
    step, (inputs, labels) = started("mlp", optimizer, Precision("fp16"))
    step((inputs, labels))
    before = everything(step)
    step((inputs * torch.inf, labels))
    assert_same(before, everything(step))
    assert own_state(step)["skipped_steps"] == 1


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("accumulate", ["parameter", "compensated"])
def test_a_step_in_a_graph_is_the_step(optimizer, rounding, accumulate):
    techniques = (
        Precision("fp16", rounding=rounding, growth_interval=4, initial_scale=2.0**12),
        Checkpointing("residual-2*"),
        Microbatching(3, accumulate=accumulate),
    )
    captured, batch = started("residual", optimizer, *techniques)
    eager, _ = started("residual", optimizer, *techniques)
    eager.use_graph(False)
    for _ in range(10):
        a, b = captured(batch).item(), eager(batch).item()
    assert captured.captured and not eager.captured
    assert a == pytest.approx(b, rel=2e-2)
    for key, value in own_state(eager).items():
        assert torch.equal(value, own_state(captured)[key]), key
    for p, q in zip(captured.model.parameters(), eager.model.parameters(), strict=True):
        for key, value in captured.optimizer.state[p].items():
            if value.dim() == 0:
                assert value == eager.optimizer.state[q][key] == 10, key


def test_adam_takes_no_copies():
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8))).cuda()
    made = torch.optim.Adam(model.parameters())
    step = make_step(model, made, lambda m, b: m(b).float().mean(), Precision("fp16"))
    batch = torch.randn(4, 1024, device="cuda")
    for _ in range(2):
        step(batch)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.cuda.synchronize()
    resident = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step._setup.update()
    assert torch.cuda.max_memory_allocated() - resident < 2**16
