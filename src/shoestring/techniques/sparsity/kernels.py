"""Scatter and gather through a bitmask on CUDA, in Triton: no table of positions is made.

Each program handles `BLOCK` elements. It knows how many nonzeros lie before its block from
`starts` (32 bits a block, 1/128 bit an element) and counts the rest from the bits themselves.
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
def _scatter_kernel(packed, starts, values, dense, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    byte = tl.load(packed + (place >> 3), mask=inside, other=0).to(tl.int32)
    bit = (byte >> (place & 7).to(tl.int32)) & 1
    source = tl.load(starts + block) + tl.cumsum(bit, axis=0) - bit
    value = tl.load(values + source, mask=bit == 1, other=0)
    tl.store(dense + place, value, mask=inside)


@triton.jit
def _gather_kernel(packed, starts, values, dense, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    byte = tl.load(packed + (place >> 3), mask=inside, other=0).to(tl.int32)
    bit = (byte >> (place & 7).to(tl.int32)) & 1
    target = tl.load(starts + block) + tl.cumsum(bit, axis=0) - bit
    value = tl.load(dense + place, mask=bit == 1, other=0)
    tl.store(values + target, value, mask=bit == 1)


def block_starts(packed: torch.Tensor) -> torch.Tensor:
    """Nonzeros before each block, int32."""
    blocks = -(-packed.numel() // (BLOCK // 8))
    counts = torch.empty(blocks, dtype=torch.int32, device=packed.device)
    _count_kernel[(blocks,)](packed, counts, packed.numel(), BYTES=BLOCK // 8)
    return counts.cumsum(0, dtype=torch.int32).sub_(counts)


def scatter(
    values: torch.Tensor, packed: torch.Tensor, starts: torch.Tensor, shape: Sequence[int]
) -> torch.Tensor:
    """The dense tensor of the values."""
    dense = torch.empty(math.prod(shape), dtype=values.dtype, device=values.device)
    _scatter_kernel[(starts.numel(),)](packed, starts, values, dense, dense.numel(), BLOCK=BLOCK)
    return dense.view(tuple(shape))


def gather(
    dense: torch.Tensor, packed: torch.Tensor, starts: torch.Tensor, nonzeros: int
) -> torch.Tensor:
    """The values of a dense tensor at the nonzeros."""
    values = torch.empty(nonzeros, dtype=dense.dtype, device=dense.device)
    flat = dense.reshape(-1)
    _gather_kernel[(starts.numel(),)](packed, starts, values, flat, flat.numel(), BLOCK=BLOCK)
    return values
