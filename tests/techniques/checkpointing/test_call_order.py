"""A region runs the blocks the model called, in whatever order it calls them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from shoestring.techniques import Checkpointing

ORDERS = {
    "in order": (0, 1, 2, 3, 4, 5),
    "skipped": (0, 2, 3, 4, 5),
    "reversed": (5, 4, 3, 2, 1, 0),
    "repeated": (0, 1, 1, 2, 0, 1, 2, 3, 4, 5),
    "every other, then the rest": (0, 2, 4, 1, 3, 5),
    "the last first": (5, 0, 1, 2, 3, 4),
}


class Block(nn.Module):
    """Every block computes something else, so that another one in its place shows."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.number = number

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * torch.tanh(self.linear(self.norm(x)) + self.number)


class Ordered(nn.Module):
    """Calls its blocks in a given order, by position or by keyword."""

    def __init__(self, order: tuple[int, ...], *, keyword: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8, number) for number in range(6))
        self.order, self.keyword = order, keyword

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            block = self.layers[number]
            x = block(x=x, scale=0.5) if self.keyword else block(x, scale=0.5)
        return x


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(batch), torch.zeros_like(batch))


@pytest.mark.filterwarnings("ignore:a block's output is read by more")
@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("strategy", ["residual-2", "residual-3*", "[keep, [cheap, keep]]*2"])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_another_order_trains_equally(order: tuple[int, ...], strategy: str, keyword: bool) -> None:
    torch.manual_seed(0)
    model = Ordered(order, keyword=keyword)
    batch = torch.randn(4, 8)
    plain = copy.deepcopy(model)
    loss(plain, batch).backward()
    step = ss.apply(
        [Checkpointing.parse(strategy)], model, torch.optim.SGD(model.parameters(), lr=0.0),
        loss=loss,
    )  # fmt: skip
    step._setup.backward(step._setup.run(batch))
    for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        if expected.grad is None:
            assert found.grad is None, name
        else:
            assert torch.equal(expected.grad, found.grad), name


class Branching(Ordered):
    """A block that starts again from an output the region has passed already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        left, right = self.layers[1](first), self.layers[2](first)
        return self.layers[2](self.layers[1](left)) + right


class ReadLate(Ordered):
    """The output of the first block is read after the last has run; its draws must not change."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](F.dropout(x, 0.5))
        return self.layers[2](self.layers[1](first)) + first


class DrawingBlock(Block):
    """Draws, and counts its batches."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__(width, number)
        self.batches = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return F.dropout(self.batches(super().forward(x, scale)), 0.5)


def _gradients(model: nn.Module, batch: torch.Tensor, strategy: str) -> tuple[nn.Module, nn.Module]:
    plain = copy.deepcopy(model)
    torch.manual_seed(1)
    loss(plain, batch).backward()
    updates = torch.optim.SGD(model.parameters(), lr=0.0)
    step = ss.apply([Checkpointing(strategy)], model, updates, loss=loss)
    torch.manual_seed(1)
    step._setup.backward(step._setup.run(batch))
    return plain, model


def test_a_region_left_half_way_goes_on_from_there() -> None:
    torch.manual_seed(0)
    for expected, found in zip(
        *(m.parameters() for m in _gradients(Branching(()), torch.randn(4, 8), "residual-3")),
        strict=True,
    ):
        assert (expected.grad is None) == (found.grad is None)
        assert expected.grad is None or torch.allclose(expected.grad, found.grad, atol=1e-6)


def test_an_output_read_late_is_what_the_region_computed() -> None:
    torch.manual_seed(0)
    model = ReadLate(())
    model.layers = nn.ModuleList(DrawingBlock(8, number) for number in range(3))
    with pytest.warns(RuntimeWarning, match="more than the next block"):
        plain, found = _gradients(model, torch.randn(4, 8), "residual-3")
    for one, other in zip(plain.parameters(), found.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-5)
    for one, other in zip(plain.buffers(), found.buffers(), strict=True):
        assert torch.equal(one, other)
