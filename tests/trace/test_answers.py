"""Models that read values are traced from what a real forward pass read."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from shoestring.errors import TraceError
from shoestring.techniques import Checkpointing
from shoestring.trace.tracing import trace_model


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 16), nn.Linear(16, 3)
        self.lstm = nn.LSTM(16, 16, 2, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(x), lengths, batch_first=True, enforce_sorted=False
        )
        out, (last, _) = self.lstm(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        return self.out(last[-1]) + self.out(padded.mean(1))


class OfPacked(Packed):
    """The batch comes packed."""

    def forward(self, x: Any) -> torch.Tensor:
        embedded = nn.utils.rnn.PackedSequence(self.embed(x.data), *x[1:])
        out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(embedded)[0])
        return self.out(out.mean(0))


class Scripted(nn.Module):
    """A function in TorchScript that asks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _scripted()(self.linear(x))


@cache
def _scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(_doubled)


def _doubled(x: torch.Tensor) -> torch.Tensor:
    if bool(x.abs().sum() > 0):
        return torch.relu(x) * 2
    return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x))


class EarlyExit(nn.Module):
    """Whether it goes on is decided by what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number >= 3 and x.abs().mean().item() > 0.0:
                break
        return x


class Experts(nn.Module):
    """Each row goes to the expert that a router picks."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chance = self.router(x).softmax(-1)
        best, out = chance.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (best == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * chance[rows, number, None])
        return out


class Masking(nn.Module):
    """Writes through a mask of what it computed, and reads through one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fill = nn.Linear(16, 16), nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).clone()
        hidden[hidden.detach().sum(-1) > 0] = self.fill
        kept = hidden[hidden.detach().sum(-1) <= 0]
        return F.pad(kept, (0, 0, 0, len(x) - len(kept)))


class Graph(nn.Module):
    """Attention over edges, without those from a node to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges[:, edges[0] != edges[1]]
        message = F.leaky_relu(self.source(x)[source] + self.target(x)[target])
        count = int(target.max()) + 1
        return torch.zeros(max(count, len(x)), 16).index_add(0, target, message)


class Sizes(nn.Module):
    """Images of several sizes in one row of patches; counts its calls, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(16, 16), 0

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = x[: sizes.prod(-1).sum().item()]
        images = self.linear(x).split([height * width for height, width in sizes.tolist()])
        largest = torch.tensor([sizes.prod(-1).max(), 1])
        return torch.stack([image.sum(0) for image in images]) / largest[0]


def matched(model: nn.Module, batch: Any) -> torch.Tensor:
    """The targets in the order of what they are closest to, by NumPy."""
    out = model(batch)
    order = torch.as_tensor(out.detach().sum(-1).numpy().argsort().copy())
    ranks = torch.tensor(out.detach()[:3].sum(-1).tolist())
    return F.mse_loss(out, batch[order]) + 0 * ranks.sum()


def square(model: nn.Module, batch: Any) -> torch.Tensor:
    return (
        model(*batch).square().mean() if isinstance(batch, tuple) else model(batch).square().mean()
    )


ROWS = torch.randn(32, 16)
CASES: dict[str, tuple[Any, Any, Any]] = {
    "packed": (
        Packed,
        (torch.randint(50, (8, 12)), torch.tensor([12, 9, 12, 3, 5, 7, 1, 12])),
        square,
    ),
    "packed batch": (
        OfPacked,
        {"x": nn.utils.rnn.pack_sequence([torch.randint(50, (n,)) for n in (12, 9, 3, 1)])},
        lambda m, b: m(b["x"]).square().mean(),
    ),
    "early exit": (EarlyExit, ROWS, square),
    "experts": (Experts, ROWS, square),
    "scripted": (Scripted, ROWS, square),
    "masks": (Masking, ROWS, square),
    "graph": (Graph, (torch.randn(20, 16), torch.randint(20, (2, 60))), square),
    "matching": (Block, ROWS, matched),
    "sizes": (Sizes, (torch.randn(46, 16), torch.tensor([[2, 4], [6, 3], [5, 4]])), square),
}


@pytest.mark.parametrize("name", CASES)
def test_predicted_is_measured(name: str) -> None:
    torch.manual_seed(0)
    build, batch, loss = CASES[name]
    model = build()
    given: dict[str, Any] = {"loss": loss, "optimizer": torch.optim.SGD(model.parameters(), 1e-6)}
    predicted = ss.profile(model, batch, accounting="device", **given).peak_bytes
    assert predicted == ss.measure(model, batch, **given).peak_bytes
    assert ss.profile(model, batch, accounting="device", device="cuda", **given).peak_bytes > 0
    assert ss.verify([Checkpointing("every-2")], model, [batch], steps=1, **given).ok


class Trimmed(nn.Module):
    """Sequences are cut at the longest of those that run together."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = x[:, : int(lengths.max())]
        there = torch.arange(x.shape[1]) < lengths[:, None]
        return (self.blocks(x) * there[:, :, None]).sum(1)


class Skewed(nn.Module):
    """Experts of different widths; the sign of the first number decides."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, wide), nn.GELU(), nn.Linear(wide, 16)) for wide in (64, 256)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = ((x[:, 0] > 0) == bool(number)).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return out


SORTED = torch.cat([torch.linspace(-1, 1, 32)[:, None], ROWS[:, 1:]], 1)
PARTS: dict[str, tuple[Any, Any]] = {
    "lengths": (Trimmed, (torch.randn(8, 40, 16), torch.arange(5, 45, 5))),
    "experts": (Skewed, SORTED),
}


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", PARTS)
def test_the_largest_part_is_predicted(name: str, size: int) -> None:
    """Not the first; with gradients and state of experts that only other parts use."""
    torch.manual_seed(0)
    build, batch = PARTS[name]
    model = build()
    given: dict[str, Any] = {"loss": square, "optimizer": torch.optim.Adam(model.parameters())}
    techniques = [ss.Microbatching(size)]
    made = ss.profile(model, batch, accounting="device", techniques=techniques, **given)
    step = ss.apply(techniques, model, given["optimizer"], loss=square)
    step(batch)
    numbers = 16  # bytes of the loss and its weights
    assert made.peak_bytes == pytest.approx(step.measure(batch).peak_bytes, abs=numbers)


def test_recomputed_blocks_are_answered_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Experts() for _ in range(4)))
    given: dict[str, Any] = {"loss": square, "optimizer": torch.optim.SGD(model.parameters(), 1e-6)}
    found = ss.verify([Checkpointing("residual-2")], model, [ROWS], steps=1, **given)
    assert found.ok and found.peak_ok


def test_without_values_the_line_is_named() -> None:
    with torch.device("meta"):
        model = EarlyExit()
    with pytest.raises(TraceError, match=r"reads the value .* at test_answers\.py:\d+") as failed:
        trace_model(model, torch.randn(4, 16, device="meta"), loss=square)
    assert failed.value.hint is not None and "a model with weights" in failed.value.hint


def test_fit_of_a_model_that_reads_values() -> None:
    torch.manual_seed(0)
    model = EarlyExit()
    given: dict[str, Any] = {"loss": square, "optimizer": torch.optim.SGD(model.parameters(), 1e-6)}
    step = ss.fit(model, ROWS, budget="1 MB", **given)
    assert step(ROWS).isfinite()


class Named(nn.Module):
    """Its experts have names, which a tensor is part of; it converts a layer that is right."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(16, 4)
        self.experts = nn.ModuleDict({f"expert_{n}": nn.Linear(16, 16 + n) for n in range(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scores = self.scores.to(torch.float32)
        chosen = self.scores(x).argmax(1)
        total = x.new_zeros(())
        for number in torch.bincount(chosen).nonzero():
            rows = x[chosen == number]
            total = total + self.experts[f"expert_{number[0]}"](rows).square().sum()
        return total


def test_a_name_with_a_number_of_a_tensor() -> None:
    torch.manual_seed(0)
    model, x = Named(), torch.randn(32, 16)
    given: dict[str, Any] = {"loss": lambda m, b: m(b), "optimizer": "sgd"}
    predicted = ss.profile(model, x, accounting="device", **given)
    assert predicted.peak_bytes == ss.measure(model, x, **given).peak_bytes
