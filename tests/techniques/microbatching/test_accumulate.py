"""Kahan's correction: what it wins in FP16. Small gradients added together: the same bits."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from shoestring import Plan
from shoestring.errors import UnprovenWarning
from shoestring.step.apply import apply
from shoestring.step.trace_step import trace_plan
from shoestring.techniques import Checkpointing, Microbatching, Precision, Sparsity
from shoestring.techniques.microbatching import accumulate as module
from tiers import slow_but

torch.set_num_threads(1)
ENOUGH = module.WAITING


def sum_of(parts: torch.Tensor, dtype: torch.dtype, accumulate: str) -> torch.Tensor:
    """The gradient of Σ parts·w, one row at a time."""
    model = nn.Linear(parts.shape[1], 1, bias=False).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.clone()))

    def loss(m: nn.Module, b: Any) -> torch.Tensor:
        return m(b).float().sum()

    chosen = Microbatching(1, accumulate=accumulate, units="sum")
    apply([chosen], model, optimizer, loss=loss)(parts.to(dtype))
    return seen[0][0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_compensated_sums_are_as_good_as_their_type(dtype):
    torch.manual_seed(0)
    parts = torch.rand(256, 500).to(dtype)
    exact = parts.double().sum(0)
    errors = {
        kind: ((sum_of(parts, dtype, kind).double() - exact).abs() / exact).mean().item()
        for kind in ("parameter", "compensated")
    }
    assert errors["compensated"] < errors["parameter"] / 5
    assert errors["compensated"] < torch.finfo(dtype).eps


def test_gradients_outside_of_a_step_are_left_alone():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(m: nn.Module, b: Any) -> torch.Tensor:
        if b.isnan().any():
            raise RuntimeError("stop")
        return m(b).mean()

    step = apply([Microbatching(1, accumulate="compensated")], model, optimizer, loss=loss)
    batch = torch.randn(4, 3)
    step(batch)
    assert model.weight.grad is None
    loss(model, batch).backward()
    assert model.weight.grad is not None
    optimizer.zero_grad()

    broken = batch.clone()
    broken[2] = torch.nan
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="stop"):
        step(broken)
    step(batch)  # nothing of the broken step is in it
    expected = before - 0.1 * batch.mean(0)
    assert torch.allclose(model.weight[0], expected[0], atol=1e-6)


def test_a_parameter_without_gradient_stays_without():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    before = model.unused.weight.detach().clone()
    step = apply(
        [Microbatching(2, accumulate="compensated")],
        model,
        optimizer,
        loss=lambda m, b: m(b).mean(),
    )
    step(torch.randn(5, 3))
    assert torch.equal(before, model.unused.weight)


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 40, 3, padding=1),
        nn.BatchNorm2d(40),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(40, 5),
    )


def trained(*plan: Any, device: str = "cpu") -> tuple[nn.Module, dict[str, int]]:
    """After three steps, and how often what ran in the last."""
    model = small_network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = apply(plan, model, optimizer, loss=lambda m, b: m(b).float().square().mean())
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        batch = torch.randn(10, 3, 6, 6, generator=draw).to(device)
        with torch.profiler.profile(acc_events=True) as profile:  # or it warns
            step(batch.half() if step.plan.precision is not None else batch)
    assert all(p.grad is None for p in model.parameters())
    return model, {event.key: event.count for event in profile.key_averages()}


@pytest.mark.parametrize("waiting", slow_but(1, [ENOUGH, 1, 200]))
@pytest.mark.parametrize(
    "more",
    [
        (),
        (Precision("fp16"),),
        (Sparsity(0.4), Precision("fp16"), Checkpointing("no-bn")),
    ],
    ids=["fp32", "fp16", "all"],
)
def test_added_together_sums_are_the_same(monkeypatch, more, waiting):
    monkeypatch.setattr(module, "DEVICES", ())
    plainly, counts = trained(*more, Microbatching(2))
    monkeypatch.setattr(module, "DEVICES", ("cpu",))
    monkeypatch.setattr(module, "WAITING", waiting)
    monkeypatch.setattr(module, "SMALL", 100)  # the second convolution stays by itself
    together, fewer = trained(*more, Microbatching(2))
    assert all(
        torch.equal(a, b)
        for a, b in zip(plainly.state_dict().values(), together.state_dict().values(), strict=True)
    )
    small = sum(1 for p in together.parameters() if p.numel() <= 100)
    assert 0 < small < len(list(together.parameters()))
    key = "aten::_foreach_add_"
    calls = fewer.get(key, 0) - counts.get(key, 0)
    kinds = len({p.dtype for p in together.parameters() if p.numel() <= 100})
    if waiting == ENOUGH:
        assert calls == 4 * kinds  # five microbatches: the first adds nothing
    else:
        assert calls > 4 * kinds
    assert fewer.get("aten::clone", 0) == counts.get("aten::clone", 0)  # taken as they are


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_added_together_sums_are_the_same_on_a_gpu(monkeypatch):
    plan = Sparsity(0.4), Precision("fp16"), Microbatching(2)
    together, _ = trained(*plan, device="cuda")
    monkeypatch.setattr(module, "DEVICES", ())
    plainly, _ = trained(*plan, device="cuda")
    for a, b in zip(plainly.state_dict().values(), together.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("first", [True, False])
def test_a_gradient_somebody_watches_stays_with_its_parameter(monkeypatch, first):
    monkeypatch.setattr(module, "DEVICES", ("cpu",))
    model = small_network()
    seen = []

    def watch() -> None:
        model[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))

    if first:
        watch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = apply([Microbatching(5)], model, optimizer, loss=lambda m, b: m(b).square().mean())
    if not first:
        watch()
    optimizer.register_step_pre_hook(lambda *_: seen.append(model[1].weight.grad.clone()))
    with pytest.warns(UnprovenWarning, match="gradient of 1.weight is called for each of 2 parts"):
        step(torch.randn(10, 3, 6, 6))
    assert len(seen) == 3 and torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("plan", [Microbatching(2), Microbatching(2, accumulate="compensated")])
def test_nothing_is_held_when_nobody_holds_it(monkeypatch, plan):
    monkeypatch.setattr(module, "DEVICES", ("cpu",))
    model = small_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = apply([plan], model, optimizer, loss=lambda m, b: m(b).square().mean())
    step(torch.randn(6, 3, 6, 6))
    held = [weakref.ref(thing) for thing in (*model.parameters(), optimizer)]
    del model, optimizer, step
    gc.collect()
    assert not any(ref() is not None for ref in held)


def test_a_part_of_something_large_does_not_wait(monkeypatch):
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Parameter(torch.ones(40_000)), nn.Parameter(torch.ones(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            waiting.append(step._setup.split.__self__._bytes)
            return torch.cat([self.large, self.small]) * x

    waiting: list[int] = []
    monkeypatch.setattr(module, "DEVICES", ("cpu",))
    model = Joined()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = Microbatching(1, units="examples")
    step = apply([chosen], model, optimizer, loss=lambda m, b: m(b).mean())
    step(torch.ones(4, 40_005))
    assert waiting == [0, 0, 0, 0]
    assert torch.equal(model.small.detach(), torch.full((5,), 1 - 0.1 / 40_005))


def test_sparse_and_dense_gradients_of_one_parameter(monkeypatch):
    def after(devices: tuple[str, ...]) -> torch.Tensor:
        monkeypatch.setattr(module, "DEVICES", devices)
        torch.manual_seed(0)
        model = nn.Embedding(6, 3, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(m: nn.Module, b: torch.Tensor) -> torch.Tensor:
            used = m(b).square().mean()
            return used + m.weight.square().mean() if int(b[0, 0]) % 2 else used

        step = apply([Microbatching(1, units="examples")], model, optimizer, loss=loss)
        step(torch.tensor([[0], [1], [2], [3]]))
        return model.weight.detach()

    torch.testing.assert_close(after(("cpu",)), after(()))


def test_a_prediction_finds_gradients_where_they_are(monkeypatch):
    model, batch = small_network(), torch.randn(10, 3, 6, 6)
    parameters = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(module, "DEVICES", devices)
        trace = trace_plan(
            Plan.of([Microbatching(2)]),
            model,
            batch,
            loss=lambda m, b: m(b).square().mean(),
            optimizer="sgd",
        )
        parameters.append([(p.name, p.has_gradient) for p in trace.parameters])
    assert parameters[0] == parameters[1] and all(there for _, there in parameters[0])


def test_a_step_that_fails_leaves_no_sums(monkeypatch):
    monkeypatch.setattr(module, "DEVICES", ("cpu",))

    def loss(m: nn.Module, b: torch.Tensor) -> torch.Tensor:
        if b.isnan().any():
            raise RuntimeError("stop")
        return m(b).square().mean()

    def after(*batches: torch.Tensor) -> list[torch.Tensor]:
        model = small_network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = apply([Microbatching(2)], model, optimizer, loss=loss)
        for batch in batches:
            if batch.isnan().any():
                with pytest.raises(RuntimeError, match="stop"):
                    step(batch)
                gc.collect()
                assert not step._setup.split.__self__._sums
            else:
                step(batch)
        return [p.detach() for p in model.parameters()]

    good = torch.randn(6, 3, 6, 6)
    broken = good.clone()
    broken[4] = torch.nan
    assert all(map(torch.equal, after(good), after(broken, good)))
