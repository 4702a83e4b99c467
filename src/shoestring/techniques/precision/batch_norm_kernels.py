"""BatchNorm, and the ReLU behind it, on rows of 16-bit channels: Triton kernels for CUDA.

A tensor here is a matrix of rows (examples, or pixels of images that are channels-last) and
channels. Sums over rows are made in two steps that depend on nothing but the sizes: each program
adds up its share of the rows, and the last one to finish adds up the shares in their order. So the
same input always gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

TILE = 4096
"""Elements of a tile: the rows are as many as fit beside the channels."""
SHARES = 64
"""Programs at most over which a sum is split."""


@triton.jit
def _finish(partial, c, inside, channels, SHARES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both sums of all programs, in order."""
    q = tl.arange(0, SHARES)
    there = (q < tl.num_programs(0))[:, None] & inside[None, :]
    place = partial + q[:, None] * (2 * channels) + c[None, :]
    first = tl.sum(tl.load(place, mask=there, other=0.0, cache_modifier=".cg"), axis=0)
    second = tl.sum(tl.load(place + channels, mask=there, other=0.0, cache_modifier=".cg"), axis=0)
    return first, second


@triton.jit
def _statistics_kernel(  # type: ignore[no-untyped-def]
    x, partial, ticket, out, running_mean, running_var, counter, rows, channels, momentum, eps,
    RUNNING: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, TILES: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    program, block = tl.program_id(0), tl.program_id(1)
    c = block * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < channels
    # Sums of differences from the first row: no cancellation where the mean is far from zero.
    shift = tl.load(x + c, mask=inside, other=0.0).to(tl.float32)
    first = tl.zeros([CHANNELS], tl.float32)
    second = tl.zeros([CHANNELS], tl.float32)
    for tile in range(TILES):
        r = (program * TILES + tile) * ROWS + tl.arange(0, ROWS)
        there = (r < rows)[:, None] & inside[None, :]
        value = tl.load(x + r.to(tl.int64)[:, None] * channels + c[None, :], mask=there, other=0.0)
        value = tl.where(there, value.to(tl.float32) - shift[None, :], 0.0)
        first += tl.sum(value, axis=0)
        second += tl.sum(value * value, axis=0)
    place = partial + program * (2 * channels) + c
    tl.store(place, first, mask=inside)
    tl.store(place + channels, second, mask=inside)
    tl.debug_barrier()
    if tl.atomic_add(ticket + block, 1) == tl.num_programs(0) - 1:
        first, second = _finish(partial, c, inside, channels, SHARES)
        offset = first / rows
        variance = tl.maximum(second / rows - offset * offset, 0.0)
        mean = shift + offset
        tl.store(out + c, mean, mask=inside)
        tl.store(out + channels + c, 1.0 / tl.sqrt(variance + eps), mask=inside)
        tl.store(ticket + block, 0)
        if RUNNING:
            old = tl.load(running_mean + c, mask=inside, other=0.0)
            tl.store(running_mean + c, old + momentum * (mean - old), mask=inside)
            old = tl.load(running_var + c, mask=inside, other=0.0)
            unbiased = variance * (rows / (rows - 1.0))
            tl.store(running_var + c, old + momentum * (unbiased - old), mask=inside)
            if block == 0:
                tl.store(counter, tl.load(counter) + 1)


@triton.jit
def _normalise_kernel(  # type: ignore[no-untyped-def]
    x, statistics, weight, bias, out, rows, channels,
    RECTIFY: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < channels
    mean = tl.load(statistics + c, mask=inside, other=0.0)
    rstd = tl.load(statistics + channels + c, mask=inside, other=0.0)
    scale = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (r < rows)[:, None] & inside[None, :]
    place = r.to(tl.int64)[:, None] * channels + c[None, :]
    value = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    value = (value - mean[None, :]) * rstd[None, :] * scale[None, :] + shift[None, :]
    if RECTIFY:
        value = tl.maximum(value, 0.0)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=there)


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
        g = tl.where(made > 0, g, 0.0)
    return tl.where(there, unit, 0.0), g


@triton.jit
def _sums_kernel(  # type: ignore[no-untyped-def]
    x, grad, statistics, weight, bias, partial, ticket, out, rows, channels,
    RECTIFY: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, TILES: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    program, block = tl.program_id(0), tl.program_id(1)
    c = block * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < channels
    mean = tl.load(statistics + c, mask=inside, other=0.0)
    rstd = tl.load(statistics + channels + c, mask=inside, other=0.0)
    scale = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    first = tl.zeros([CHANNELS], tl.float32)
    second = tl.zeros([CHANNELS], tl.float32)
    for tile in range(TILES):
        r = (program * TILES + tile) * ROWS + tl.arange(0, ROWS)
        there = (r < rows)[:, None] & inside[None, :]
        place = r.to(tl.int64)[:, None] * channels + c[None, :]
        unit, g = _incoming(x, grad, mean, rstd, scale, shift, place, there, RECTIFY)
        first += tl.sum(g * unit, axis=0)
        second += tl.sum(g, axis=0)
    place = partial + program * (2 * channels) + c
    tl.store(place, first, mask=inside)
    tl.store(place + channels, second, mask=inside)
    tl.debug_barrier()
    if tl.atomic_add(ticket + block, 1) == tl.num_programs(0) - 1:
        first, second = _finish(partial, c, inside, channels, SHARES)
        tl.store(out + c, first, mask=inside)
        tl.store(out + channels + c, second, mask=inside)
        tl.store(ticket + block, 0)


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    x, grad, statistics, weight, bias, sums, out, rows, channels,
    RECTIFY: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < channels
    mean = tl.load(statistics + c, mask=inside, other=0.0)
    rstd = tl.load(statistics + channels + c, mask=inside, other=0.0)
    scale = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    along = tl.load(sums + c, mask=inside, other=0.0) / rows
    level = tl.load(sums + channels + c, mask=inside, other=0.0) / rows
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (r < rows)[:, None] & inside[None, :]
    place = r.to(tl.int64)[:, None] * channels + c[None, :]
    unit, g = _incoming(x, grad, mean, rstd, scale, shift, place, there, RECTIFY)
    value = (g - level[None, :] - unit * along[None, :]) * (scale * rstd)[None, :]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=there)


def _sizes(x: torch.Tensor) -> tuple[int, int, dict[str, Any], int]:
    """Rows, channels, the shape of a tile, and blocks of channels."""
    channels = x.shape[1]
    wide = min(triton.next_power_of_2(channels), 128)
    tile = {"ROWS": TILE // wide, "CHANNELS": wide}
    return x.numel() // channels, channels, tile, triton.cdiv(channels, wide)


def _shares(rows: int, tile_rows: int) -> tuple[int, int]:
    """Programs that split the rows, and the tiles of each."""
    tiles = triton.cdiv(rows, tile_rows)
    each = triton.cdiv(tiles, SHARES)
    return triton.cdiv(tiles, each), each


def statistics(
    x: torch.Tensor,
    ticket: torch.Tensor,
    running: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    momentum: float,
    eps: float,
) -> torch.Tensor:
    """Mean and reciprocal deviation of every channel, (2, channels); moves the running ones."""
    rows, channels, tile, blocks = _sizes(x)
    programs, each = _shares(rows, tile["ROWS"])
    partial = torch.empty(programs, 2, channels, dtype=torch.float32, device=x.device)
    out = torch.empty(2, channels, dtype=torch.float32, device=x.device)
    mean, var, counter = (out, out, ticket) if running is None else running
    _statistics_kernel[(programs, blocks)](
        x, partial, ticket, out, mean, var, counter, rows, channels, momentum, eps,
        RUNNING=running is not None, TILES=each, SHARES=SHARES, **tile,
    )  # fmt: skip
    return out


def normalise(
    x: torch.Tensor,
    found: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    rectify: bool,
) -> torch.Tensor:
    """(x - mean) / deviation * weight + bias, and its positive part."""
    rows, channels, tile, blocks = _sizes(x)
    out = torch.empty_like(x)
    _normalise_kernel[(triton.cdiv(rows, tile["ROWS"]), blocks)](
        x, found, weight, bias, out, rows, channels, RECTIFY=rectify, **tile
    )
    return out


def gradients(
    x: torch.Tensor,
    grad: torch.Tensor,
    found: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    ticket: torch.Tensor,
    rectify: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of x, and those of weight and bias as (2, channels)."""
    rows, channels, tile, blocks = _sizes(x)
    programs, each = _shares(rows, tile["ROWS"])
    partial = torch.empty(programs, 2, channels, dtype=torch.float32, device=x.device)
    sums = torch.empty(2, channels, dtype=torch.float32, device=x.device)
    _sums_kernel[(programs, blocks)](
        x, grad, found, weight, bias, partial, ticket, sums, rows, channels,
        RECTIFY=rectify, TILES=each, SHARES=SHARES, **tile,
    )  # fmt: skip
    del partial
    out = torch.empty_like(x)
    _gradient_kernel[(triton.cdiv(rows, tile["ROWS"]), blocks)](
        x, grad, found, weight, bias, sums, out, rows, channels, RECTIFY=rectify, **tile
    )
    return out, sums
