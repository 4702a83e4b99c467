"""What a forward pass changes in its modules is changed once, and recomputed from what it was."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from shoestring.techniques import Checkpointing, GradientRelease


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


class Scaled(nn.Module):
    """Divides by a running scale, a parameter without gradient, that it moves in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(self.linear(x / self.scale.clone()))
        self.move(x.detach().abs().mean(0))
        return out

    @torch.no_grad()
    def move(self, seen: torch.Tensor) -> None:
        self.scale.mul_(0.5).add_(0.5 * seen)


class ThroughData(Scaled):
    """Where no version shows it."""

    def move(self, seen: torch.Tensor) -> None:
        self.scale.data.mul_(0.5)[1:] += 0.5 * seen[1:]


class DataSet(Scaled):
    def move(self, seen: torch.Tensor) -> None:
        self.scale.data = 0.5 * self.scale.data
        self.scale.data.add_(0.5 * seen)


class Replaced(Scaled):
    def move(self, seen: torch.Tensor) -> None:
        new = 0.5 * self.scale.data + 0.5 * seen
        self.scale = nn.Parameter(new, requires_grad=False)


class Written(Scaled):
    """By functions that take what they write."""

    @torch.no_grad()
    def move(self, seen: torch.Tensor) -> None:
        torch._foreach_mul_([self.scale], 0.5)
        torch.add(self.scale, seen, alpha=0.5, out=self.scale)


class InList(Scaled):
    """A tensor that is neither parameter nor buffer."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.held = [torch.ones(width)]

    def move(self, seen: torch.Tensor) -> None:
        self.held[0].mul_(0.5).add_(0.5 * seen)
        self.scale.data.copy_(self.held[0])


class Renormalized(nn.Module):
    """A weight that trains, made shorter before it is used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.bounded = nn.Linear(width, width), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight
        weight.data.div_(weight.data.norm() + 0.5)
        return self.bounded(self.linear(x))


class Initialized(Renormalized):
    """Takes its scale from the first batch (Kingma and Dhariwal, 2018), and reads it after that."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.zeros(width))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(x.abs().mean(0))
            self.ready.fill_(True)
        return self.bounded(self.linear(torch.sigmoid(x * self.scale)))


class GivenChanged(Renormalized):
    """What it is given, unseen by autograd."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.data.mul_(0.9)
        return self.bounded(self.linear(x))


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


STRATEGIES = "residual-1", "residual-2*", "[[keep, cheap], keep], keep"
IN_PLACE = (
    *(Scaled, ThroughData, DataSet, Replaced, Written, InList),
    *(Renormalized, Initialized, GivenChanged),
)


@pytest.mark.parametrize(
    ("kind", "strategy", "twice"),
    [
        *itertools.product((Centered, InPlace, Counting), STRATEGIES, (False, True)),
        *itertools.product(IN_PLACE, STRATEGIES[::2], (True,)),
    ],
)
def test_recomputation_leaves_modules_as_plain_training_does(
    kind: type[nn.Module], strategy: str, twice: bool
) -> None:
    torch.manual_seed(0)
    plain = Stack(kind, twice=twice)
    planned = copy.deepcopy(plain)
    batches = [torch.randn(5, 6) for _ in range(3)]
    updates = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    for batch in batches:
        updates.zero_grad()
        loss(plain, batch.clone()).backward()
        updates.step()
    trained = [p for p in planned.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    step = ss.apply([Checkpointing.parse(strategy)], planned, optimizer, loss=loss)
    for batch in batches:
        step(batch.clone())
    for (name, one), (_, other) in zip(
        plain.state_dict().items(), planned.state_dict().items(), strict=True
    ):
        assert torch.equal(one, other), name
    assert attributes(plain) == attributes(planned)


class MovedSecond(Scaled):
    """Moves its scale in the second call only, after the first has read it."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.calls = 0

    def move(self, seen: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            super().move(seen)


def test_what_changes_after_a_block_has_read_it_is_refused() -> None:
    model = Stack(MovedSecond, twice=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    step = ss.apply([Checkpointing.parse("residual-1")], model, optimizer, loss=loss)
    with pytest.raises(ss.InputError, match=r"MovedSecond\.scale was changed in place after"):
        step(torch.randn(5, 6))


class Sharing(nn.Module):
    """A block beside others that share its adapters, and use one each."""

    def __init__(self, adapters: nn.ModuleList, number: int) -> None:
        super().__init__()
        self.linear, self.adapters, self.number = nn.Linear(6, 6), adapters, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.adapters[self.number](torch.tanh(self.linear(x)))


def test_what_a_block_holds_and_does_not_read_may_change() -> None:
    """Its update comes first where gradients are released."""
    batch, found = torch.randn(5, 6), []
    for plan in ([], [Checkpointing.parse("residual-1"), GradientRelease()]):
        torch.manual_seed(0)
        adapters = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        model = nn.Sequential(*(Sharing(adapters, n) for n in range(3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = ss.apply(plan, model, optimizer, loss=lambda m, b: m(b).square().mean())
        step(batch), step(batch)
        found.append([p.tolist() for p in model.parameters()])
    assert found[0] == found[1]


def test_functions_that_read_what_is_changed_unseen_are_refused() -> None:
    model = Stack(Renormalized, twice=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ss.apply([Checkpointing.parse("every-2")], model, optimizer, loss=loss)
    with pytest.raises(RuntimeError, match="changed in place after a function read it"):
        step(torch.randn(5, 6))


_COMMON = torch.Generator()


class Drawing(nn.Module):
    """A mask from a stream that PyTorch's checkpoints do not put back."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.linear, self.source, self.own = nn.Linear(8, 8), source, torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        if self.source == "numpy":
            kept = torch.from_numpy(np.random.rand(*h.shape) < 0.7)
        elif self.source == "python":
            return x + (h if random.random() < 0.5 else h.square())
        else:
            generator = self.own if self.source == "module" else _COMMON
            kept = torch.rand(h.shape, generator=generator) < 0.7
        return x + torch.sin(h * kept)


@pytest.mark.parametrize("source", ["module", "global", "numpy", "python"])
def test_draws_of_other_streams_are_drawn_again(source: str) -> None:
    batch, found = torch.randn(4, 8), []
    for plan in ([], [Checkpointing("residual-1")], [Checkpointing("residual-2*")]):
        torch.manual_seed(0), np.random.seed(0), random.seed(0), _COMMON.manual_seed(0)
        model = nn.Sequential(*(Drawing(source) for _ in range(4)))
        for block in model:
            block.own.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = ss.apply(plan, model, optimizer, loss=lambda m, b: m(b).square().mean())
        losses = [float(step(batch)) for _ in range(3)]
        after = np.random.rand(), random.random(), float(torch.rand(1, generator=_COMMON))
        found.append((losses, after, [p.tolist() for p in model.parameters()]))
    assert found[0] == found[1] == found[2]
