"""How BatchNorm's kernels cut a tensor into tiles, and the room they need beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..devices import gpu
from ..trace.fakes import is_fake
from . import launched

TILE = 4096
"""Elements of a tile: the rows are as many as fit beside the channels."""
FEW = 2**20
"""Elements of a channels-last tensor below which tiles are half as large, for more programs."""
WIDE = 128
"""Channels of a tile at most."""
SHARES = 64
"""Programs at most over which a sum is split; each reader adds up as many."""
WARPS = 8
_MOST_CHANNELS = 2**16 - 1  # programs on the second axis of a grid

Running = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def readers() -> int:
    """Programs at most that read the shares: two for each processor."""
    return 2 * gpu().multiprocessors


def programs() -> int:
    """Programs at most over all channels where each has its own: they fill processors twice."""
    return 16 * gpu().multiprocessors


def inner(x: torch.Tensor) -> int | None:
    """Elements of one channel that lie beside each other; None where the kernels cannot go."""
    if x.dim() < 2 or x.shape[1] > _MOST_CHANNELS:
        return None
    if x.is_contiguous():
        return math.prod(x.shape[2:])
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return 1 if form is not None and x.is_contiguous(memory_format=form) else None


def _parts(whole: int, size: int) -> int:
    return -(-whole // size)


def _power_of_two(number: int) -> int:
    """The smallest that is not below it."""
    return 1 << (number - 1).bit_length()


class _Sizes:
    """How each group of rows is cut into tiles, and these into programs."""

    def __init__(self, x: torch.Tensor, groups: int) -> None:
        beside = inner(x)
        assert beside is not None
        self.channels, self.groups = x.shape[1], groups
        self.rows = x.numel() // (self.channels * groups)
        wide = min(_power_of_two(self.channels), WIDE) if beside == 1 else 1
        halves = 2 if beside == 1 and x.numel() < FEW else 1
        tall = min(TILE // halves // wide, _power_of_two(self.rows))
        self._blocks = _parts(self.channels, wide)
        self._tiles = _parts(self.rows, tall)
        self._most = readers() if beside == 1 else _parts(programs(), self._blocks * groups)
        self._settings = {
            "ROWS": tall,
            "CHANNELS": wide,
            "INNER": beside,
            "LONG": x.numel() > 2**30,
            "num_warps": WARPS // halves,
        }
        self.shares = self.split(SHARES)[0][0]

    def split(self, limit: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
        """A grid of at most so many programs over the rows, and what they are made for."""
        each = _parts(self._tiles, min(limit, self._most))
        grid = _parts(self._tiles, each), self._blocks, self.groups
        return grid, {**self._settings, "TILES": each}

    def room(self, x: torch.Tensor, *each: int) -> torch.Tensor:
        """For FP32 numbers of every group."""
        shape = (self.groups, *each, 2, self.channels)
        return torch.empty(shape, dtype=torch.float32, device=x.device)


def _launch(
    kernel: str, grid: tuple[int, ...], made: Sequence[torch.Tensor], *args: Any, **settings: Any
) -> None:
    """Run a kernel on the GPU of what it makes; in a prediction none runs, Triton or not."""
    if is_fake(made[0]):
        read = [a for a in args if isinstance(a, torch.Tensor) and all(a is not m for m in made)]
        launched(f"bn_{kernel}", read, made)
        return
    from . import batch_norm as batch_norm_kernels

    with torch.cuda.device_of(made[0]):
        getattr(batch_norm_kernels, kernel)[grid](*args, **settings)


def statistics(x: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for mean and reciprocal deviation, (groups, 2, channels), and sums to make them from."""
    sizes = _Sizes(x, groups)
    partial = sizes.room(x, sizes.shares)
    grid, settings = sizes.split(SHARES)
    _launch("statistics", grid, [partial], x, partial, sizes.rows, sizes.channels, **settings)
    return sizes.room(x), partial


def normalize(
    x: torch.Tensor,
    found: torch.Tensor,
    partial: torch.Tensor | None,
    running: Running | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    momentum: float,
    eps: float,
    rectify: bool,
) -> torch.Tensor:
    """(x - mean) / deviation * weight + bias, and its positive part.

    With sums, it writes mean and reciprocal deviation to `found` and moves the running ones;
    without them it reads `found`.
    """
    sizes = _Sizes(x, found.shape[0])
    out = torch.empty_like(x)
    grid, settings = sizes.split(readers())
    first = partial is not None
    mean, var, counter = (found, found, found) if running is None else running
    _launch(
        "normalize", grid, [out],
        x, found, found if partial is None else partial, mean, var, counter, weight, bias, out,
        sizes.rows, sizes.channels, sizes.shares, momentum, eps,
        FIRST=first, RUNNING=first and sizes.groups == 1, RECTIFY=rectify, SHARES=SHARES,
        **settings,
    )  # fmt: skip
    if first and sizes.groups > 1:
        _launch(
            "running", (_parts(sizes.channels, WIDE),), [mean, var],
            found, mean, var, counter, sizes.rows, sizes.channels, momentum, eps,
            GROUPS=sizes.groups, CHANNELS=WIDE,
        )  # fmt: skip
    return out


def gradients(
    x: torch.Tensor,
    grad: torch.Tensor,
    found: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    rectify: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of x, and those of weight and bias as (groups, 2, channels)."""
    sizes = _Sizes(x, found.shape[0])
    partial = sizes.room(x, sizes.shares)
    grid, settings = sizes.split(SHARES)
    _launch(
        "sums", grid, [partial],
        x, grad, found, weight, bias, partial, sizes.rows, sizes.channels,
        RECTIFY=rectify, **settings,
    )  # fmt: skip
    sums, out = sizes.room(x), torch.empty_like(x)
    grid, settings = sizes.split(readers())
    _launch(
        "gradient", grid, [out, sums],
        x, grad, found, weight, bias, partial, sums, out,
        sizes.rows, sizes.channels, sizes.shares, RECTIFY=rectify, SHARES=SHARES, **settings,
    )  # fmt: skip
    return out, sums
