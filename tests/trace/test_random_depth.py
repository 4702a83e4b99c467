"""A step whose depth is drawn is planned for its worst draw, whatever the seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.techniques import Checkpointing
from tiers import slow_but

SKIPS: dict[str, Callable[[], bool]] = {
    "a tensor, low": lambda: bool(torch.rand([]) < 0.5),
    "a tensor, high": lambda: bool(torch.rand(1) > 0.5),
    "an item": lambda: torch.rand(()).item() < 0.5,
    "in place": lambda: torch.empty(1).uniform_().item() < 0.5,
    "a coin": lambda: torch.bernoulli(torch.tensor(0.5)).item() == 0,
    "Python": lambda: random.random() < 0.5,
    "NumPy": lambda: np.random.uniform(0, 1) > 0.5,
    "a whole number": lambda: int(torch.randint(2, 9, (1,))) < 5,
    "a whole number of Python's": lambda: random.randint(1, 8) < 5,
    "a whole number of NumPy's": lambda: np.random.randint(8) > 5,
    "a choice": lambda: random.choice([True, False]),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class LayerDrop(nn.Module):
    def __init__(self, skips: Callable[[], bool]) -> None:
        super().__init__()
        self.layers, self.skips = nn.ModuleList(Block() for _ in range(6)), skips
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not self.skips():
                x = layer(x)
        return self.head(x)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("skips", SKIPS.values(), ids=SKIPS)
def test_the_prediction_is_of_all_layers(skips: Callable[[], bool]) -> None:
    batch, found = torch.randn(64, 16), set()
    for seed in range(3):
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        model = LayerDrop(skips)
        made = ss.profile(model, batch, loss=loss, optimizer="sgd-plain", accounting="device")
        found.add(made.peak_bytes)
    whole = LayerDrop(lambda: False)
    plain = ss.profile(whole, batch, loss=loss, optimizer="sgd-plain", accounting="device")
    assert found == {plain.peak_bytes}


def test_a_draw_that_leaves_nothing_to_train_is_not_the_worst() -> None:
    batch, found = torch.randn(64, 16), set()
    for skips in (SKIPS["a tensor, high"], SKIPS["Python"], lambda: False):
        model = LayerDrop(skips)
        model.head = nn.Identity()
        made = ss.profile(model, batch, loss=loss, optimizer="sgd-plain", accounting="device")
        found.add(made.peak_bytes)
    assert len(found) == 1


@pytest.mark.parametrize("skips", slow_but(1, ["a tensor, low", "Python"]))
def test_plans_hold_and_verdicts_are_the_same_for_every_seed(skips: str) -> None:
    batch = torch.randn(64, 16)
    whole = LayerDrop(lambda: False)
    plain = ss.profile(whole, batch, loss=loss, optimizer="sgd-plain", accounting="device")
    for seed in range(4):
        torch.manual_seed(seed), random.seed(seed)
        model = LayerDrop(SKIPS[skips])
        given: dict[str, Any] = {
            "loss": loss,
            "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        }
        found = ss.verify([Checkpointing("residual-2")], model, [batch], steps=2, **given)
        assert found.ok, str(found)
        budget = int(plain.peak_bytes * 0.7)
        plan = ss.plan(model, batch, budget=budget, allow="lossless", **given)
        assert plan.plain.peak_bytes == plain.peak_bytes
        step = ss.apply(plan, model, given["optimizer"], loss=loss)
        step(batch)
        assert max(step.measure(batch).peak_bytes for _ in range(4)) <= budget
