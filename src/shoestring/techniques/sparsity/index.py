"""Where the nonzeros of a tensor lie: one bit for each element, or the columns of each row.

An index is one flat tensor of bytes. A bitmask has ceil(elements / 8) of them, element i at bit
i % 8 of byte i // 8. Column indices are the report's compressed sparse rows (Section 3.1) in types
that exist: rows + 1 pointers of 32 bits, then a column for each nonzero in 8, 16 or 32 bits, where
the report counts ceil(log2(columns)). The smaller of the two is kept, so its length tells which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...trace.fakes import is_fake
from ...trace.passes import counted, standing_for

CHUNK = 32_760
"""Elements unpacked at a time on the CPU: from 32,768 on `masked_select` makes int64 tables."""


def _rows_columns(shape: Sequence[int]) -> tuple[int, int]:
    return (shape[0], math.prod(shape[1:])) if len(shape) else (1, 1)


def _column_dtype(columns: int) -> torch.dtype:
    if columns <= 1 << 8:
        return torch.uint8
    return torch.int16 if columns <= 1 << 16 else torch.int32


def bitmask_bytes(shape: Sequence[int]) -> int:
    """ceil(elements / 8)."""
    return -(-math.prod(shape) // 8)


def column_bytes(shape: Sequence[int], nonzeros: int) -> int:
    """Row pointers and columns, in whole types."""
    rows, columns = _rows_columns(shape)
    return 4 * (rows + 1) + nonzeros * _column_dtype(columns).itemsize


def index_bytes(shape: Sequence[int], nonzeros: int) -> int:
    """Bytes of the index that `encode` makes."""
    return min(bitmask_bytes(shape), column_bytes(shape, nonzeros))


def is_bitmask(index: torch.Tensor, shape: Sequence[int]) -> bool:
    """Whether the index is a bitmask; columns are kept only where they are shorter."""
    return index.numel() == bitmask_bytes(shape)


def encode(mask: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The flat mask as the smaller index."""
    if column_bytes(shape, int(mask.sum())) < bitmask_bytes(shape):
        rows, columns = _rows_columns(shape)
        table = mask.view(rows, columns)
        pointers = torch.zeros(rows + 1, dtype=torch.int32, device=mask.device)
        pointers[1:] = table.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        places = mask.nonzero().flatten().remainder_(columns).to(_column_dtype(columns))
        return torch.cat([pointers.view(torch.uint8), places.view(torch.uint8)])
    padded = torch.zeros(bitmask_bytes(shape), 8, dtype=torch.uint8, device=mask.device)
    padded.view(-1)[: mask.numel()] = mask
    return torch.bitwise_left_shift(padded, _shifts(mask.device)).sum(1, dtype=torch.uint8)


def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """Bits of the bytes as a flat mask, with no other temporary."""
    bits = packed.new_empty(packed.numel(), 8)
    torch.bitwise_right_shift(packed.unsqueeze(1), _shifts(packed.device), out=bits)
    return bits.bitwise_and_(1).view(torch.bool).view(-1)


def _positions(index: torch.Tensor, shape: Sequence[int], nonzeros: int) -> torch.Tensor:
    """Flat positions of the nonzeros of a column index: few, or it would be a bitmask."""
    rows, columns = _rows_columns(shape)
    dtype = _column_dtype(columns)
    split = 4 * (rows + 1)
    counts = _aligned(index[:split]).view(torch.int32).diff()
    row = torch.arange(rows, device=index.device).mul_(columns)
    positions = torch.repeat_interleave(row, counts, output_size=nonzeros)
    places = _aligned(index[split:]).view(dtype)
    if dtype is torch.int16:  # stored without a sign, which torch has no arithmetic for
        return positions.add_(places.to(torch.int32).bitwise_and_(0xFFFF))
    return positions.add_(places)


def _aligned(part: torch.Tensor) -> torch.Tensor:
    """The bytes where a wider type may begin: an index is itself a part of a tensor on CUDA."""
    return part.clone() if part.storage_offset() % 4 else part


def decode(index: torch.Tensor, shape: Sequence[int], nonzeros: int) -> torch.Tensor:
    """The flat mask of an index."""
    numel = math.prod(shape)
    if is_bitmask(index, shape):
        return _unpack(index)[:numel]
    mask = torch.zeros(numel, dtype=torch.bool, device=index.device)
    mask[_positions(index, shape, nonzeros)] = True
    return mask


def is_sound(index: torch.Tensor, shape: Sequence[int], nonzeros: int) -> bool:
    """Whether an index that may come from anywhere has so many nonzeros, all within the tensor.

    Kernels do not look: a wrong one would read and write elsewhere.
    """
    if index.dtype is not torch.uint8 or index.dim() != 1:
        return False
    if index.numel() != index_bytes(shape, nonzeros):
        return False
    rows, columns = _rows_columns(shape)
    if is_bitmask(index, shape):
        bits = _unpack(index)
        inside = int(bits[: rows * columns].sum())
        return inside == nonzeros and not bool(bits[rows * columns :].any())
    pointers = _aligned(index[: 4 * (rows + 1)]).view(torch.int32)
    if int(pointers[0]) or int(pointers[-1]) != nonzeros or bool((pointers.diff() < 0).any()):
        return False
    places = _positions(index, shape, nonzeros)
    row = torch.repeat_interleave(torch.arange(rows, device=index.device), pointers.diff())
    return bool(((places >= row * columns) & (places < (row + 1) * columns)).all()) and bool(
        (places.diff() > 0).all()
    )


def _chunks(index: torch.Tensor, numel: int) -> list[tuple[slice, int]]:
    """Elements that are unpacked together, each with how many such chunks it stands for."""
    size = CHUNK if index.device.type == "cpu" else -(-numel // 8) * 8
    starts = range(0, numel, size)
    # A trace of one operation a chunk would take hours for tensors of 10^11 elements.
    chosen = counted(starts) if is_fake(index) else [(start, 1) for start in starts]
    return [(slice(start, min(start + size, numel)), times) for start, times in chosen]


def _mask(index: torch.Tensor, place: slice) -> torch.Tensor:
    return _unpack(index[place.start // 8 : -(-place.stop // 8)])[: place.stop - place.start]


def scatter(values: torch.Tensor, index: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The dense tensor of the values, in plain PyTorch."""
    dense = values.new_zeros(math.prod(shape))
    if not is_bitmask(index, shape):
        dense[_positions(index, shape, values.numel())] = values
        return dense.view(shape)
    done = 0
    for place, times in _chunks(index, dense.numel()):
        with standing_for(times):
            mask = _mask(index, place)
            dense[place].masked_scatter_(mask, values[done:])
            if place.stop < dense.numel() and not is_fake(mask):
                done += int(mask.sum())
            del mask  # before the next one is made
    return dense.view(shape)


def gather(dense: torch.Tensor, index: torch.Tensor, nonzeros: int) -> torch.Tensor:
    """The values of a dense tensor at the nonzeros, in plain PyTorch."""
    shape, flat = dense.shape, dense.reshape(-1)
    if not is_bitmask(index, shape):
        return flat[_positions(index, shape, nonzeros)]
    values = flat.new_empty(nonzeros)
    done = 0
    for place, times in _chunks(index, flat.numel()):
        with standing_for(times):
            mask = _mask(index, place)
            if is_fake(mask):  # as many as there are on average
                found = flat.new_empty(nonzeros * mask.numel() // flat.numel())
            else:
                found = flat[place].masked_select(mask)
            values[done : done + found.numel()] = found
            done += found.numel()
            del mask, found  # before the next ones are made
    return values
