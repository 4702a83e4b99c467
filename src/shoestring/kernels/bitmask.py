"""Scatter and gather through a bitmask on CUDA, in Triton: no table of positions is made.

Bits and values are in the order of the shape; dense tensors are read and written in the order of
memory, channels-last ones too, so that no copy changes their layout. How many nonzeros lie before
an element is the count before its 4,096 elements (32 bits), that before its 64 elements within
them (16 bits), and the bits of its own 64 before it: about 1/4 bit an element beside the mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .bitmask_counts import COARSE, FINE

BLOCK = 1024

Starts = tuple[torch.Tensor, torch.Tensor]


@triton.jit
def _ones(word):  # type: ignore[no-untyped-def]
    """The number of bits set in each word of 32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return ((word + (word >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def _word(packed, at, there, n_bytes):  # type: ignore[no-untyped-def]
    """32 bits of the mask, byte by byte: a mask may end within a word."""
    word = tl.load(packed + at, mask=there & (at < n_bytes), other=0).to(tl.uint32)
    for byte in tl.static_range(1, 4):
        more = tl.load(packed + at + byte, mask=there & (at + byte < n_bytes), other=0)
        word = word | (more.to(tl.uint32) << (8 * byte))
    return word


@triton.jit
def _aligned_word(packed, at, there):  # type: ignore[no-untyped-def]
    """The same where the mask is whole words."""
    return tl.load(packed.to(tl.pointer_type(tl.uint32)) + (at >> 2), mask=there, other=0)


@triton.jit
def _count_kernel(packed, counts, words, n_bytes, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < words
    low = _ones(_word(packed, place * 8, there, n_bytes))
    high = _ones(_word(packed, place * 8 + 4, there, n_bytes))
    tl.store(counts + place, low + high, mask=there)


@triton.jit
def _element(place, CHANNELS: tl.constexpr, TAPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The element (output, channel, tap) at a position in memory, in the order of the shape.

    Divisors are constants, and numbers have 32 bits where they can: a division by a variable of 64
    bits takes longer than all the rest.
    """
    if TAPS > 1:
        row = place // (CHANNELS * TAPS)
        rest = place - row * (CHANNELS * TAPS)
        tap = rest // CHANNELS
        place = row * (CHANNELS * TAPS) + (rest - tap * CHANNELS) * TAPS + tap
    return place


@triton.jit
def _find(  # type: ignore[no-untyped-def]
    packed, coarse, fine, numel, n_bytes,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Positions in memory, whether each is a nonzero, and which one."""
    block = tl.program_id(0)
    place = (block.to(tl.int64) if WIDE else block) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    element = _element(place, CHANNELS, TAPS)
    group = element >> 6
    if WHOLE:
        low = _aligned_word(packed, group * 8, inside)
        high = _aligned_word(packed, group * 8 + 4, inside)
    else:
        low = _word(packed, group * 8, inside, n_bytes)
        high = _word(packed, group * 8 + 4, inside, n_bytes)
    shift = (element & 31).to(tl.uint32)
    upper = (element & 32) != 0
    word = tl.where(upper, high, low)
    bit = ((word >> shift) & 1) == 1
    before = _ones(word & ((tl.full([BLOCK], 1, tl.uint32) << shift) - 1))
    before += tl.where(upper, _ones(low), 0)
    before += tl.load(fine + group, mask=inside, other=0).to(tl.int32)
    before += tl.load(coarse + (element >> 12), mask=inside, other=0)
    return place, inside, bit & inside, before


@triton.jit
def _scatter_kernel(  # type: ignore[no-untyped-def]
    packed, coarse, fine, values, dense, numel, n_bytes,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place, inside, bit, which = _find(
        packed, coarse, fine, numel, n_bytes, CHANNELS, TAPS, WIDE, WHOLE, BLOCK
    )
    tl.store(dense + place, tl.load(values + which, mask=bit, other=0), mask=inside)


@triton.jit
def _gather_kernel(  # type: ignore[no-untyped-def]
    packed, coarse, fine, values, dense, numel, n_bytes,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place, inside, bit, which = _find(
        packed, coarse, fine, numel, n_bytes, CHANNELS, TAPS, WIDE, WHOLE, BLOCK
    )
    tl.store(values + which, tl.load(dense + place, mask=inside, other=0), mask=bit)


def block_starts(packed: torch.Tensor) -> Starts:
    """Nonzeros before each 4,096 elements, and before each 64 within them."""
    words = triton.cdiv(packed.numel() * 8, FINE)
    counts = torch.empty(words, dtype=torch.int32, device=packed.device)
    grid = (triton.cdiv(words, BLOCK),)
    with torch.cuda.device_of(packed):
        _count_kernel[grid](packed, counts, words, packed.numel(), BLOCK=BLOCK)
    before = counts.cumsum(0, dtype=torch.int32).sub_(counts)
    coarse = before[:: COARSE // FINE].contiguous()
    within = before - coarse.repeat_interleave(COARSE // FINE)[:words]
    return coarse, within.to(torch.int16)


def _layout(shape: Sequence[int], packed: torch.Tensor, channels_last: bool) -> dict[str, int]:
    """The case the kernels are specialized for."""
    numel = math.prod(shape)
    return {
        "numel": numel,
        "n_bytes": packed.numel(),
        "CHANNELS": shape[1] if channels_last else 1,
        "TAPS": math.prod(shape[2:]) if channels_last else 1,
        "WIDE": numel >= 2**31 - BLOCK,
        "WHOLE": numel % FINE == 0 and packed.data_ptr() % 4 == 0,
        "BLOCK": BLOCK,
    }


def scatter(
    values: torch.Tensor,
    packed: torch.Tensor,
    starts: Starts,
    shape: Sequence[int],
    channels_last: bool = False,
) -> torch.Tensor:
    """The dense tensor of the values."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    dense = torch.empty(tuple(shape), dtype=values.dtype, device=values.device, memory_format=form)
    layout = _layout(shape, packed, channels_last)
    grid = (triton.cdiv(layout["numel"], BLOCK),)
    with torch.cuda.device_of(packed):
        _scatter_kernel[grid](packed, *starts, values, dense, **layout)
    return dense


def gather(
    dense: torch.Tensor,
    packed: torch.Tensor,
    starts: Starts,
    nonzeros: int,
    channels_last: bool = False,
) -> torch.Tensor:
    """The values of a dense tensor at the nonzeros."""
    values = torch.empty(nonzeros, dtype=dense.dtype, device=dense.device)
    dense = dense if channels_last else dense.contiguous()
    layout = _layout(dense.shape, packed, channels_last)
    grid = (triton.cdiv(layout["numel"], BLOCK),)
    with torch.cuda.device_of(packed):
        _gather_kernel[grid](packed, *starts, values, dense, **layout)
    return values
