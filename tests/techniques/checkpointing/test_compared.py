"""A block whose second pass differs ends the first step in an error, before the update."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss

_numpy, _python = np.random.default_rng(0), random.Random(0)
_calls = itertools.count(1)

OUTSIDE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "numpy": lambda x: torch.from_numpy(_numpy.random(x.shape, dtype=np.float32)),
    "python": lambda x: torch.tensor([_python.random() for _ in range(x.shape[1])]),
    "counter": lambda x: torch.tensor(1.0 + next(_calls) % 7),
    "mask": lambda x: torch.from_numpy(_numpy.random(x.shape) < 0.9),
}
SCHEDULES = (
    ("recompute*4",),
    ("[[keep*2], keep]", "[[[keep]]]"),
    ("[keep, [keep]]", "[[keep],[keep]]"),
)


class Scaled(nn.Module):
    """Multiplies by numbers from elsewhere."""

    def __init__(self, kind: str | None) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(16, 16), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.relu(self.linear(x))
        return x + (made if self.kind is None else made * OUTSIDE[self.kind](x))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch).square().mean()
    return found


def planned(schedule: tuple[str, ...], kind: str | None) -> tuple[ss.Step, nn.Module, Any]:
    model = nn.Sequential(*(Scaled(kind if number % 2 else None) for number in range(4)))
    plan = [ss.Checkpointing("per-block", schedule=schedule)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ss.apply(plan, model, optimizer, loss=loss), model, plan


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", OUTSIDE)
def test_a_second_pass_that_differs_is_an_error(kind: str, schedule: tuple[str, ...]) -> None:
    step, model, _ = planned(schedule, kind)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ss.InputError, match=r"[0-3] has other values when recomputed"):
        step(torch.randn(32, 16))
    for parameter, own in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, own) and parameter.grad is None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_equal_second_pass_is_none(schedule: tuple[str, ...]) -> None:
    step, _, _ = planned(schedule, None)
    for _ in range(2):
        assert torch.isfinite(step(torch.randn(32, 16)))


def test_a_certificate_shows_what_differs() -> None:
    _, _, plan = planned(SCHEDULES[0], "numpy")
    model = nn.Sequential(*(Scaled("numpy") for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    certificate = ss.verify(plan, model, [torch.randn(32, 16)], loss=loss, optimizer=optimizer)
    assert not certificate.ok


def test_later_steps_are_not_compared() -> None:
    """It costs a look at every tensor that backward reads."""
    model = nn.Sequential(*(Scaled(None) for _ in range(4)))
    plan = [ss.Checkpointing("per-block", schedule=SCHEDULES[0])]
    step = ss.apply(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    step(torch.randn(32, 16))
    for block in model:
        block.kind = "numpy"
    step(torch.randn(32, 16))


def _uniform(*shape: int) -> torch.Tensor:
    return torch.from_numpy(_numpy.random(shape, dtype=np.float32))


def _averaged(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        block.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)  # type: ignore[operator, union-attr]
    return x * _uniform(*x.shape)


def _filtered(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    h = torch.fft.rfft(x)
    return torch.fft.irfft(h * torch.complex(_uniform(*h.shape), _uniform(*h.shape)), n=16)


AT_THE_END: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "rows in another order": lambda block, x: x[torch.from_numpy(_numpy.permutation(len(x)))],
    "few of a mask": lambda block, x: x * (_uniform(*x.shape) < 0.96),
    "one factor for all": lambda block, x: x * _uniform(1).expand(32, 16),
    "every other column": lambda block, x: x * _uniform(len(x), 32)[:, ::2],
    "complex factors": _filtered,
    "a column beside ones": lambda block, x: x * torch.cat([torch.ones(15), _uniform(1)]),
    "a buffer beside it": _averaged,
    "a small drift": lambda block, x: x * torch.tensor(1.0 + 2e-4 * next(_calls)),
    "places of the largest": lambda block, x: (x + _uniform(*x.shape)).topk(8).values,
}
"""Factors and indices that nothing of the block reads after them."""


class Ends(nn.Module):
    """A residual layer, and something after it."""

    def __init__(self, end: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.end = nn.Linear(16, 16), end
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self, x + torch.tanh(self.linear(x)))


@pytest.mark.parametrize("kind", AT_THE_END)
def test_what_only_the_last_function_reads_is_compared(kind: str) -> None:
    model = nn.Sequential(Ends(AT_THE_END[kind]))
    plan = [ss.Checkpointing("per-block", ("0",), ("recompute",))]
    step = ss.apply(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    with pytest.raises(ss.InputError, match="0 has other values when recomputed"):
        step(torch.randn(32, 16))


def test_a_block_that_saves_other_tensors_is_an_input_error() -> None:
    ran = itertools.count()

    def end(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x if next(ran) else torch.tanh(x)

    model = nn.Sequential(Ends(end))
    plan = [ss.Checkpointing("per-block", ("0",), ("recompute",))]
    step = ss.apply(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    with pytest.raises(ss.InputError, match="a block saves other tensors when recomputed"):
        step(torch.randn(32, 16))


def _aligned(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """CTC keeps its alignments, of which it writes only those that are as long as texts are."""
    scores = x.view(4, 8, 16).transpose(0, 1).log_softmax(-1)
    junk = [torch.full((4, 8, 21), float(next(_calls))) for _ in range(4)]
    del junk  # it lies where the alignments will
    texts, lengths = torch.arange(40).view(4, 10) % 15 + 1, torch.tensor([8, 2, 4, 3])
    return x * F.ctc_loss(scores, texts, lengths, torch.tensor([1, 1, 2, 1]), zero_infinity=True)


def _leaky(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Its slopes are drawn in training; otherwise they are fixed, and nobody writes them."""
    junk = [torch.full((32, 16), float(next(_calls))) for _ in range(4)]
    del junk
    return F.rrelu(x, training=False)


@pytest.mark.parametrize("end", [_aligned, _leaky])
def test_memory_that_nobody_wrote_is_not_compared(
    end: Callable[[nn.Module, torch.Tensor], torch.Tensor],
) -> None:
    model = nn.Sequential(Ends(end))
    plan = [ss.Checkpointing("per-block", ("0",), ("recompute",))]
    step = ss.apply(plan, model, torch.optim.SGD(model.parameters(), lr=0.0), loss=loss)
    assert torch.isfinite(step(torch.randn(32, 16)))
