"""Scratch memory that CPU kernels allocate and free: bounds by rule, for budgets.

No storage shows it, so `measure` does not count it, but the allocator does: oneDNN's convolutions
copy their arguments to layouts of their own (`convolutions`), and so do its products in 16 bits;
operands of another type than the result's are cast first (`casts`); resampling goes through
channels-last copies, some kernels make strided arguments contiguous. oneDNN chooses its
kernels by the CPU, so the bounds in 16 bits are of the CPU that asks. Bounds, fitted to the
allocator's own events (PyTorch's profiler with `profile_memory`, torch 2.13, one thread, CPUs with
AVX-512 with and without bf16 instructions) and tested against them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from ...torch_private.cpu import sixteen_bits
from ...trace.graph import Op, TensorSpec, Trace
from .casts import binary_loss_bytes, cast_bytes, loss_bytes, mean_bytes, total_bytes
from .convolutions import convolution, convolution_backward
from .matrices import eigenvectors, exponential, singular, three_factors
from .operands import contiguous_bytes, is_narrow, nbytes_of
from .selections import (
    bag,
    by_mask,
    distances,
    drawn,
    masked_gradient,
    masked_select,
    ranked_copy,
)

_SMALL = 16 * 1024
"""Scratch memory of the kernels of recurrent layers."""


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
    rule = _RULES.get(op.name.partition(".")[2], cast_bytes)
    return rule(op) + (_conjugates(op) if op.conjugated else 0)


def _conjugates(op: Op) -> int:
    """Kernels copy what they read as its conjugate, but where that is the result."""
    if op.is_view or not op.outputs:
        return 0
    copied = sum(nbytes_of(spec) for name, spec in op.inputs if name in op.conjugated)
    return 0 if op.name in ("aten.clone", "aten._conj_physical") else copied


def _coalesced(op: Op) -> int:
    """Of a sparse tensor: its indices as one number each, sorted, and where they came from."""
    return 4 * 8 * op.inputs[0][1].shape[0]


def _masked_rows(op: Op) -> int:
    """Of a dense tensor as a sparse one's: its rows before they are written."""
    return 2 * sum(nbytes_of(spec) for spec in op.outputs)


def _resampled(op: Op) -> int:
    given = sum(nbytes_of(spec) for _, spec in op.inputs)
    return given + sum(nbytes_of(spec) for spec in op.outputs)


def _attention_block(op: Op) -> tuple[int, int, int]:
    """Rows, columns and channels of the scores that a thread has at once."""
    given = dict(op.inputs)
    rows, columns = given["query"].shape[-2], given["key"].shape[-2]
    block = 256 if rows >= 768 else 64 if rows >= 192 else 32
    return min(block, rows), min(512, columns), given["query"].shape[-1]


def _attention(op: Op) -> int:
    rows, columns, channels = _attention_block(op)
    query = dict(op.inputs)["query"]
    narrow = 2 * rows * columns if query.dtype.itemsize == 2 else 0
    packed = 0
    if narrow and sixteen_bits(query.dtype) == "unknown":  # keys and values laid out for tiles
        packed = 2 * sum(nbytes_of(dict(op.inputs)[name]) for name in ("key", "value"))
    each = 4 * rows * (columns + channels + 2) + narrow + 512
    return torch.get_num_threads() * each + packed


def _attention_backward(op: Op) -> int:
    rows, columns, channels = _attention_block(op)
    query = dict(op.inputs)["query"]
    each = 8 * rows * columns + 512
    if query.dtype.itemsize == 2:
        sums = 4 * max(rows, columns) * channels
        if sixteen_bits(query.dtype) == "blocks":
            sums = max(sums, _attention_sums(rows, columns, channels))
        each += 4 * rows * columns + sums
    return max(nbytes_of(query) * 9 // 8, nbytes_of(query) + torch.get_num_threads() * each)


def _attention_sums(rows: int, columns: int, channels: int) -> int:
    """Of its products, block by block: FP32 sums of a result, and the operands packed."""
    rows, columns = -(-rows // 32) * 32, -(-columns // 32) * 32
    wide, some = min(max(channels, 16), 64), min(columns, 256)
    of_columns = 4 * wide * some + 2 * rows * some + 128 * rows
    of_rows = 4 * wide * rows + 128 * columns
    many = 128 * (columns + wide) + 2048
    return max(of_columns, of_rows, many) + 2048


def _lstm(op: Op) -> int:
    """oneDNN's: weights packed, their gradients too, all gates in FP32, copies of what it reads."""
    given = dict(op.inputs)
    source, weights = given["input"], [given[name] for name in _lstm_weights(given)]
    gates = sum(4 * -(-w.shape[0] // 128) * 128 * w.shape[1] for w in weights)
    steps = math.prod(source.shape[:2])
    width, hidden = -(-weights[0].shape[0] // 128) * 128, weights[0].shape[0] // 4
    packed = gates + _SMALL if is_narrow(source) else 0
    return 2 * gates + packed + 4 * steps * (width + source.shape[-1] + hidden)


def _lstm_weights(given: dict[str, TensorSpec]) -> list[str]:
    return [name for name, spec in given.items() if "weight" in name and len(spec.shape) == 2]


def _normalized(op: Op) -> int:
    statistics = sum(nbytes_of(spec) for spec in op.outputs[1:])
    return contiguous_bytes(op) + 2 * statistics


def _batch_norm(op: Op) -> int:
    """In 16 bits what is strided is copied twice."""
    return 2 * contiguous_bytes(op) if is_narrow(op.inputs[0][1]) else 0


def _batch_norm_backward(op: Op) -> int:
    """The gradient of the input twice."""
    wanted = dict(op.settings).get("output_mask", (True,))[0]
    return contiguous_bytes(op) + (nbytes_of(dict(op.inputs)["input"]) if wanted else 0)


def _product(op: Op) -> int:
    """oneDNN's products in 16 bits.

    Where the CPU has no bf16 of its own, FP32 sums of the whole result, one matrix a thread.
    Elsewhere sums of some rows and one operand packed, by each thread; both operands where the
    first one is transposed, as in the gradient of a weight.
    """
    given, strided = dict(op.inputs), dict(op.strided)
    name = next((n for n in ("mat1", "batch1", "self") if n in given), None)
    if name is None:  # a sparse matrix, which is not followed
        return 0
    first = given[name]
    kind = sixteen_bits(first.dtype) if first.dtype.itemsize == 2 else "native"
    if kind == "native":
        return 0
    threads, result = torch.get_num_threads(), op.outputs[0]
    matrices = min(threads, result.numel // max(math.prod(result.shape[-2:]), 1))
    sums = matrices * (4 * math.prod(result.shape[-2:]) + 512)
    if kind == "sums":
        return sums
    rows, inner = first.shape[-2:]
    columns, inner = -(-result.shape[-1] // 32) * 32, -(-inner // 32) * 32
    if kind == "unknown":  # no copy is larger than what it copies
        packed = 2 * inner * (columns + (-(-rows // 32) * 32 if name in strided else 0))
        return sums + threads * (packed + 64 * 1024)
    if name not in strided:
        return threads * (4 * min(rows, 256) * min(columns, 64) + 128 * min(inner, 1024) + 1024)
    rows, inner = -(-rows // 32) * 32, min(inner, 512)
    return threads * (2 * (rows + 64) * inner + min(256 * rows, 2**18) + 24 * 1024)


def _in_fp32(op: Op) -> int:
    """Elements picked or placed by index in 16 bits go through a copy of the result in FP32."""
    made = op.outputs[0] if op.outputs else dict(op.inputs)["self"]
    return 4 * made.numel if is_narrow(made) else 0


def _ranked(op: Op) -> int:
    """A copy of the values, and where they came from."""
    given = op.inputs[0][1]
    return nbytes_of(given) + 8 * given.numel


def _exponentials(op: Op) -> int:
    return nbytes_of(op.inputs[0][1]) + nbytes_of(op.outputs[0])


def _log_softmax(op: Op) -> int:
    """Of what is strided a copy, and a few rows of it by thread."""
    copied = contiguous_bytes(op)
    return copied + min(copied, torch.get_num_threads() * 32 * 1024)


def _safe_softmax(op: Op) -> int:
    """Which rows are masked as a whole."""
    return contiguous_bytes(op) + op.inputs[0][1].numel + nbytes_of(op.outputs[0])


def _rolled(op: Op) -> int:
    """One dimension after the other."""
    several = len(dict(op.settings).get("dims", ())) > 1
    return nbytes_of(op.inputs[0][1]) if several else 0


def _gelu_backward(op: Op) -> int:
    return 2 * nbytes_of(op.inputs[0][1]) if op.strided else 0


def _paths(op: Op) -> int:
    """Of CTC: what is known from the end, beside what is known from the start."""
    return nbytes_of(dict(op.inputs).get("log_alpha")) + contiguous_bytes(op)


def _patches(op: Op) -> int:
    return nbytes_of(op.inputs[0][1]) + contiguous_bytes(op)


def _added_by_index(op: Op) -> int:
    made = op.outputs[0] if op.outputs else dict(op.inputs)["self"]
    return 2 * (nbytes_of(made) if op.strided else nbytes_of(made) // max(made.shape[:1] or (1,)))


_RULES: dict[str, Callable[[Op], int]] = {
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    "native_layer_norm": _normalized,
    "native_layer_norm_backward": _normalized,
    "native_group_norm": _normalized,
    "native_group_norm_backward": _normalized,
    "native_batch_norm": _batch_norm,
    **dict.fromkeys(("native_batch_norm_backward", "batch_norm_backward"), _batch_norm_backward),
    **dict.fromkeys(("sum", "cumsum", "cumprod", "prod"), total_bytes),
    "mean": mean_bytes,
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
                     "soft_margin_loss"), loss_bytes),
    "binary_cross_entropy_with_logits": binary_loss_bytes,
    "logsumexp": _exponentials,
    "roll": _rolled,
    "_coalesce": _coalesced,
    "sparse_mask": _masked_rows,
    "gelu_backward": _gelu_backward,
    "_ctc_loss_backward": _paths,
    "kthvalue": _ranked,
    "linalg_matrix_exp": exponential,
    "_linalg_eigh": eigenvectors,
    "_linalg_svd": singular,
    "_trilinear": three_factors,
    "_euclidean_dist": distances,
    **dict.fromkeys(("index", "index_put", "index_put_"), by_mask),
    "masked_select": masked_select,
    "masked_scatter_backward": masked_gradient,
    "multinomial": drawn,
    **dict.fromkeys(("median", "nanmedian"), ranked_copy),
    "_safe_softmax": _safe_softmax,
    "_log_softmax": _log_softmax,
    **dict.fromkeys(("im2col", "col2im"), _patches),
    **dict.fromkeys(("index_add", "index_add_"), _added_by_index),
    **dict.fromkeys(("_softmax", "_softmax_backward_data", "mode",
                     "embedding_dense_backward",
                     "_log_softmax_backward_data", "avg_pool2d", "max_pool2d_with_indices",
                     "_adaptive_avg_pool2d", "reflection_pad1d", "reflection_pad2d",
                     "replication_pad1d", "replication_pad2d", "_fft_r2c", "_fft_c2r",
                     "_fft_c2c", "_cdist_forward", "_cdist_backward"), contiguous_bytes),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_backward"), bag),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    **dict.fromkeys(("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"), _lstm),
    **dict.fromkeys(("gather", "scatter", "scatter_", "scatter_add", "scatter_add_",
                     "scatter_reduce", "scatter_reduce_"), _in_fp32),
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "_grouped_mm"), _product),
    **{
        f"{kind}{suffix}": _resampled
        for kind in ("upsample_bilinear2d", "upsample_bicubic2d", "upsample_nearest2d",
                     "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_linear1d")
        for suffix in ("", "_backward")
    },
}  # fmt: skip
