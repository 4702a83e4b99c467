"""Scratch memory of matrix functions and decompositions, and of products of three tensors.

They copy what they are given, because LAPACK overwrites it, and hold workspaces beside it.
"""

from __future__ import annotations

import math

from ...trace.graph import Op
from .operands import nbytes_of

_POWERS = 12
"""Copies of a matrix that its exponential holds at most; small matrices need fewer."""


def exponential(op: Op) -> int:
    """Of matrices: powers of them, at most as many as large ones need."""
    return _POWERS * nbytes_of(op.inputs[0][1]) + 1024


def eigenvectors(op: Op) -> int:
    """Of symmetric matrices: LAPACK's `syevd`, one matrix after the other."""
    given = op.inputs[0][1]
    side = given.shape[-1]
    return given.dtype.itemsize * (2 * side**2 + 6 * side + 1) + 4 * (5 * side + 3) + 1024


def singular(op: Op) -> int:
    """LAPACK's `gesdd`: a copy of the matrices, and the workspace of one."""
    given = op.inputs[0][1]
    sides = given.shape[-2:]
    work = min(sides) * (3 * min(sides) + 64 + 5 * max(sides) // 4)
    return nbytes_of(given) + given.dtype.itemsize * work + 1024


def three_factors(op: Op) -> int:
    """Of a sum over products of three tensors: those of the first two, then their sums.

    PyTorch does so for one index of a dimension after the other.
    """
    given, settings = dict(op.inputs), dict(op.settings)
    expanded = [settings.get(f"expand{number}", ()) for number in (1, 2, 3)]
    sizes = []
    for name, added in zip(("i1", "i2", "i3"), expanded, strict=True):
        shape = list(given[name].shape)
        for dim in added:
            shape.insert(dim, 1)
        sizes.append(shape)
    unrolled, summed = settings.get("unroll_dim", 1), settings.get("sumdim", ())
    both = [max(a, b) for a, b in zip(*sizes[:2], strict=True)]
    both[unrolled] = 1
    for dim in summed:
        if dim in expanded[2]:
            both[dim] = 1
    last = [1 if dim in summed else max(n, sizes[2][dim]) for dim, n in enumerate(both)]
    last[unrolled] = 1
    itemsize = given["i1"].dtype.itemsize
    return itemsize * (math.prod(both) + math.prod(last)) + 1024
