"""BatchNorm, and the ReLU behind it: Triton kernels for CUDA.

A tensor here is a matrix of rows (examples, or pixels of images) and channels. Of every channel,
INNER elements lie beside each other: one where a pixel's channels do (channels-last, rows of
features), an image where the tensor is contiguous. A tile is many channels wide in the first case
and one in the second, so that neighbours are read together.

A sum over rows is made in two steps that depend on nothing but the sizes: some programs add up a
share of the rows each, and every program of the kernel that needs the sum adds up the shares, in
the same order. So no kernel waits for another, and the same input gives the same bits. The rows
may be several groups of equal size, each with statistics of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..trace.fakes import is_fake
from .batch_norm import Running, inner

TILE = 4096
"""Elements of a tile: the rows are as many as fit beside the channels."""
FEW = 2**20
"""Elements of a channels-last tensor below which tiles are half as large, for more programs."""
WIDE = 128
"""Channels of a tile at most."""
SHARES = 64
"""Programs at most over which a sum is split; each reader adds up as many."""
READERS = 264
"""Programs at most that read the shares."""
PROGRAMS = 2112
"""Programs at most over all channels where each has its own: they fill 132 processors twice."""
WARPS = 8


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    tile, channels, rows,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, INNER: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Offsets of the elements of a tile, and which of them are there."""
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    if LONG:
        tile = tile.to(tl.int64)
    r = tile * ROWS + tl.arange(0, ROWS)
    there = (r < rows)[:, None] & (c < channels)[None, :]
    if INNER == 1:
        place = r * channels
    else:
        place = r // INNER * (channels * INNER) + r % INNER
    return place[:, None] + (c * INNER)[None, :], there


@triton.jit
def _total(partial, shares, c, inside, channels, SHARES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both sums over all shares, in their order."""
    q = tl.arange(0, SHARES)
    there = (q < shares)[:, None] & inside[None, :]
    place = partial + q[:, None] * (2 * channels) + c[None, :]
    first = tl.sum(tl.load(place, mask=there, other=0.0), axis=0)
    return first, tl.sum(tl.load(place + channels, mask=there, other=0.0), axis=0)


@triton.jit
def _statistics_kernel(  # type: ignore[no-untyped-def]
    x, partial, rows, channels,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, TILES: tl.constexpr, INNER: tl.constexpr,
    LONG: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    x += tl.program_id(2).to(tl.int64) * rows * channels
    partial += tl.program_id(2) * tl.num_programs(0) * (2 * channels)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < channels
    # Sums of differences from the first row: no cancellation where the mean is far from zero.
    shift = tl.load(x + c * INNER, mask=inside, other=0.0).to(tl.float32)
    first = tl.zeros([ROWS, CHANNELS], tl.float32)
    second = tl.zeros([ROWS, CHANNELS], tl.float32)
    for tile in range(TILES):
        place, there = _tile(program * TILES + tile, channels, rows, ROWS, CHANNELS, INNER, LONG)
        value = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
        value = tl.where(there, value - shift[None, :], 0.0)
        first += value
        second += value * value
    place = partial + program * (2 * channels) + c
    tl.store(place, tl.sum(first, axis=0), mask=inside)
    tl.store(place + channels, tl.sum(second, axis=0), mask=inside)


@triton.jit
def _normalise_kernel(  # type: ignore[no-untyped-def]
    x, found, partial, running_mean, running_var, counter, weight, bias, out,
    rows, channels, shares, momentum, eps,
    FIRST: tl.constexpr, RUNNING: tl.constexpr, RECTIFY: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr, TILES: tl.constexpr, SHARES: tl.constexpr, INNER: tl.constexpr,
    LONG: tl.constexpr,
):  # fmt: skip
    program, group = tl.program_id(0), tl.program_id(2)
    x += group.to(tl.int64) * rows * channels
    out += group.to(tl.int64) * rows * channels
    found += group * (2 * channels)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < channels
    if FIRST:
        partial += group * shares * (2 * channels)
        first, second = _total(partial, shares, c, inside, channels, SHARES)
        offset = first / rows
        variance = tl.maximum(second / rows - offset * offset, 0.0)
        mean = tl.load(x + c * INNER, mask=inside, other=0.0).to(tl.float32) + offset
        rstd = 1.0 / tl.sqrt(variance + eps)
        if program == 0:
            tl.store(found + c, mean, mask=inside)
            tl.store(found + channels + c, rstd, mask=inside)
        if RUNNING and program == 0:
            old = tl.load(running_mean + c, mask=inside, other=0.0)
            tl.store(running_mean + c, old + momentum * (mean - old), mask=inside)
            old = tl.load(running_var + c, mask=inside, other=0.0)
            unbiased = variance * (rows / (rows - 1.0))
            tl.store(running_var + c, old + momentum * (unbiased - old), mask=inside)
            if tl.program_id(1) == 0:
                tl.store(counter, tl.load(counter) + 1)
    else:
        mean = tl.load(found + c, mask=inside, other=0.0)
        rstd = tl.load(found + channels + c, mask=inside, other=0.0)
    scale = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    for tile in range(TILES):
        place, there = _tile(program * TILES + tile, channels, rows, ROWS, CHANNELS, INNER, LONG)
        value = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
        value = (value - mean[None, :]) * rstd[None, :] * scale[None, :] + shift[None, :]
        if RECTIFY:
            value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out + place, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def _running_kernel(  # type: ignore[no-untyped-def]
    found, running_mean, running_var, counter, rows, channels, momentum, eps,
    GROUPS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Running statistics after several groups, one after the other."""
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < channels
    mean = tl.load(running_mean + c, mask=inside, other=0.0)
    var = tl.load(running_var + c, mask=inside, other=0.0)
    for group in range(GROUPS):
        place = found + group * (2 * channels) + c
        mean += momentum * (tl.load(place, mask=inside, other=0.0) - mean)
        rstd = tl.load(place + channels, mask=inside, other=1.0)
        unbiased = (1.0 / (rstd * rstd) - eps) * (rows / (rows - 1.0))
        var += momentum * (unbiased - var)
    tl.store(running_mean + c, mean, mask=inside)
    tl.store(running_var + c, var, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(counter, tl.load(counter) + GROUPS)


@triton.jit
def _incoming(  # type: ignore[no-untyped-def]
    x, grad, mean, rstd, scale, shift, place, there, RECTIFY: tl.constexpr
):
    """The normalised input, and the gradient that passes the ReLU."""
    value = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    unit = (value - mean[None, :]) * rstd[None, :]
    g = tl.load(grad + place, mask=there, other=0.0).to(tl.float32)
    if RECTIFY:
        # Zero is decided on the number that was stored, which may have rounded to it.
        made = (unit * scale[None, :] + shift[None, :]).to(x.dtype.element_ty)
        g = tl.where(made <= 0, 0.0, g)
    return tl.where(there, unit, 0.0), g


@triton.jit
def _sums_kernel(  # type: ignore[no-untyped-def]
    x, grad, found, weight, bias, partial, rows, channels,
    RECTIFY: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, TILES: tl.constexpr,
    INNER: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    program, group = tl.program_id(0), tl.program_id(2)
    x += group.to(tl.int64) * rows * channels
    grad += group.to(tl.int64) * rows * channels
    found += group * (2 * channels)
    partial += group * tl.num_programs(0) * (2 * channels)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < channels
    mean = tl.load(found + c, mask=inside, other=0.0)
    rstd = tl.load(found + channels + c, mask=inside, other=0.0)
    scale = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    first = tl.zeros([ROWS, CHANNELS], tl.float32)
    second = tl.zeros([ROWS, CHANNELS], tl.float32)
    for tile in range(TILES):
        place, there = _tile(program * TILES + tile, channels, rows, ROWS, CHANNELS, INNER, LONG)
        unit, g = _incoming(x, grad, mean, rstd, scale, shift, place, there, RECTIFY)
        first += g * unit
        second += g
    place = partial + program * (2 * channels) + c
    tl.store(place, tl.sum(first, axis=0), mask=inside)
    tl.store(place + channels, tl.sum(second, axis=0), mask=inside)


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    x, grad, found, weight, bias, partial, sums, out, rows, channels, shares,
    RECTIFY: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, TILES: tl.constexpr,
    SHARES: tl.constexpr, INNER: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    program, group = tl.program_id(0), tl.program_id(2)
    x += group.to(tl.int64) * rows * channels
    grad += group.to(tl.int64) * rows * channels
    out += group.to(tl.int64) * rows * channels
    found += group * (2 * channels)
    sums += group * (2 * channels)
    partial += group * shares * (2 * channels)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < channels
    mean = tl.load(found + c, mask=inside, other=0.0)
    rstd = tl.load(found + channels + c, mask=inside, other=0.0)
    scale = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    along, level = _total(partial, shares, c, inside, channels, SHARES)
    if program == 0:
        tl.store(sums + c, along, mask=inside)
        tl.store(sums + channels + c, level, mask=inside)
    for tile in range(TILES):
        place, there = _tile(program * TILES + tile, channels, rows, ROWS, CHANNELS, INNER, LONG)
        unit, g = _incoming(x, grad, mean, rstd, scale, shift, place, there, RECTIFY)
        value = g - (level / rows)[None, :] - unit * (along / rows)[None, :]
        value *= (scale * rstd)[None, :]
        tl.store(out + place, value.to(out.dtype.element_ty), mask=there)


class _Sizes:
    """How each group of rows is cut into tiles, and these into programs."""

    def __init__(self, x: torch.Tensor, groups: int) -> None:
        beside = inner(x)
        assert beside is not None
        self.channels, self.groups = x.shape[1], groups
        self.rows = x.numel() // (self.channels * groups)
        wide = min(triton.next_power_of_2(self.channels), WIDE) if beside == 1 else 1
        halves = 2 if beside == 1 and x.numel() < FEW else 1
        tall = min(TILE // halves // wide, triton.next_power_of_2(self.rows))
        self._blocks = triton.cdiv(self.channels, wide)
        self._tiles = triton.cdiv(self.rows, tall)
        self._most = READERS if beside == 1 else triton.cdiv(PROGRAMS, self._blocks * groups)
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
        each = triton.cdiv(self._tiles, min(limit, self._most))
        grid = triton.cdiv(self._tiles, each), self._blocks, self.groups
        return grid, {**self._settings, "TILES": each}

    def room(self, x: torch.Tensor, *each: int) -> torch.Tensor:
        """For FP32 numbers of every group."""
        shape = (self.groups, *each, 2, self.channels)
        return torch.empty(shape, dtype=torch.float32, device=x.device)


def _launch(
    kernel: Any, grid: tuple[int, ...], first: torch.Tensor, *args: Any, **settings: Any
) -> None:
    """On the GPU of the first tensor; in a prediction nothing runs."""
    if not is_fake(first):
        with torch.cuda.device_of(first):
            kernel[grid](first, *args, **settings)


def statistics(x: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for mean and reciprocal deviation, (groups, 2, channels), and sums to make them from."""
    sizes = _Sizes(x, groups)
    partial = sizes.room(x, sizes.shares)
    grid, settings = sizes.split(SHARES)
    _launch(_statistics_kernel, grid, x, partial, sizes.rows, sizes.channels, **settings)
    return sizes.room(x), partial


def normalise(
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
    grid, settings = sizes.split(READERS)
    first = partial is not None
    mean, var, counter = (found, found, found) if running is None else running
    _launch(
        _normalise_kernel, grid,
        x, found, found if partial is None else partial, mean, var, counter, weight, bias, out,
        sizes.rows, sizes.channels, sizes.shares, momentum, eps,
        FIRST=first, RUNNING=first and sizes.groups == 1, RECTIFY=rectify, SHARES=SHARES,
        **settings,
    )  # fmt: skip
    if first and sizes.groups > 1:
        _launch(
            _running_kernel, (triton.cdiv(sizes.channels, WIDE),),
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
        _sums_kernel, grid,
        x, grad, found, weight, bias, partial, sizes.rows, sizes.channels,
        RECTIFY=rectify, **settings,
    )  # fmt: skip
    sums, out = sizes.room(x), torch.empty_like(x)
    grid, settings = sizes.split(READERS)
    _launch(
        _gradient_kernel, grid,
        x, grad, found, weight, bias, partial, sums, out,
        sizes.rows, sizes.channels, sizes.shares, RECTIFY=rectify, SHARES=SHARES, **settings,
    )  # fmt: skip
    return out, sums
