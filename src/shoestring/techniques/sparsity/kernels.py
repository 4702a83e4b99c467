"""Scatter and gather through a bitmask on CUDA, in Triton: no table of positions is made.

Each program handles `BLOCK` elements. It knows how many nonzeros lie before its block from
`starts` (32 bits a block, 1/128 bit an element) and counts the rest from the bits themselves.
Values and bits are in the order of the shape; a channels-last dense tensor is read and written
where its elements lie, so that no copy changes its layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _count_kernel(packed, counts, n_bytes, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    place = block.to(tl.int64) * BYTES + tl.arange(0, BYTES)
    byte = tl.load(packed + place, mask=place < n_bytes, other=0).to(tl.int32)
    total = tl.zeros([BYTES], dtype=tl.int32)
    for bit in tl.static_range(8):
        total += (byte >> bit) & 1
    tl.store(counts + block, tl.sum(total, axis=0))


@triton.jit
def _where(place, channels, taps, CHANNELS_LAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The position in memory of an element (output, channel, tap) of the dense tensor."""
    if CHANNELS_LAST:
        row = place // (channels * taps)
        rest = place - row * (channels * taps)
        channel = rest // taps
        place = row * (channels * taps) + (rest - channel * taps) * channels + channel
    return place


@triton.jit
def _scatter_kernel(  # type: ignore[no-untyped-def]
    packed, starts, values, dense, numel, channels, taps,
    CHANNELS_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    byte = tl.load(packed + (place >> 3), mask=inside, other=0).to(tl.int32)
    bit = (byte >> (place & 7).to(tl.int32)) & 1
    source = tl.load(starts + block) + tl.cumsum(bit, axis=0) - bit
    value = tl.load(values + source, mask=bit == 1, other=0)
    tl.store(dense + _where(place, channels, taps, CHANNELS_LAST), value, mask=inside)


@triton.jit
def _gather_kernel(  # type: ignore[no-untyped-def]
    packed, starts, values, dense, numel, channels, taps,
    CHANNELS_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    byte = tl.load(packed + (place >> 3), mask=inside, other=0).to(tl.int32)
    bit = (byte >> (place & 7).to(tl.int32)) & 1
    target = tl.load(starts + block) + tl.cumsum(bit, axis=0) - bit
    source = dense + _where(place, channels, taps, CHANNELS_LAST)
    value = tl.load(source, mask=bit == 1, other=0)
    tl.store(values + target, value, mask=bit == 1)


def block_starts(packed: torch.Tensor) -> torch.Tensor:
    """Nonzeros before each block, int32."""
    blocks = -(-packed.numel() // (BLOCK // 8))
    counts = torch.empty(blocks, dtype=torch.int32, device=packed.device)
    _count_kernel[(blocks,)](packed, counts, packed.numel(), BYTES=BLOCK // 8)
    return counts.cumsum(0, dtype=torch.int32).sub_(counts)


def _layout(shape: Sequence[int], channels_last: bool) -> tuple[int, int, bool]:
    """Channels and taps of a kernel that lies channels-last; else nothing to know."""
    return (shape[1], math.prod(shape[2:]), True) if channels_last else (1, 1, False)


def scatter(
    values: torch.Tensor,
    packed: torch.Tensor,
    starts: torch.Tensor,
    shape: Sequence[int],
    channels_last: bool = False,
) -> torch.Tensor:
    """The dense tensor of the values."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    dense = torch.empty(tuple(shape), dtype=values.dtype, device=values.device, memory_format=form)
    channels, taps, last = _layout(shape, channels_last)
    _scatter_kernel[(starts.numel(),)](
        packed, starts, values, dense, dense.numel(), channels, taps, last, BLOCK=BLOCK
    )
    return dense


def gather(
    dense: torch.Tensor,
    packed: torch.Tensor,
    starts: torch.Tensor,
    nonzeros: int,
    channels_last: bool = False,
) -> torch.Tensor:
    """The values of a dense tensor at the nonzeros."""
    values = torch.empty(nonzeros, dtype=dense.dtype, device=dense.device)
    dense = dense if channels_last else dense.contiguous()
    channels, taps, last = _layout(dense.shape, channels_last)
    _gather_kernel[(starts.numel(),)](
        packed, starts, values, dense, dense.numel(), channels, taps, last, BLOCK=BLOCK
    )
    return values
