"""Scratch memory of PyTorch's CUDA reductions (sum, mean, norm, …) over a contiguous tensor.

A reduction with few results and many inputs is split over thread blocks, whose partial results
meet in global memory. How many blocks is a fixed rule of the shape and of the device, worked out
here as PyTorch's reduction kernel does; a column sum of a tall matrix needs over 100 MB by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from ...devices import gpu

_MAX_THREADS = 512
_WARP = 32
_VECTOR = 4
_VALUES_PER_THREAD = (16, 256)


def _power_of_two_below(number: int) -> int:
    return 1 << max(number, 1).bit_length() - 1


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class _JoinedShape:
    """A reduction after neighboring dimensions of one kind were joined."""

    inputs: int
    """Elements summed for one result."""
    outputs: int
    fast_reduced: bool
    """The dimension that is contiguous in memory is reduced."""
    fast_extent: int
    dimensions: int


def _joined(shape: Sequence[int], dims: Iterable[int]) -> _JoinedShape:
    reduced = {d % len(shape) for d in dims} if shape else set()
    groups: list[tuple[bool, int]] = []
    for dim, extent in enumerate(shape):
        if extent == 1:
            continue
        kind = dim in reduced
        if groups and groups[-1][0] == kind:
            groups[-1] = (kind, groups[-1][1] * extent)
        else:
            groups.append((kind, extent))
    inputs = prod(extent for kind, extent in groups if kind)
    outputs = prod(extent for kind, extent in groups if not kind)
    fast_reduced, fast_extent = groups[-1] if groups else (True, 1)
    return _JoinedShape(inputs, outputs, fast_reduced, fast_extent, len(groups))


def reduction_bytes(
    shape: Sequence[int], dims: Iterable[int] | None = None, accumulator_bytes: int = 4
) -> tuple[int, ...]:
    """Scratch of a reduction over `dims` (all, if None): partial results and semaphores."""
    joined = _joined(shape, range(len(shape)) if dims is None else dims)
    if joined.inputs <= 1 or joined.outputs == 0:
        return ()
    vector, along, across = 1, joined.outputs, joined.inputs
    if joined.fast_reduced:
        along, across = joined.inputs, joined.outputs
        if along > 128 and joined.dimensions == 1:
            along //= _VECTOR
    else:
        vector = _VECTOR
        while joined.fast_extent % vector:
            vector //= 2
        along //= vector
    limit = _MAX_THREADS // vector
    width_limit = _power_of_two_below(along) if along < limit else limit
    height_limit = _power_of_two_below(across) if across < limit else limit
    width = min(width_limit, _WARP)
    height = min(height_limit, limit // width)
    width = min(width_limit, limit // height)
    split_inputs, split_outputs = (width, 1) if joined.fast_reduced else (1, width)
    few, many = _VALUES_PER_THREAD
    across_warps = _ceil(joined.inputs, split_inputs) >= min(height * few, many)
    if across_warps:
        split_inputs *= height
    else:
        split_outputs *= height
    values = _ceil(joined.inputs, split_inputs)
    grid = _ceil(joined.outputs // vector, split_outputs)
    card = gpu()
    target = card.multiprocessors * (card.threads_per_multiprocessor // (width * height))
    if not across_warps or values < many or grid > target:
        return ()
    blocks = max(min(_ceil(target, grid), _ceil(values, few)), _ceil(values, many))
    if blocks <= 1:
        return ()
    partial = accumulator_bytes * joined.outputs * blocks
    if not joined.fast_reduced:
        partial *= width * vector
    return partial, 4 * grid
