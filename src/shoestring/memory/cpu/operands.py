"""Bytes of an operation's arguments, as CPU kernels copy them."""

from __future__ import annotations

from ...trace.graph import Op, TensorSpec


def nbytes_of(spec: TensorSpec | None) -> int:
    """As it lies in memory."""
    return 0 if spec is None else spec.numel * spec.dtype.itemsize


def is_narrow(spec: TensorSpec) -> bool:
    """A float of 16 bits."""
    return spec.dtype.itemsize == 2 and spec.dtype.is_floating_point


def contiguous_bytes(op: Op) -> int:
    """Copies of what is strided."""
    strided = dict(op.strided)
    return sum(nbytes_of(spec) for name, spec in op.inputs if name in strided)
