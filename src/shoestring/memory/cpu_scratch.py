"""What CPU kernels allocate and free inside of themselves: bounds by rule, for budgets.

No storage shows it, so `measure` does not count it, but the allocator does: oneDNN's convolutions
copy their arguments to layouts of their own, and so do its products in 16 bits; resampling goes
through channels-last copies, some kernels make strided arguments contiguous. Bounds, fitted to the
allocator's own events (PyTorch's profiler with `profile_memory`, torch 2.13, one thread) and tested
against them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..trace.graph import Op, TensorSpec, Trace, channels_last_order

_BLOCK = 16
"""Channels to which oneDNN's layouts are padded."""


def scratch_above(trace: Trace, totals: np.ndarray) -> int:
    """Bytes that scratch adds to the peak of a step on the CPU whose storages take `totals`."""
    peak = int(totals.max(initial=0))
    highest = peak
    for op in trace.ops:
        nbytes = scratch_bytes(op)
        if nbytes:
            highest = max(highest, int(totals[op.index]) + nbytes)
    return highest - peak


def scratch_bytes(op: Op) -> int:
    """Of one operation, at most."""
    rule = _RULES.get(op.name.partition(".")[2])
    return 0 if rule is None else rule(op)


def _nbytes(spec: TensorSpec | None, *, padded: bool = False) -> int:
    if spec is None:
        return 0
    size = spec.numel * spec.dtype.itemsize
    if padded and len(spec.shape) > 1 and spec.shape[1]:
        size = size // spec.shape[1] * (-(-spec.shape[1] // _BLOCK) * _BLOCK)
    return size


def _weight_bytes(weight: TensorSpec) -> int:
    """Padded in both channels."""
    out, into = (-(-n // _BLOCK) * _BLOCK for n in weight.shape[:2])
    if weight.shape[1] == 1:  # one channel for each group
        into = 1
    kernel = weight.numel // max(weight.shape[0] * weight.shape[1], 1)
    return out * into * kernel * weight.dtype.itemsize


def _channels_last(op: Op, name: str) -> bool:
    spec = dict(op.inputs)[name]
    return dict(op.strided).get(name) == channels_last_order(len(spec.shape))


def _is_first(weight: TensorSpec) -> bool:
    """Of an image's few channels, which are read as they lie."""
    return weight.shape[1] <= 3


def _is_product(op: Op, weight: TensorSpec) -> bool:
    """A kernel of one pixel that moves by one: a matrix product, which copies nothing."""
    settings = dict(op.settings)
    ones = all(n == 1 for n in weight.shape[2:]) and set(settings.get("stride", (1,))) <= {1}
    return ones and settings.get("groups", 1) == 1 and weight.dtype.itemsize == 4


def _convolution(op: Op) -> int:
    given = dict(op.inputs)
    weight = given["weight"]
    if _is_product(op, weight):
        return 0
    if _channels_last(op, "input"):
        return 2 * _weight_bytes(weight)
    inside = 0 if _is_first(weight) else _nbytes(given["input"], padded=True)
    return max(inside, _nbytes(op.outputs[0], padded=True)) + _weight_bytes(weight)


def _convolution_backward(op: Op) -> int:
    given = dict(op.inputs)
    weight = given["weight"]
    if _is_product(op, weight):
        return 0
    wide = _weight_bytes(weight) * 4 // weight.dtype.itemsize
    weights = 2 * wide + (_weight_bytes(weight) if weight.dtype.itemsize < 4 else 0)
    last, grad = _channels_last(op, "input"), _nbytes(given["grad_output"], padded=True)
    turned = grad if last != _channels_last(op, "grad_output") else 0
    if not last:
        wanted = dict(op.settings).get("output_mask", (True,))[0]
        read = _nbytes(given["input"], padded=True) if wanted or not _is_first(weight) else 0
        return read + grad + turned + weights
    return turned + weights + wide + _by_group(op, weight)


def _by_group(op: Op, weight: TensorSpec) -> int:
    """Gradients of weights of a grouped convolution: FP32, each group padded in both channels."""
    groups = dict(op.settings).get("groups", 1)
    if groups == 1:
        return 0
    out, into = (-(-n // _BLOCK) * _BLOCK for n in (weight.shape[0] // groups, weight.shape[1]))
    return groups * out * into * (weight.numel // (weight.shape[0] * weight.shape[1])) * 4


def _resampled(op: Op) -> int:
    given = sum(_nbytes(spec) for _, spec in op.inputs)
    return given + sum(_nbytes(spec) for spec in op.outputs)


def _contiguous(op: Op) -> int:
    """Copies of what is strided."""
    strided = dict(op.strided)
    return sum(_nbytes(spec) for name, spec in op.inputs if name in strided)


def _attention_backward(op: Op) -> int:
    given = dict(op.inputs)
    return _nbytes(given.get("query")) * 9 // 8


def _normalized(op: Op) -> int:
    statistics = sum(_nbytes(spec) for spec in op.outputs[1:])
    return _contiguous(op) + 2 * statistics


def _product(op: Op) -> int:
    """oneDNN's products in 16 bits: FP32 sums of some rows, one operand packed; both where the
    first one is transposed, as in the gradient of a weight."""
    given, strided = dict(op.inputs), dict(op.strided)
    name = next(n for n in ("mat1", "batch1", "self") if n in given)
    first = given[name]
    if first.dtype.itemsize != 2:
        return 0
    rows, inner = first.shape[-2:]
    columns = -(-op.outputs[0].shape[-1] // 32) * 32
    inner = -(-inner // 32) * 32
    if name not in strided:
        return 4 * min(rows, 256) * min(columns, 64) + 128 * min(inner, 1024) + 1024
    rows, inner = -(-rows // 32) * 32, min(inner, 512)
    return 2 * (rows + 64) * inner + min(256 * rows, 2**18) + 24 * 1024


def _added_in_fp32(op: Op) -> int:
    """Sums in 16 bits go through a copy in FP32."""
    given = dict(op.inputs)["self"]
    return 4 * given.numel if given.dtype.itemsize == 2 and given.dtype.is_floating_point else 0


_RULES: dict[str, Callable[[Op], int]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "native_layer_norm": _normalized,
    "native_layer_norm_backward": _normalized,
    "native_group_norm": _normalized,
    "native_group_norm_backward": _normalized,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    **dict.fromkeys(("scatter_add", "scatter_add_"), _added_in_fp32),
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), _product),
    **{
        f"{kind}{suffix}": _resampled
        for kind in ("upsample_bilinear2d", "upsample_bicubic2d", "upsample_nearest2d",
                     "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_linear1d")
        for suffix in ("", "_backward")
    },
}  # fmt: skip
