"""A model that cannot be traced is run: its plan was measured, and nothing else changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import nn

import shoestring as ss
from shoestring.torch_private.fake_tensors import FakeTensorMode
from tiers import slow_but

WIDE, ROWS = 24, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, WIDE), nn.Linear(WIDE, 5)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


class Clipped(torch.autograd.Function):
    """Data-dependent control flow in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if float(gradient.norm()) < 1e6 else gradient / 2


class Clipping(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = Clipped.apply(layer(x))
        return self.leave(x)


class InNumpy(torch.autograd.Function):
    """NumPy computes, and its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        made = torch.from_numpy(np.tanh(x.detach().numpy()))
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (made,) = ctx.saved_tensors
        return gradient * torch.from_numpy(1 - made.numpy() ** 2)


class Exiting(Plain):
    """An early exit behind it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = InNumpy.apply(self.enter(x))
        for layer in self.layers:
            x = layer(x)
            if self.leave(x).detach().softmax(-1).amax() > 1.5:
                break
        return self.leave(x)


class Matched(torch.autograd.Function):
    """A loss by the Hungarian method, with a gradient by hand."""

    @staticmethod
    def forward(ctx: Any, made: torch.Tensor, aim: torch.Tensor) -> torch.Tensor:
        off = np.zeros_like(made.detach().numpy())
        for row, (ours, theirs) in enumerate(zip(made.detach().numpy(), aim.numpy(), strict=True)):
            left, right = linear_sum_assignment((ours[:, None] - theirs[None]) ** 2)
            off[row][left] = ours[left] - theirs[right]
        ctx.save_for_backward(torch.from_numpy(off))
        return torch.as_tensor(float((off**2).mean()), dtype=made.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (off,) = ctx.saved_tensors
        return torch.from_numpy(gradient.numpy() * 2 * off.numpy() / off.numel()), None


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def match(model: nn.Module, batch: Any) -> torch.Tensor:
    return Matched.apply(model(batch[0]), batch[2])


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "control flow": (Clipping, classify),
    "early exit": (Exiting, classify),
    "matching": (Plain, match),
}


def made(name: str) -> tuple[nn.Module, Any, Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    build, loss = CASES[name]
    model = build()
    batch = torch.randn(ROWS, 8), torch.arange(ROWS) % 5, torch.randn(ROWS, 5)
    return model, batch, loss, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("name", "share"),
    slow_but(1, [("control flow", 0.6), ("early exit", 0.6), ("matching", 0.6)], several=True),
)
def test_the_plan_was_measured_and_holds(name: str, share: float) -> None:
    model, batch, loss, optimizer = made(name)
    given: dict[str, Any] = {"loss": loss, "optimizer": optimizer}
    budget = int(ss.measure(model, batch, **given).peak_bytes * share)
    plan = ss.plan(model, batch, budget=budget, **given)
    assert plan.techniques and plan.kind == "lossless"
    assert "test_by_running.py:" in plan.by_running and plan.by_running in str(plan)
    certificate = ss.verify(plan, model, [batch], **given)
    assert certificate.ok, str(certificate)
    step = ss.apply(plan, model, optimizer, loss=loss)
    for _ in range(2):
        step(batch)
    assert step.measure(batch).peak_bytes <= budget
    assert ss.Plan.from_dict(plan.to_dict()) == plan.plan


def test_nothing_of_the_user_changes() -> None:
    model, batch, loss, optimizer = made("control flow")
    for _ in range(2):
        loss(model, batch).backward()
        optimizer.step()

    def all_of_it() -> Any:
        return copy.deepcopy([
            model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()],
            batch, torch.get_rng_state(), [m.__dict__.get("forward") for m in model.modules()],
        ])  # fmt: skip

    before = all_of_it()
    plans = [ss.plan(model, batch, loss=loss, optimizer=optimizer, budget=150_000) for _ in "ab"]
    assert repr(before) == repr(all_of_it())
    assert plans[0].plan == plans[1].plan  # and the same call gives the same plan


def test_a_budget_that_is_too_small_says_the_smallest() -> None:
    model, batch, loss, optimizer = made("early exit")
    given: dict[str, Any] = {"loss": loss, "optimizer": optimizer}
    with pytest.raises(ss.BudgetError, match="smallest measured needs") as caught:
        ss.plan(model, batch, budget=1000, **given)
    assert caught.value.hint is not None and "test_by_running.py:" in caught.value.hint
    assert caught.value.smallest_bytes is not None
    ss.plan(model, batch, budget=caught.value.smallest_bytes, **given)


def test_a_loss_that_does_not_split_is_recomputed_alone() -> None:
    model, batch, _, optimizer = made("control flow")

    def contrastive(model: nn.Module, batch: Any) -> torch.Tensor:
        made = F.normalize(model(batch[0]), dim=1)
        return F.cross_entropy(made @ made.T, torch.arange(len(made)))

    given: dict[str, Any] = {"loss": contrastive, "optimizer": optimizer}
    plain = ss.measure(model, batch, **given).peak_bytes
    plan = ss.plan(model, batch, budget=int(0.8 * plain), **given)
    assert [t.name for t in plan.techniques] == ["checkpointing"]
    with pytest.raises(ss.BudgetError) as caught:
        ss.plan(model, batch, budget=1000, **given)
    assert "microbatches are left out" in str(caught.value.hint)


@pytest.mark.slow
def test_fit_trains_it() -> None:
    model, batch, loss, optimizer = made("matching")
    plain = ss.measure(model, batch, loss=loss, optimizer=optimizer).peak_bytes
    step = ss.fit(model, batch, loss=loss, optimizer=optimizer, budget=int(0.7 * plain))
    losses = [float(step(batch)) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_without_values_there_is_nothing_to_run() -> None:
    _, batch, loss, _ = made("control flow")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Clipping()
    with pytest.raises(ss.TraceError):
        ss.plan(model, batch, loss=loss, optimizer="sgd", budget=150_000)


def test_a_model_that_fails_is_told_by_its_own_error() -> None:
    model, batch, _, optimizer = made("control flow")

    def wrong(model: nn.Module, batch: Any) -> torch.Tensor:
        raise KeyError("no such label")

    with pytest.raises(ss.InputError, match="no such label"):
        ss.plan(model, batch, loss=wrong, optimizer=optimizer, budget=150_000)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_blocks_are_planned_and_not_certified() -> None:
    """A copy of them does not train, so nothing could be compared."""
    _, batch, loss, _ = made("control flow")
    model = Plain()
    model.layers = nn.ModuleList(torch.jit.script(Block()) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"loss": loss, "optimizer": optimizer}
    plan = ss.plan(model, batch, budget=100_000, **given)
    assert plan.by_running and plan.techniques
    with pytest.raises(ss.InputError, match="a copy of the model does not train"):
        ss.verify(plan, model, [batch], **given)


class Halved(nn.Module):
    """Gives one half on and shows the other, both outputs of one function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, 2 * WIDE)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        on, shown = torch.tanh(self.linear(x)).chunk(2, -1)
        return x + on, shown


class Shown(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Halved() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x, _ = layer(x)
        return self.leave(x)


def test_a_block_one_of_whose_outputs_has_no_gradient_is_traced() -> None:
    """Autograd calls the hooks of such an output with None."""
    model, batch = Shown(), (torch.randn(ROWS, 8), torch.arange(ROWS) % 5)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = ss.profile(model, batch, loss=loss, optimizer=optimizer, accounting="device")
    plan = ss.plan(model, batch, loss=loss, optimizer=optimizer, budget=int(0.8 * plain.peak_bytes))
    assert not plan.by_running
