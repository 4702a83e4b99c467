"""Plans run: in 16 bits where the step runs in them, and without misleading hooks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import shoestring as ss
from shoestring.techniques.offers import Context
from shoestring.techniques.plan import Plan
from shoestring.techniques.precision.trial import runs_in
from shoestring.trace.graph import Trace
from shoestring.trace.tracing import trace_model
from tiers import slow_but


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers)


def by_distance(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """cdist has no 16-bit kernel on the CPU."""
    made = model(x)
    with torch.no_grad():
        apart = torch.cdist(made, made.roll(1, 0), p=1)
    return (made.sum(1, keepdim=True) * apart).mean()


def by_product(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    made = model(x)
    return (made @ made.detach().roll(1, 0).T).mean()


@pytest.mark.parametrize(
    ("loss", "runs"), slow_but(1, [(by_product, True), (by_distance, False)], several=True)
)
def test_what_has_no_kernel_is_not_planned(
    loss: Any, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ss.Offload, "offers", classmethod(lambda cls, context: ()))  # no way out
    model, x = net(), torch.randn(48, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given: dict[str, Any] = {"loss": loss, "optimizer": optimizer}
    budget = int(0.8 * ss.measure(model, x, **given).peak_bytes)
    try:
        plan = ss.plan(model, x, budget=budget, **given)
    except ss.BudgetError:
        assert not runs
        return
    assert runs, plan.short()
    ss.apply(plan, model, optimizer, loss=loss)(x)


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def clip(parameters: list[torch.Tensor], *_: Any) -> None:
    nn.utils.clip_grad_norm_(parameters, 1e-3)


def clamped(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.clamp_(-1e-5, 1e-5)


@pytest.mark.parametrize("on", ["step", "sum"])
def test_hooks_on_gradients_find_what_plain_training_has(on: str) -> None:
    """All of them before a step, or each when it is complete."""
    ends = []
    for planned in (False, True):
        model, x = net(), torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        if on == "step":
            optimizer.register_step_pre_hook(partial(clip, list(model.parameters())))
        else:
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(clamped)
        if planned:
            given: dict[str, Any] = {"loss": plain, "optimizer": optimizer}
            budget = int(0.8 * ss.measure(model, x, **given).peak_bytes)
            plan = ss.plan(model, x, budget=budget, allow="lossless", **given)
            ss.apply(plan, model, **given)(x)
        else:
            plain(model, x).backward()
            optimizer.step()
        ends.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(ends[1], ends[0])


class WithToken(nn.Module):
    """A token of zeros before the others: 1 / deviation is a million there, beyond FP16."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.norm = nn.Parameter(torch.zeros(64)), nn.LayerNorm(64, eps=1e-12)
        self.layers = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.norm(torch.cat([self.token.expand(1, 64), x])))


def context(model: nn.Module, loss: Any) -> Context:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(48, 64)

    def trace_step(plan: Plan, **others: Any) -> Trace:
        return trace_model(model, x, loss=loss, **others)

    return Context(
        model, x, optimizer, trace_step, device="cpu", examples=48, batch_norm=False, loss=loss
    )


def by_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def test_no_fp16_where_gradients_are_infinite_at_any_scale() -> None:
    assert not runs_in(context(WithToken(), by_square), torch.float16)
    assert runs_in(context(WithToken(), by_square), torch.bfloat16)
    assert runs_in(context(net(), by_square), torch.float16)


def test_no_fp16_where_a_hook_would_see_scaled_gradients() -> None:
    hooked, given = net(), context(net(), by_square)
    hooked[0][0].weight.register_hook(lambda g: g.clamp(-1, 1))
    assert not runs_in(context(hooked, by_square), torch.float16)
    assert runs_in(context(hooked, by_square), torch.bfloat16)
    given.optimizer.register_step_pre_hook(lambda *_: None)
    assert not runs_in(given, torch.float16)


def test_no_fp16_where_only_the_whole_loss_overflows() -> None:
    """The CPU sums a cross-entropy in FP16: too many pixels for 65,504, though four are not."""

    def by_pixel(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        scores = model(x).reshape(len(x), 2, 32).repeat(1, 1, 64)
        labels = torch.zeros(len(x), 2048, dtype=torch.long)
        return nn.functional.cross_entropy(scores, labels)

    assert not runs_in(context(net(), by_pixel), torch.float16)
    assert runs_in(context(net(), by_pixel), torch.bfloat16)


def test_no_16_bits_beside_a_network_in_fp32_that_the_loss_holds() -> None:
    judge = net().requires_grad_(False)
    given = context(net(), lambda model, x: judge(model(x)).square().mean())
    assert not runs_in(given, torch.bfloat16)
    assert not runs_in(given, torch.float16)


def test_no_bf16_where_it_changes_gradients() -> None:
    """Each BatchNorm of a deep network multiplies what the ones before it rounded."""
    torch.manual_seed(0)
    layers = [(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(12)]
    deep = nn.Sequential(*(nn.Sequential(*layer) for layer in layers))
    given = context(deep, by_square)
    for kind, type_, near in (("bf16", torch.bfloat16, False), ("fp16", torch.float16, True)):
        certificate = ss.verify(
            [ss.Precision(kind)], deep, [given.batch], loss=by_square,
            optimizer=given.optimizer, steps=1,
        )  # fmt: skip
        assert certificate.ok is near, certificate
        assert runs_in(given, type_) is near


class Keeps(nn.Module):
    """Its weight is the result of a hook, and the layer remembers what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = prune.random_unstructured(nn.Linear(64, 64), "weight", 0.5)
        self.made: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.made = [torch.tanh(self.layer(x))]
        return x + self.made[0]


def test_a_model_that_keeps_results_is_planned_and_verified() -> None:
    """`copy.deepcopy` refuses tensors with a graph: masked weights, features, attention maps."""
    model, x = nn.Sequential(*(Keeps() for _ in range(4))), torch.randn(256, 64)
    plain(model, x).backward()  # it was used before
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"loss": plain, "optimizer": optimizer}
    profile = ss.profile(model, x, accounting="device", **given)
    plan = ss.plan(model, x, budget=int(0.8 * profile.peak_bytes), allow="lossless", **given)
    assert not plan.by_running
    assert ss.verify(plan, model, [x], steps=1, **given).ok
