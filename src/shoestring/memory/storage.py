"""Bytes of one tensor: the only place where bits exist, rounded up once per tensor."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import InputError

IndexFormat = Literal["csr", "bitmask", "smallest"]

_ROW_POINTER_BITS = 32


@dataclass(frozen=True)
class SparseBytes:
    """Bytes of a sparse tensor: the values of all its copies, and the index they share."""

    value_bytes: int
    index_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.value_bytes + self.index_bytes


def dense_bytes(numel: int, bits: int) -> int:
    """ceil(numel · bits / 8): a dense tensor of `bits` per element."""
    if numel < 0 or bits < 1:
        raise InputError(f"a tensor cannot have {numel} elements of {bits} bits")
    return -(-numel * bits // 8)


def nonzero_count(numel: int, density: float) -> int:
    """density · numel to the nearest whole number, a half going up, and at least 1.

    The report (Sparsity) fixes the fraction only over the whole network; we round per tensor, and
    never leave one empty, since rewiring grows a tensor by its share of the survivors.
    """
    if not 0 < density <= 1:
        raise InputError(f"density is {density}", hint="use 0 < density <= 1")
    return min(numel, max(1, math.floor(density * numel + 0.5)))


def csr_index_bytes(shape: Sequence[int], nonzeros: int) -> int:
    """Column indices and row pointers of the tensor flattened to shape[0] × (the rest).

    ceil(log2(columns)) bits per nonzero (Sparsity, Storage), plus rows + 1 pointers. The report
    gives no width for the pointers, we take 32 bits; an index has at least 1 bit.
    """
    rows, columns = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    column_bits = max(1, (columns - 1).bit_length())
    return dense_bytes(nonzeros, column_bits) + dense_bytes(rows + 1, _ROW_POINTER_BITS)


def bitmask_index_bytes(numel: int) -> int:
    """One bit per element, zero or not; not in the report."""
    return dense_bytes(numel, 1)


def sparse_bytes(
    shape: Sequence[int],
    nonzeros: int,
    bits: int,
    *,
    copies: int = 1,
    format: IndexFormat = "csr",
) -> SparseBytes:
    """The nonzeros of `copies` tensors that share one index.

    Weight, gradient and momentum share their pattern (Sparsity, Storage), so training with
    momentum has three copies. The report's index is "csr"; "smallest" takes the cheaper one.
    """
    numel = math.prod(shape)
    if not 0 <= nonzeros <= numel:
        raise InputError(f"{nonzeros} nonzeros in a tensor of {numel} elements")
    if copies < 0:
        raise InputError(f"a tensor cannot have {copies} copies")
    if format not in get_args(IndexFormat):
        raise InputError(
            f"unknown index format {format!r}",
            hint=f"use one of {', '.join(get_args(IndexFormat))}",
        )
    candidates = {
        "csr": csr_index_bytes(shape, nonzeros),
        "bitmask": bitmask_index_bytes(numel),
    }
    index_bytes = min(candidates.values()) if format == "smallest" else candidates[format]
    return SparseBytes(value_bytes=copies * dense_bytes(nonzeros, bits), index_bytes=index_bytes)
