"""BatchNorm, and the ReLU behind it: Triton kernels for CUDA.

A tensor here is a matrix of rows (examples, or pixels of images) and channels. Of every channel,
INNER elements lie beside each other: one where a pixel's channels do (channels-last, rows of
features), an image where the tensor is contiguous. A tile is many channels wide in the first case
and one in the second, so that neighbors are read together.

A sum over rows is made in two steps that depend on nothing but the sizes: some programs add up a
share of the rows each, and every program of the kernel that needs the sum adds up the shares, in
the same order. So no kernel waits for another, and the same input gives the same bits. The rows
may be several groups of equal size, each with statistics of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def statistics(  # type: ignore[no-untyped-def]
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
def normalize(  # type: ignore[no-untyped-def]
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
def running(  # type: ignore[no-untyped-def]
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
    """The normalized input, and the gradient that passes the ReLU."""
    value = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    unit = (value - mean[None, :]) * rstd[None, :]
    g = tl.load(grad + place, mask=there, other=0.0).to(tl.float32)
    if RECTIFY:
        # Zero is decided on the number that was stored, which may have rounded to it.
        made = (unit * scale[None, :] + shift[None, :]).to(x.dtype.element_ty)
        g = tl.where(made <= 0, 0.0, g)
    return tl.where(there, unit, 0.0), g


@triton.jit
def sums(  # type: ignore[no-untyped-def]
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
def gradient(  # type: ignore[no-untyped-def]
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
