"""What a forward pass changes in its modules is changed once, and recomputed from what it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from shoestring.techniques import Checkpointing


class Centered(nn.Module):
    """Subtracts a running mean that it assigns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return torch.tanh(self.linear(x - self.mean))


class InPlace(Centered):
    """The same in place, read before it is written."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(self.linear(x - self.mean.clone()))
        self.mean.mul_(0.5).add_(0.5 * x.detach().mean(0))
        return out


class Counting(Centered):
    """Scales by how often it was called, in an attribute, a list, a dict and a late attribute."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.calls = 0
        self.shapes: list[Any] = []
        self.by_size: dict[int, int] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.shapes.append(tuple(x.shape))
        self.by_size[len(x)] = self.by_size.get(len(x), 0) + 1
        self.latest = float(self.calls)
        return torch.tanh(self.linear(x) * self.latest / len(self.shapes) + self.calls)


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module], *, twice: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(6) for _ in range(4))
        self.twice = twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
            if self.twice:
                x = x + layer(x)
        return x


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(batch), torch.ones_like(batch))


def attributes(model: nn.Module) -> list[Any]:
    names = ("calls", "shapes", "by_size", "latest")
    return [getattr(m, name, None) for m in model.modules() for name in names]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("strategy", ["residual-1", "residual-2*", "[[keep, cheap], keep], keep"])
@pytest.mark.parametrize("kind", [Centered, InPlace, Counting])
def test_recomputation_leaves_modules_as_plain_training_does(
    kind: type[nn.Module], strategy: str, twice: bool
) -> None:
    torch.manual_seed(0)
    plain = Stack(kind, twice=twice)
    planned = copy.deepcopy(plain)
    batches = [torch.randn(5, 6) for _ in range(3)]
    updates = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in batches:
        updates.zero_grad()
        loss(plain, batch).backward()
        updates.step()
    step = ss.apply(
        [Checkpointing.parse(strategy)], planned, torch.optim.SGD(planned.parameters(), lr=0.1),
        loss=loss,
    )  # fmt: skip
    for batch in batches:
        step(batch)
    for (name, one), (_, other) in zip(
        plain.state_dict().items(), planned.state_dict().items(), strict=True
    ):
        assert torch.equal(one, other), name
    assert attributes(plain) == attributes(planned)
