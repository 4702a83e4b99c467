"""Tensors saved for backward in 8, 4 or 2 bits, or their signs in one.

256 elements in the order of memory share a minimum and a step. A code is

    floor((x - minimum) / step + noise),   step = (maximum - minimum) / (2^bits - 1)

with noise in (0, 1), so that the expected code is the number itself. The ends are exact: a mask of
two values stays what it is. Signs are for ReLU, whose gradient asks only where its output is
positive, and must not be answered at random.

Codes of one byte are a quarter (2 bits), half (4 bits) or an eighth (signs) of a group apart.
`saved_kernels` has the same in Triton, with the same random bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..trace.fakes import is_fake
from ..trace.passes import passes, peak_only
from .codes import noise_of, random_bits

GROUP = 256
SIGNS = 1
"""In place of bits."""
_SHIFT = 8
_LEAST = 4096
"""Elements that are in FP32 at a time, at least; else a 16th."""


def groups_of(elements: int) -> int:
    """How many groups hold so many elements."""
    return -(-elements // GROUP)


def code_bytes(elements: int, bits: int) -> int:
    """Of codes; the last group is whole."""
    return groups_of(elements) * GROUP * bits // 8


def encode(
    flat: torch.Tensor,
    codes: torch.Tensor,
    ranges: torch.Tensor | None,
    bits: int,
    counter: torch.Tensor,
) -> None:
    """Fill codes, and minimum and step of every group; piece by piece."""
    size = _piece(flat.numel())
    for start in _starts(flat, size):
        _encode_piece(flat[start : start + size], start, codes, ranges, bits, counter)


def _encode_piece(
    part: torch.Tensor,
    start: int,
    codes: torch.Tensor,
    ranges: torch.Tensor | None,
    bits: int,
    counter: torch.Tensor,
) -> None:
    """A function of its own, so that nothing of a piece is there while the next one is encoded."""
    first, count = start // GROUP, groups_of(part.numel())
    numbers = part.new_empty(count * GROUP, dtype=torch.float32)
    numbers[: part.numel()] = part
    numbers[part.numel() :] = part[-1]
    rows = numbers.view(count, GROUP)
    if ranges is None:
        rows = (rows > 0).float()
    else:
        low, high = rows.amin(1), rows.amax(1)
        step = (high - low).div_(2**bits - 1)
        ranges[first : first + count, 0], ranges[first : first + count, 1] = low, step
        inverse = torch.where(step > 0, 1 / step, torch.where(step == 0, 0.0, step))
        rows.sub_(low[:, None]).mul_(inverse[:, None])
        drawn = random_bits(counter, 0, start, rows.numel())
        rows.add_(noise_of(drawn, _SHIFT).view_as(rows)).floor_().clamp_(0, 2**bits - 1)
    each = GROUP * bits // 8
    codes[first * each : (first + count) * each] = _joined(rows, bits)


def decode(codes: torch.Tensor, ranges: torch.Tensor | None, bits: int, flat: torch.Tensor) -> None:
    """Fill a tensor from codes; signs as ones and zeros."""
    size = _piece(flat.numel())
    for start in _starts(flat, size):
        _decode_piece(codes, ranges, bits, flat[start : start + size], start)


def _decode_piece(
    codes: torch.Tensor, ranges: torch.Tensor | None, bits: int, part: torch.Tensor, start: int
) -> None:
    first, count, each = start // GROUP, groups_of(part.numel()), GROUP * bits // 8
    rows = _apart(codes[first * each : (first + count) * each].view(count, -1), bits)
    if ranges is not None:
        low, step = ranges[first : first + count].unbind(1)
        rows = rows.mul_(step[:, None]).add_(low[:, None])
    part.copy_(rows.view(-1)[: part.numel()])


def _starts(flat: torch.Tensor, size: int) -> Sequence[int]:
    """Of pieces; a prediction has the first and the last, for there are very many."""
    if not is_fake(flat):
        return range(0, flat.numel(), size)
    with peak_only():
        return passes(range(0, flat.numel(), size))


def _piece(elements: int) -> int:
    return max(elements // 16 // GROUP * GROUP, _LEAST)


def _joined(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers of a group → its bytes."""
    parts = rows.to(torch.uint8).chunk(8 // bits, dim=1)
    made = parts[0].clone()
    for position, part in enumerate(parts[1:], start=1):
        made.bitwise_or_(part << (position * bits))
    return made.reshape(-1)


def _apart(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes of groups → their numbers."""
    made = rows.new_empty((len(rows), GROUP), dtype=torch.float32)
    width = rows.shape[1]
    for position in range(8 // bits):
        made[:, position * width : (position + 1) * width] = (rows >> (position * bits)) & (
            2**bits - 1
        )
    return made
