"""A block whose second pass differs ends the first step in an error, before the update."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
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
