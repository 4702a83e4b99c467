"""Operands that CPU kernels cast before they compute: a whole copy each.

FP32 + bf16        the bf16 operand in FP32
mask * x           the mask as x has it
x.mean(1), bf16    x in FP32
mask.sum()         the mask in 64 bits
"""

from __future__ import annotations

from functools import cache, reduce

import torch

from ...trace.graph import Op
from .operands import is_narrow, nbytes_of

_CONDITIONS = frozenset({"condition", "mask"})
"""Arguments that are read as they are."""


def cast_bytes(op: Op) -> int:
    """Of an elementwise operation, whose operands are cast to one type."""
    if not op.inputs or not op.outputs or not _is_elementwise(op.name):
        return 0
    made = op.outputs[0].dtype
    given = [spec for name, spec in op.inputs if spec.shape and name not in _CONDITIONS]
    if all(spec.dtype is made for spec in given):
        return 0
    common = reduce(torch.promote_types, (spec.dtype for spec in given), made)
    if made is torch.bool:  # a comparison, which computes in the type of what it compares
        common = reduce(torch.promote_types, (spec.dtype for spec in given), torch.bool)
    casts = sum(spec.numel for spec in given if spec.dtype is not common)
    if common.is_complex and made.is_floating_point:  # its absolute value, made as it is
        casts += op.outputs[0].numel
    return casts * common.itemsize


@cache
def _is_elementwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name.partition(".")[2], None)
    overloads = packet.overloads() if packet is not None and name.startswith("aten.") else ()
    return any(torch.Tag.pointwise in getattr(packet, each).tags for each in overloads)


def total_bytes(op: Op) -> int:
    """Of a sum: the input in the type of the result; over several dimensions of 16 bits in FP32."""
    given, made = op.inputs[0][1], op.outputs[0]
    if given.dtype is not made.dtype:
        return given.numel * made.dtype.itemsize
    dims = dict(op.settings).get("dim", ())
    several = not isinstance(dims, int) and len(dims) > 1
    return mean_bytes(op) if several or op.strided else 0


def mean_bytes(op: Op) -> int:
    """Of a mean: in 16 bits it is summed in FP32, all of it cast before."""
    given, made = op.inputs[0][1], op.outputs[0]
    return 4 * (given.numel + made.numel) if is_narrow(given) else 0


def loss_bytes(op: Op) -> int:
    """Of a loss that is reduced: its terms, and their mean."""
    given, made = op.inputs[0][1], op.outputs[0]
    if made.shape and made.numel == given.numel:
        return 0
    return nbytes_of(given) + (4 * given.numel if is_narrow(given) else 0)


def binary_loss_bytes(op: Op) -> int:
    """Of the binary cross-entropy of logits, which is computed in steps."""
    given = op.inputs[0][1]
    return (4 if is_narrow(given) else 3) * nbytes_of(given)
