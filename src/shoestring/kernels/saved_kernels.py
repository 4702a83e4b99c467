"""Tensors saved for backward in few bits, in Triton: one pass, no copies.

`saved_codes` is the same in PyTorch. Import it where there is Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .quantized_update import _floats, _random
from .saved_codes import _SHIFT, GROUP, groups_of

ROWS = 8
"""Groups of one program."""
_BITS_FROM = tl.constexpr(_SHIFT)


@triton.jit
def encode_kernel(  # type: ignore[no-untyped-def]
    values, codes, ranges, counter, elements, groups,
    BITS: tl.constexpr, SIGNS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 8 // BITS
    WIDTH: tl.constexpr = GROUP // PARTS
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = group[:, None]
    kept = row < groups
    if not SIGNS:
        place = row * GROUP + tl.arange(0, GROUP)[None, :]
        there = place < elements
        x = tl.load(values + place, mask=there, other=0.0).to(tl.float32)
        low = tl.min(tl.where(there, x, float("inf")), axis=1)
        high = tl.max(tl.where(there, x, float("-inf")), axis=1)
        # Minimum and maximum leave out NaN; a sum does not.
        spoiled = tl.sum(tl.where(there, x - x, 0.0), axis=1)
        low, high = low + spoiled, high + spoiled
        step = (high - low) / ((1 << BITS) - 1)
        inverse = tl.where(step > 0, 1.0 / step, tl.where(step == 0, 0.0, step))
        tl.store(ranges + 2 * group, low, mask=group < groups)
        tl.store(ranges + 2 * group + 1, step, mask=group < groups)
    drawn_from = tl.load(counter)
    byte = tl.zeros((ROWS, WIDTH), dtype=tl.int32)
    for part in tl.static_range(PARTS):
        place = row * GROUP + part * WIDTH + tl.arange(0, WIDTH)[None, :]
        x = tl.load(values + place, mask=place < elements, other=0.0).to(tl.float32)
        if SIGNS:
            code = tl.where(x > 0, 1, 0)
        else:
            noise = _floats(_random(drawn_from, 0, place), _BITS_FROM)
            q = tl.floor((x - low[:, None]) * inverse[:, None] + noise)
            code = tl.minimum(tl.maximum(q, 0.0), (1 << BITS) - 1.0).to(tl.int32)
            code = tl.where(place < elements, code, 0)
        byte = byte | (code << (part * BITS))
    target = row * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(codes + target, byte.to(tl.uint8), mask=kept)


@triton.jit
def decode_kernel(  # type: ignore[no-untyped-def]
    codes, ranges, values, elements, groups,
    BITS: tl.constexpr, SIGNS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 8 // BITS
    WIDTH: tl.constexpr = GROUP // PARTS
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = group[:, None]
    source = row * WIDTH + tl.arange(0, WIDTH)[None, :]
    byte = tl.load(codes + source, mask=row < groups, other=0).to(tl.int32)
    if not SIGNS:
        low = tl.load(ranges + 2 * group, mask=group < groups, other=0.0)
        step = tl.load(ranges + 2 * group + 1, mask=group < groups, other=0.0)
    for part in tl.static_range(PARTS):
        x = ((byte >> (part * BITS)) & ((1 << BITS) - 1)).to(tl.float32)
        if not SIGNS:
            x = x * step[:, None] + low[:, None]
        place = row * GROUP + part * WIDTH + tl.arange(0, WIDTH)[None, :]
        tl.store(values + place, x.to(values.dtype.element_ty), mask=place < elements)


def encode(
    flat: torch.Tensor,
    codes: torch.Tensor,
    ranges: torch.Tensor | None,
    bits: int,
    counter: torch.Tensor,
) -> None:
    """As `saved_codes.encode`."""
    groups = groups_of(flat.numel())
    encode_kernel[(triton.cdiv(groups, ROWS),)](
        flat, codes, codes if ranges is None else ranges, counter, flat.numel(), groups,
        BITS=bits, SIGNS=ranges is None, GROUP=GROUP, ROWS=ROWS,
    )  # fmt: skip


def decode(codes: torch.Tensor, ranges: torch.Tensor | None, bits: int, flat: torch.Tensor) -> None:
    """As `saved_codes.decode`."""
    groups = groups_of(flat.numel())
    decode_kernel[(triton.cdiv(groups, ROWS),)](
        codes, codes if ranges is None else ranges, flat, flat.numel(), groups,
        BITS=bits, SIGNS=ranges is None, GROUP=GROUP, ROWS=ROWS,
    )  # fmt: skip
