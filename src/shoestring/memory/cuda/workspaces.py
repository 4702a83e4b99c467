"""Memory a CUDA operator takes for itself while it runs, by rule, and what cuBLAS keeps.

Each rule says what the memory is for. The rules follow what PyTorch's kernels allocate, checked on
the reference GPU of `devices/`; cuDNN's own choices are a calibration of that device
(`memory.cuda.cudnn`). An operator without a rule is taken to need nothing beyond its results.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ...devices import gpu
from ...trace.graph import Op, Phase, Trace
from .convolutions import convolution, convolution_backward, recurrent
from .cudnn import ConvolutionTable
from .operands import Operands, Rule, Temporary, nbytes_of
from .reductions import reduction_bytes


def cublas_bytes() -> int:
    """Of one handle, as CUBLAS_WORKSPACE_CONFIG says it, ":KiB:count" once or more."""
    said = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    pairs = re.findall(r":(\d+):(\d+)", said)
    return sum(1024 * int(size) * int(n) for size, n in pairs) if pairs else gpu().cublas_bytes


def cublas_lt_bytes() -> int:
    """Of one thread, as CUBLASLT_WORKSPACE_SIZE says it, in KiB."""
    said = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    return 1024 * int(said) if said.isdecimal() else gpu().cublas_lt_bytes


@dataclass(frozen=True, slots=True)
class Persistent:
    """Memory taken at the first use by one operation and kept for all steps to come."""

    operation: int
    nbytes: int
    reason: str


def temporaries(op: Op, convolutions: ConvolutionTable) -> tuple[Temporary, ...]:
    """The operator's own allocations, in order."""
    rule = _RULES.get(op.name.removeprefix("aten."))
    if rule is None:
        return ()
    found = []
    for temporary in rule(Operands(op), convolutions):
        sizes = tuple(n for n in temporary.nbytes if n > 0)
        if sizes:
            found.append(Temporary(sizes, temporary.reason, temporary.results))
    return tuple(found)


_PRODUCTS = frozenset({"aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.addbmm"})


def persistent(trace: Trace) -> tuple[Persistent, ...]:
    """Workspaces that libraries keep once they have them, in the order they are taken."""
    found: dict[str, Persistent] = {}
    for op in trace.ops:
        thread = "forward" if op.phase in (Phase.FORWARD, Phase.OPTIMIZER) else "backward"
        if op.name in _PRODUCTS:
            reason = f"cuBLAS, {thread} thread"
            found.setdefault(reason, Persistent(op.index, cublas_bytes(), reason))
        if op.name == "aten.addmm" and dict(op.inputs)["self"].shape[:-1] in ((), (1,)):
            reason = f"cuBLASLt, {thread} thread"
            found.setdefault(reason, Persistent(op.index, cublas_lt_bytes(), reason))
        if op.name == "aten._cudnn_rnn" and dict(op.settings).get("dropout", 0) > 0:
            reason = "cuDNN's random states for dropout"
            found.setdefault(reason, Persistent(op.index, gpu().dropout_state_bytes, reason))
    return tuple(workspace for workspace in found.values() if workspace.nbytes)


# -- reductions and losses -------------------------------------------------------------------------


def _reduction(accumulator_bytes: int | None = 4) -> Rule:
    def rule(view: Operands, _: ConvolutionTable) -> Iterator[Temporary]:
        source = view.inputs["self"]
        dims = view.settings.get("dim")
        width = source.dtype.itemsize if accumulator_bytes is None else accumulator_bytes
        chosen = (dims,) if isinstance(dims, int) else dims
        yield Temporary(view.reduced("self", chosen, width), "partial results of thread blocks")

    return rule


def _loss(copies: int) -> Rule:
    """Losses that fill whole tensors before they reduce them."""

    def rule(view: Operands, _: ConvolutionTable) -> Iterator[Temporary]:
        source = view.inputs["self"]
        reduced = view.settings.get("reduction", 1) != 0
        count = copies if reduced else copies - 1
        sizes = reduction_bytes(source.shape) if reduced else ()
        yield Temporary((*(nbytes_of(source),) * count, *sizes), "the loss of each element")

    return rule


# -- normalization ---------------------------------------------------------------------------------


def _layer_norm(view: Operands, _: ConvolutionTable) -> Iterator[Temporary]:
    yield Temporary(view.copied("input"), "contiguous input")


def _layer_norm_backward(view: Operands, _: ConvolutionTable) -> Iterator[Temporary]:
    source = view.inputs["input"]
    width = prod(view.settings.get("normalized_shape", source.shape[-1:]))
    rows = source.numel // max(width, 1)
    sizes = view.copied("grad_out", "grad_output", "input")
    # Tall and narrow: each block sums its rows, then the blocks' sums are summed.
    if rows > 2**16 and width // 32 < gpu().multiprocessors // 2:
        partial = min(rows // 16 * width, 2**21) * source.dtype.itemsize
        sizes += (partial, partial)
    yield Temporary(sizes, "sums of blocks of rows, and contiguous gradients")


def _group_norm(view: Operands, _: ConvolutionTable) -> Iterator[Temporary]:
    scale = view.settings["N"] * view.settings["C"] * 4
    yield Temporary((*view.copied("input"), scale, scale), "scale and shift of each channel")


def _group_norm_backward(view: Operands, _: ConvolutionTable) -> Iterator[Temporary]:
    samples, channels = view.settings["N"], view.settings["C"]
    each = samples * channels * 4
    group = samples * view.settings["group"] * 4
    copies = view.copied("grad_out", "input")
    yield Temporary((*copies, each, each, each, group, group), "sums of each channel and group")


# -- softmax and attention -------------------------------------------------------------------------


def _softmax_backward(view: Operands, _: ConvolutionTable) -> Iterator[Temporary]:
    whole = view.nbytes("grad_output")
    yield Temporary((whole, *view.copied("grad_output")), "gradient times softmax")


def _safe_softmax(view: Operands, _: ConvolutionTable) -> Iterator[Temporary]:
    source = view.inputs["self"]
    rows = source.numel // max(source.shape[view.settings.get("dim", -1)], 1)
    yield Temporary((source.numel, rows, 4), "which rows are masked entirely")


def _attention_backward(accumulated: bool) -> Rule:
    """Row sums, and the gradient of the queries in float32, padded to blocks of 64."""

    def rule(view: Operands, _: ConvolutionTable) -> Iterator[Temporary]:
        query, key = view.inputs["query"], view.inputs["key"]
        gradient = "grad_out_" if "grad_out_" in view.inputs else "grad_out"
        batch, heads, length, width = query.shape
        sums = batch * heads * length * 4
        block = 64 if accumulated else 1
        padded = -(-length // block) * block * (-(-width // block) * block)
        sizes = [sums, batch * heads * padded * 4, *view.copied(gradient, wanted=(0, 2, 1, 3))]
        if key.shape[1] != heads:
            sizes += [batch * heads * key.shape[2] * width * query.dtype.itemsize] * 2
        yield Temporary(tuple(sizes), "row sums and the gradient of queries in float32")

    return rule


# -- tables ----------------------------------------------------------------------------------------

_UNSORTED_INDICES = 3072
_ROWS_PER_PARTIAL_SUM = 10


def _lookup_backward(view: Operands, indices: str, gradient: str) -> Iterator[Temporary]:
    """Indices are sorted, then rows summed in parts of ten, then the parts by index."""
    grad, lookups = view.inputs[gradient], view.inputs[indices].numel
    copies = view.copied(gradient)
    if lookups <= _UNSORTED_INDICES:
        yield Temporary(copies, "contiguous gradient")
        return
    width = grad.shape[-1]
    distinct = min(lookups, int(view.settings["num_weights"]))
    parts = lookups // _ROWS_PER_PARTIAL_SUM + distinct
    yield Temporary((*copies, *(8 * lookups,) * 5), "sorting the indices")
    sizes = (*(8 * lookups,) * 3, 8 * distinct, 8 * distinct, 8 * parts, 4 * width * parts)
    yield Temporary((*copies, *sizes), "sums of rows with the same index")


def _embedding_backward(view: Operands, _: ConvolutionTable) -> Iterator[Temporary]:
    return _lookup_backward(view, "indices", "grad_output")


def _embedding_bag_backward(view: Operands, _: ConvolutionTable) -> Iterator[Temporary]:
    return _lookup_backward(view, "indices", "grad")


def _contiguous(*names: str) -> Rule:
    """Kernels that take contiguous arguments only."""

    def rule(view: Operands, _: ConvolutionTable) -> Iterator[Temporary]:
        yield Temporary(view.copied(*names), "contiguous arguments")

    return rule


_RULES: dict[str, Rule] = {
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    "_cudnn_rnn": recurrent,
    "_cudnn_rnn_backward": recurrent,
    "sum": _reduction(),
    "mean": _reduction(),
    "linalg_vector_norm": _reduction(),
    "norm": _reduction(),
    "prod": _reduction(),
    "amax": _reduction(None),
    "amin": _reduction(None),
    "max": _reduction(None),
    "min": _reduction(None),
    "any": _reduction(1),
    "all": _reduction(1),
    "var": _reduction(16),
    "std": _reduction(16),
    "var_mean": _reduction(16),
    "mse_loss": _loss(1),
    "smooth_l1_loss": _loss(1),
    "huber_loss": _loss(1),
    "binary_cross_entropy": _loss(0),
    "binary_cross_entropy_with_logits": _loss(2),
    "logsumexp": _loss(1),
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "_fused_rms_norm_backward": _layer_norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _contiguous("grad_output"),
    "_safe_softmax": _safe_softmax,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward(accumulated=True),
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward(accumulated=False),
    "_scaled_dot_product_flash_attention_backward": _attention_backward(accumulated=True),
    "embedding_dense_backward": _embedding_backward,
    "_embedding_bag_backward": _embedding_bag_backward,
    "max_pool2d_with_indices": _contiguous("self"),
    "max_pool2d_with_indices_backward": _contiguous("grad_output", "self"),
    "avg_pool2d": _contiguous("self"),
    "avg_pool2d_backward": _contiguous("grad_output", "self"),
    "_adaptive_avg_pool2d_backward": _contiguous("grad_output"),
    "adaptive_max_pool2d_backward": _contiguous("grad_output"),
    "upsample_nearest2d_backward": _contiguous("grad_output"),
    "upsample_bilinear2d_backward": _contiguous("grad_output"),
    "cudnn_batch_norm": _contiguous("input"),
    "cudnn_batch_norm_backward": _contiguous("grad_output", "input"),
}
