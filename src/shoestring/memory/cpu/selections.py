"""Scratch memory of what picks elements: by masks, by rank, by chance; of bags and distances."""

from __future__ import annotations

import math

import torch

from ...trace.graph import Op
from .operands import contiguous_bytes, nbytes_of

_SUMS = 64
"""Of a number or two."""
_MASKS = (torch.bool, torch.uint8)
_LARGEST = 2
"""The mode of bags that keep the largest of each column."""


def by_mask(op: Op) -> int:
    """Indexing by masks: where they are true, a whole number for each of their dimensions."""
    given = dict(op.inputs)
    picked = given.get("values", op.outputs[0] if op.outputs else given["self"])
    total = 0
    for name, spec in op.inputs:
        if name.startswith("indices") and spec.dtype in _MASKS and spec.shape:
            rest = max(math.prod(given["self"].shape[len(spec.shape) :]), 1)
            few = picked.numel // rest if picked.numel >= rest and picked.shape else spec.numel
            total += 8 * len(spec.shape) * min(few, spec.numel)
    return total


def masked_select(op: Op) -> int:
    """How many come before each element, before the result is there; the mask too if it is
    broadcast or strided."""
    given = dict(op.inputs)
    alike = given["mask"].shape == given["self"].shape and not op.strided
    both = torch.broadcast_shapes(given["mask"].shape, given["self"].shape)
    return (8 if alike else 16) * math.prod(both) + _SUMS


def masked_gradient(op: Op) -> int:
    """Of the elements that were picked, before zeros fill up the rest."""
    return nbytes_of(op.inputs[0][1]) + _SUMS


def ranked_copy(op: Op) -> int:
    """A copy of the values, sorted in part."""
    return nbytes_of(op.inputs[0][1]) + contiguous_bytes(op)


def drawn(op: Op) -> int:
    """Noise for each weight."""
    return nbytes_of(op.inputs[0][1]) + 1024


def bag(op: Op) -> int:
    """Sums of rows: their indices, sorted and counted; of the largest, where each came from."""
    given = dict(op.inputs)
    sums = 3 * max(nbytes_of(spec) for name, spec in op.inputs if name == "indices")
    if dict(op.settings).get("mode") == _LARGEST and "grad" in given:
        sums += given["grad"].numel * 8 + nbytes_of(given["grad"])
    return sums


def distances(op: Op) -> int:
    """By one product: both sets with their squares and ones beside them."""
    return sum(nbytes_of(spec) * (spec.shape[-1] + 2) // max(spec.shape[-1], 1)
               for _, spec in op.inputs)  # fmt: skip
