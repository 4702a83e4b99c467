"""Memory a CUDA operator takes for itself while it runs, by rule, and what cuBLAS keeps.

Each rule says what the memory is for. The rules follow what PyTorch's kernels allocate, checked on
one NVIDIA H200 with torch 2.11 and cuDNN 9.19; cuDNN's own choices are a calibration of that device
(`memory.cudnn`). An operator without a rule is taken to need nothing beyond its results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch

from ..trace.graph import Op, Phase, TensorSpec, Trace
from .cudnn import (
    DROPOUT_STATE_BYTES,
    ConvolutionShape,
    ConvolutionTable,
    RecurrentShape,
    recurrent_bytes,
)
from .reductions import reduction_bytes

CUBLAS_BYTES = 32 * 2**20
"""Workspace of a cuBLAS handle on Hopper. Each thread has its own handle: forward and backward."""
CUBLAS_LT_BYTES = 2**20
"""Workspace of cuBLASLt, which adds a bias in the same kernel (`addmm`)."""

_ALL = 1 << 30


@dataclass(frozen=True, slots=True)
class Temporary:
    """Allocations inside one operator, made when so many of its results exist and freed by its end.

    Temporaries of one operator follow each other; those of one entry are there together.
    """

    nbytes: tuple[int, ...]
    reason: str
    results: int = _ALL
    """How many of the operator's results have been allocated by then."""


@dataclass(frozen=True, slots=True)
class Persistent:
    """Memory taken at the first use by one operation and kept for all steps to come."""

    operation: int
    nbytes: int
    reason: str


class _View:
    """An operation's arguments by name."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.inputs = dict(op.inputs)
        self.settings = dict(op.settings)
        self.orders = dict(op.strided)

    def nbytes(self, name: str) -> int:
        spec = self.inputs.get(name)
        return 0 if spec is None else _nbytes(spec)

    def order(self, name: str) -> tuple[int, ...]:
        """The argument's dimensions as they lie in memory; empty where it has gaps."""
        return self.orders.get(name, tuple(range(len(self.inputs[name].shape))))

    def copied(self, *names: str, wanted: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Copies of those arguments that do not lie in memory as a kernel wants them."""
        found = []
        for name in names:
            if name in self.inputs:
                dims = len(self.inputs[name].shape)
                if self.order(name) != (wanted or tuple(range(dims))):
                    found.append(self.nbytes(name))
        return tuple(found)

    def reduced(self, name: str, dims: Iterable[int] | None, width: int = 4) -> tuple[int, ...]:
        """Scratch of a reduction of an argument as it lies in memory."""
        shape = self.inputs[name].shape
        every = range(len(shape))
        chosen = {d % len(shape) for d in dims} if dims is not None and shape else set(every)
        order = self.order(name) or tuple(range(len(shape)))
        moved = [place for place, dim in enumerate(order) if dim in chosen]
        return reduction_bytes([shape[dim] for dim in order], moved, width)


def _nbytes(spec: TensorSpec) -> int:
    return spec.numel * spec.dtype.itemsize


Rule = Callable[[_View, ConvolutionTable], Iterator[Temporary]]


def temporaries(op: Op, convolutions: ConvolutionTable) -> tuple[Temporary, ...]:
    """What the operator allocates for itself, in the order it does."""
    rule = _RULES.get(op.name.removeprefix("aten."))
    if rule is None:
        return ()
    found = []
    for temporary in rule(_View(op), convolutions):
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
            found.setdefault(reason, Persistent(op.index, CUBLAS_BYTES, reason))
        if op.name == "aten.addmm" and dict(op.inputs)["self"].shape[:-1] in ((), (1,)):
            reason = f"cuBLASLt, {thread} thread"
            found.setdefault(reason, Persistent(op.index, CUBLAS_LT_BYTES, reason))
        if op.name == "aten._cudnn_rnn" and dict(op.settings).get("dropout", 0) > 0:
            reason = "cuDNN's random states for dropout"
            found.setdefault(reason, Persistent(op.index, DROPOUT_STATE_BYTES, reason))
    return tuple(found.values())


# -- convolutions and recurrent layers -------------------------------------------------------------


def _shape_of_convolution(view: _View, weight: TensorSpec, input: TensorSpec) -> ConvolutionShape:
    settings, spatial = view.settings, len(input.shape) - 2

    def extents(name: str, default: int) -> tuple[int, ...]:
        given = tuple(settings.get(name, ())) or (default,)
        return given * spatial if len(given) == 1 else given

    return ConvolutionShape(
        input=input.shape,
        weight=weight.shape,
        stride=extents("stride", 1),
        padding=extents("padding", 0),
        dilation=extents("dilation", 1),
        transposed=bool(settings.get("transposed", False)),
        output_padding=extents("output_padding", 0),
        groups=int(settings.get("groups", 1)),
    )


def _channels_last(view: _View) -> bool:
    dims = len(view.inputs["input"].shape)
    return dims > 2 and view.order("input") == (0, *range(2, dims), 1)


def _convolution(view: _View, table: ConvolutionTable) -> Iterator[Temporary]:
    weight, input = view.inputs["weight"], view.inputs["input"]
    shape = _shape_of_convolution(view, weight, input)
    if _channels_last(view):
        sizes: tuple[int, ...] = () if shape.groups > 1 else (_nbytes(weight),)
        yield Temporary(sizes, "the weight with its channels last")
        return
    nbytes = table.nbytes(shape, "forward", input.dtype)
    yield Temporary((*view.copied("input", "weight"), nbytes), "cuDNN workspace")


def _convolution_backward(view: _View, table: ConvolutionTable) -> Iterator[Temporary]:
    weight, input = view.inputs["weight"], view.inputs["input"]
    shape = _shape_of_convolution(view, weight, input)
    mask = view.settings.get("output_mask", (True, True, True))
    channels_last = _channels_last(view)
    wanted = (0, *range(2, len(input.shape)), 1) if channels_last else None
    copies = view.copied("grad_output", "input", "weight", wanted=wanted)
    for results, kind in enumerate(_asked(view), start=1):
        nbytes = 0 if channels_last else table.nbytes(shape, kind, input.dtype)
        yield Temporary((*copies, nbytes), f"cuDNN workspace, gradient of {kind}", results)
    if mask[2]:
        dims = [d for d in range(len(view.inputs["grad_output"].shape)) if d != 1]
        yield Temporary(view.reduced("grad_output", dims), "sum over all but the channels")


def convolutions(trace: Trace) -> Iterator[tuple[ConvolutionShape, str, torch.dtype]]:
    """Those whose workspace is cuDNN's to choose: shape, kind and dtype, each once."""
    found = dict.fromkeys(
        (_shape_of_convolution(view, view.inputs["weight"], view.inputs["input"]), kind, dtype)
        for op in trace.ops
        if op.name in ("aten.convolution", "aten.convolution_backward")
        for view in (_View(op),)
        if not _channels_last(view)
        for dtype in (view.inputs["input"].dtype,)
        for kind in _asked(view)
    )
    yield from found


def _asked(view: _View) -> tuple[str, ...]:
    if view.op.name == "aten.convolution":
        return ("forward",)
    mask = view.settings.get("output_mask", (True, True, True))
    return tuple(kind for kind, asked in zip(("input", "weight"), mask, strict=False) if asked)


def _recurrent(view: _View, _: ConvolutionTable) -> Iterator[Temporary]:
    settings, input = view.settings, view.inputs["input"]
    batch_first = bool(settings["batch_first"])
    sizes = settings.get("batch_sizes", ())
    if sizes:
        steps, batch = max(input.shape[0] // sizes[0], 1), sizes[0]
    else:
        steps, batch = input.shape[batch_first], input.shape[1 - batch_first]
    shape = RecurrentShape(
        mode=int(settings["mode"]),
        steps=steps,
        batch=batch,
        input=input.shape[-1],
        hidden=int(settings["hidden_size"]),
        layers=int(settings["num_layers"]),
        directions=2 if settings["bidirectional"] else 1,
        dropout=settings["dropout"] > 0,
        itemsize=input.dtype.itemsize,
    )
    backward = view.op.name.endswith("backward")
    copies: tuple[int, ...] = ()
    if batch_first:
        copies = (_nbytes(input),)
    if backward and "grad_output" not in view.inputs:  # only the last state was used
        copies += (view.nbytes("output"),)
    elif backward and not view.order("grad_output"):
        copies += (view.nbytes("grad_output"),)
    nbytes = recurrent_bytes(shape, backward)
    yield Temporary((*copies, nbytes), "cuDNN workspace, and the input by time steps")


# -- reductions and losses -------------------------------------------------------------------------


def _reduction(accumulator_bytes: int | None = 4) -> Rule:
    def rule(view: _View, _: ConvolutionTable) -> Iterator[Temporary]:
        source = view.inputs["self"]
        dims = view.settings.get("dim")
        width = source.dtype.itemsize if accumulator_bytes is None else accumulator_bytes
        chosen = (dims,) if isinstance(dims, int) else dims
        yield Temporary(view.reduced("self", chosen, width), "partial results of thread blocks")

    return rule


def _loss(copies: int) -> Rule:
    """Losses that fill whole tensors before they reduce them."""

    def rule(view: _View, _: ConvolutionTable) -> Iterator[Temporary]:
        source = view.inputs["self"]
        reduced = view.settings.get("reduction", 1) != 0
        count = copies if reduced else copies - 1
        sizes = reduction_bytes(source.shape) if reduced else ()
        yield Temporary((*(_nbytes(source),) * count, *sizes), "the loss of each element")

    return rule


# -- normalisation ---------------------------------------------------------------------------------


def _layer_norm(view: _View, _: ConvolutionTable) -> Iterator[Temporary]:
    yield Temporary(view.copied("input"), "contiguous input")


def _layer_norm_backward(view: _View, _: ConvolutionTable) -> Iterator[Temporary]:
    source = view.inputs["input"]
    width = prod(view.settings.get("normalized_shape", source.shape[-1:]))
    rows = source.numel // max(width, 1)
    sizes = view.copied("grad_out", "grad_output", "input")
    # Tall and narrow: each block sums its rows, then the blocks' sums are summed.
    if rows > 2**16 and width // 32 < 66:
        partial = min(rows // 16 * width, 2**21) * source.dtype.itemsize
        sizes += (partial, partial)
    yield Temporary(sizes, "sums of blocks of rows, and contiguous gradients")


def _group_norm(view: _View, _: ConvolutionTable) -> Iterator[Temporary]:
    scale = view.settings["N"] * view.settings["C"] * 4
    yield Temporary((*view.copied("input"), scale, scale), "scale and shift of each channel")


def _group_norm_backward(view: _View, _: ConvolutionTable) -> Iterator[Temporary]:
    samples, channels = view.settings["N"], view.settings["C"]
    each = samples * channels * 4
    group = samples * view.settings["group"] * 4
    copies = view.copied("grad_out", "input")
    yield Temporary((*copies, each, each, each, group, group), "sums of each channel and group")


# -- softmax and attention -------------------------------------------------------------------------


def _softmax_backward(view: _View, _: ConvolutionTable) -> Iterator[Temporary]:
    whole = view.nbytes("grad_output")
    yield Temporary((whole, *view.copied("grad_output")), "gradient times softmax")


def _safe_softmax(view: _View, _: ConvolutionTable) -> Iterator[Temporary]:
    source = view.inputs["self"]
    rows = source.numel // max(source.shape[view.settings.get("dim", -1)], 1)
    yield Temporary((source.numel, rows, 4), "which rows are masked entirely")


def _attention_backward(accumulated: bool) -> Rule:
    """Row sums, and the gradient of the queries in float32, padded to blocks of 64."""

    def rule(view: _View, _: ConvolutionTable) -> Iterator[Temporary]:
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


def _lookup_backward(view: _View, indices: str, gradient: str) -> Iterator[Temporary]:
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


def _embedding_backward(view: _View, _: ConvolutionTable) -> Iterator[Temporary]:
    return _lookup_backward(view, "indices", "grad_output")


def _embedding_bag_backward(view: _View, _: ConvolutionTable) -> Iterator[Temporary]:
    return _lookup_backward(view, "indices", "grad")


def _contiguous(*names: str) -> Rule:
    """Kernels that take contiguous arguments only."""

    def rule(view: _View, _: ConvolutionTable) -> Iterator[Temporary]:
        yield Temporary(view.copied(*names), "contiguous arguments")

    return rule


_RULES: dict[str, Rule] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": _recurrent,
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
