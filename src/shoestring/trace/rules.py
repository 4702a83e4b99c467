"""Data: what each operation must keep for its gradient, and no more (the report, Appendix B).

A rule says, for each argument a gradient is taken of, which tensors that gradient reads: other
arguments by name, `output` (or `output.1`), or `bits`, a compressed record of `bits` bits per
output element that the operation itself writes (ReLU: one), or `whole`, inputs and output, where
there is but one output. An argument that is a parameter costs
nothing to keep. An operation without a rule keeps all its inputs and outputs and is named in a
warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Flow(StrEnum):
    """How the gradient of an input comes out of the gradient of the output."""

    SAME = "same"
    """It is the same tensor (an addition passes it on)."""
    IN_PLACE = "in place"
    """It can be written over it (element by element)."""
    FRESH = "fresh"
    """It needs memory of its own."""


@dataclass(frozen=True)
class Rule:
    """Tensors that one operation's gradient reads."""

    needs: Mapping[str, tuple[str, ...]]
    """Argument → what its gradient reads; `*` stands for every argument not named."""
    reason: str
    bits: int = 0
    flow: Flow = Flow.FRESH
    cheap: bool = False
    """Normalization or activation function: dropped and recomputed by `no-bn`."""
    normalization: bool = False
    """Batch statistics are worth caching when the output is recomputed."""
    elementwise: bool = False
    """The output can be written over an input that nobody needs any more."""


CACHED_FLOATS_PER_CHANNEL = 4
"""BatchNorm recomputed: mean and inverse deviation for its gradient, scale and shift so that the
output is one multiply-add per element (Appendix B: "caching small quantities"); always FP32."""

RECOMPUTED_NORM_FLOPS_PER_ELEMENT = 2
"""That one multiply-add."""


def _nothing(reason: str, flow: Flow = Flow.FRESH, elementwise: bool = False) -> Rule:
    return Rule({"*": ()}, reason, flow=flow, elementwise=elementwise)


def _activation(kept: str, reason: str, bits: int = 0) -> Rule:
    return Rule({"*": (kept,)}, reason, bits=bits, flow=Flow.IN_PLACE, cheap=True, elementwise=True)


def _keep(kept: str, reason: str, flow: Flow = Flow.FRESH) -> Rule:
    return Rule({"*": (kept,)}, reason, flow=flow)


def _pair(first: str, second: str, reason: str, **more: tuple[str, ...]) -> Rule:
    return Rule({first: (second,), second: (first,), "*": (), **more}, reason)


_SIGN = "the gradient passes or not, by the sign of the input: one bit (Gist)"
_SHAPE = "moves elements, reads none of them"
_LINEAR = "linear with constant coefficients: the gradient reads no activation"
_PRODUCT = "a product: each factor's gradient reads the other factor"
_NORM_NEEDS = {"input": ("input", "weight"), "weight": ("input",), "*": ()}

RULES: dict[str, Rule] = {
    # activation functions
    "relu": _activation("bits", _SIGN, bits=1),
    "leaky_relu": _activation("bits", _SIGN, bits=1),
    "hardtanh": _activation("bits", "inside the interval or not: one bit", bits=1),
    "clamp": _activation("bits", "inside the interval or not: one bit", bits=1),
    "clamp_min": _activation("bits", _SIGN, bits=1),
    "abs": _activation("bits", _SIGN, bits=1),
    "threshold": _activation("bits", _SIGN, bits=1),
    "sigmoid": _activation("output", "y(1-y)"),
    "tanh": _activation("output", "1-y²"),
    "elu": _activation("output", "y+1 below zero"),
    "gelu": _activation("self", "not invertible: needs the input"),
    "silu": _activation("self", "not invertible: needs the input"),
    "hardswish": _activation("self", "not invertible: needs the input"),
    "mish": _activation("self", "not invertible: needs the input"),
    "softplus": _activation("self", "sigmoid of the input"),
    "log_sigmoid_forward": _activation("self", "sigmoid of the input"),
    # elementwise functions
    "exp": Rule({"*": ("output",)}, "y", flow=Flow.IN_PLACE, elementwise=True),
    "sqrt": Rule({"*": ("output",)}, "1/(2y)", flow=Flow.IN_PLACE, elementwise=True),
    "rsqrt": Rule({"*": ("output",)}, "-y³/2", flow=Flow.IN_PLACE, elementwise=True),
    "reciprocal": Rule({"*": ("output",)}, "-y²", flow=Flow.IN_PLACE, elementwise=True),
    "log": _keep("self", "1/x", Flow.IN_PLACE),
    "pow": Rule(
        {"self": ("self", "exponent"), "exponent": ("self", "exponent")},
        "n·x^(n-1), and x^n·ln x where the exponent is a tensor",
        flow=Flow.IN_PLACE,
    ),
    "sin": _keep("self", "cos x", Flow.IN_PLACE),
    "cos": _keep("self", "-sin x", Flow.IN_PLACE),
    # additions, scalings, shapes
    "add": _nothing("an addition passes the gradient on", Flow.SAME, elementwise=True),
    "sub": _nothing("passes the gradient on, negated", Flow.IN_PLACE, elementwise=True),
    "rsub": _nothing("passes the gradient on, negated", Flow.IN_PLACE, elementwise=True),
    "neg": _nothing("passes the gradient on, negated", Flow.IN_PLACE, elementwise=True),
    "clone": _nothing(_SHAPE, Flow.SAME),
    "copy": Rule({"src": (), "*": ()}, _SHAPE, flow=Flow.SAME),
    "fill": _nothing("overwrites: no gradient to what was there", Flow.SAME, elementwise=True),
    "zero": _nothing("overwrites: no gradient to what was there", Flow.SAME, elementwise=True),
    "_to_copy": _nothing("a change of type", Flow.IN_PLACE),
    "cat": _nothing(_SHAPE),
    "stack": _nothing(_SHAPE),
    "unsafe_split": _nothing(_SHAPE),
    "split_with_sizes_copy": _nothing(_SHAPE),
    "constant_pad_nd": _nothing(_SHAPE),
    "pixel_shuffle": _nothing(_SHAPE, Flow.SAME),
    "pixel_unshuffle": _nothing(_SHAPE, Flow.SAME),
    "repeat": _nothing(_SHAPE),
    "roll": _nothing(_SHAPE, Flow.SAME),
    "flip": _nothing(_SHAPE, Flow.SAME),
    "tril": _nothing(_SHAPE, Flow.IN_PLACE),
    "triu": _nothing(_SHAPE, Flow.IN_PLACE),
    "sum": _nothing(_LINEAR),
    "mean": _nothing(_LINEAR),
    "cumsum": _nothing(_LINEAR),
    "avg_pool2d": _nothing(_LINEAR),
    "avg_pool3d": _nothing(_LINEAR),
    "_adaptive_avg_pool2d": _nothing(_LINEAR),
    "_adaptive_avg_pool3d": _nothing(_LINEAR),
    "upsample_nearest2d": _nothing(_LINEAR),
    "upsample_bilinear2d": _nothing(_LINEAR),
    "unfold": _nothing(_SHAPE),
    "im2col": _nothing(_SHAPE),
    "col2im": _nothing(_SHAPE),
    # masks and indices
    "native_dropout": Rule(
        {"*": ("bits",)}, "kept or dropped: one bit", bits=1, flow=Flow.IN_PLACE, elementwise=True
    ),
    "masked_fill": Rule({"self": ("mask",), "*": ()}, "the mask alone", flow=Flow.IN_PLACE),
    "where": Rule({"*": ("condition",)}, "which side: the condition alone"),
    "embedding": Rule({"weight": ("indices",)}, "rows by index"),
    "_embedding_bag": Rule({"weight": ("indices", "offsets")}, "rows by index"),
    "index_select": Rule({"self": ("index",)}, "rows by index"),
    "index": Rule({"self": ("indices",)}, "positions by index"),
    "gather": Rule({"self": ("index",)}, "positions by index"),
    "scatter_add": Rule({"src": ("index",), "*": ()}, "positions by index"),
    "topk": Rule({"*": ("output.1",)}, "positions of the largest"),
    "sort": Rule({"*": ("output.1",)}, "the permutation"),
    "max": Rule(
        {"*": ("output.1", "whole")}, "position of the largest, or the input and its maximum"
    ),
    "min": Rule(
        {"*": ("output.1", "whole")}, "position of the smallest, or the input and its minimum"
    ),
    "amax": Rule({"*": ("self", "output")}, "compares the input with its maximum"),
    "max_pool2d_with_indices": Rule(
        {"*": ("bits",)}, "which element of the window: a byte at most", bits=8
    ),
    "max_pool3d_with_indices": Rule(
        {"*": ("bits",)}, "which element of the window: a byte at most", bits=8
    ),
    # products
    "mul": Rule(
        {"self": ("other",), "other": ("self",)}, _PRODUCT, flow=Flow.IN_PLACE, elementwise=True
    ),
    "div": Rule(
        {"self": ("other",), "other": ("self", "other")},
        "quotient rule",
        flow=Flow.IN_PLACE,
        elementwise=True,
    ),
    "addcmul": Rule(
        {"tensor1": ("tensor2",), "tensor2": ("tensor1",), "*": ()}, _PRODUCT, elementwise=True
    ),
    "mm": _pair("self", "mat2", _PRODUCT),
    "bmm": _pair("self", "mat2", _PRODUCT),
    "addmm": _pair("mat1", "mat2", _PRODUCT),
    "baddbmm": _pair("batch1", "batch2", _PRODUCT),
    "dot": _pair("self", "tensor", _PRODUCT),
    "vdot": _pair("self", "other", _PRODUCT),
    "mv": _pair("self", "vec", _PRODUCT),
    "linear": _pair("input", "weight", _PRODUCT),
    "convolution": _pair("input", "weight", _PRODUCT),
    # normalization
    "native_batch_norm": Rule(
        _NORM_NEEDS,
        "needs its input; the statistics come from it again",
        flow=Flow.IN_PLACE,
        cheap=True,
        normalization=True,
    ),
    "native_layer_norm": Rule(
        _NORM_NEEDS,
        "needs its input; the statistics come from it again",
        flow=Flow.IN_PLACE,
        cheap=True,
    ),
    "native_group_norm": Rule(
        _NORM_NEEDS,
        "needs its input; the statistics come from it again",
        flow=Flow.IN_PLACE,
        cheap=True,
    ),
    "norm": Rule({"*": ("self", "output")}, "x/‖x‖"),
    "linalg_vector_norm": Rule({"*": ("self", "output")}, "x/‖x‖"),
    "var": _keep("self", "x minus its mean"),
    "var_mean": _keep("self", "x minus its mean"),
    # softmax and losses
    "_softmax": _keep("output", "y(g - Σgy)", Flow.IN_PLACE),
    "_log_softmax": _keep("output", "g - eʸΣg", Flow.IN_PLACE),
    "nll_loss_forward": Rule({"self": ("target",)}, "one entry a row"),
    "nll_loss2d_forward": Rule({"self": ("target",)}, "one entry a pixel"),
    "mse_loss": Rule({"self": ("self", "target"), "target": ("self", "target")}, "x - t"),
    "smooth_l1_loss": Rule({"self": ("self", "target"), "target": ("self", "target")}, "x - t"),
    "binary_cross_entropy_with_logits": Rule({"*": ("self", "target")}, "σ(x) - t"),
    # attention and recurrence
    "scaled_dot_product_attention": Rule(
        {
            "query": ("key", "query", "value", "output", "output.1"),
            "*": ("query", "value", "key", "output", "output.1"),
        },
        "rows of the score matrix are recomputed from q, k and the log-sum-exp",
    ),
    "mkldnn_rnn_layer": Rule(
        {"*": ("input", "hx_", "cx_", "output", "bits")},
        "four gates and the cell of every step, FP32",
        bits=160,
    ),
    "_cudnn_rnn": Rule(
        {"*": ("input", "hx", "cx", "output", "bits")},
        "four gates and the cell of every step, FP32",
        bits=160,
    ),
}
"""Rules by operator name; an in-place operator (`relu_`) has the rule of the plain one."""

_ALIASES = {
    "_native_batch_norm_legit": "native_batch_norm",
    "_batch_norm_with_update": "native_batch_norm",
    "cudnn_batch_norm": "native_batch_norm",
    "_safe_softmax": "_softmax",
    "_scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_efficient_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_cudnn_attention": "scaled_dot_product_attention",
    "_fused_rms_norm": "native_layer_norm",
    "_unsafe_index": "index",
}

UNDIFFERENTIATED = frozenset(
    "empty_like empty new_empty new_zeros zeros_like ones_like full_like randn_like rand_like "
    "bernoulli bernoulli_ detach argmax argmin eq ne lt gt le ge".split()
)
"""Operations that read a tensor requiring a gradient and pass none on."""

OVERWRITING = frozenset("bernoulli_ zero_ fill_ normal_ uniform_ random_ exponential_".split())
"""In-place operations that do not read what they overwrite."""

FALLBACK = Rule({"*": ("*",)}, "no rule: every input and output is kept")


def rule_for(name: str) -> Rule | None:
    """The rule of a dispatched operator such as `aten.relu_`."""
    plain = name.partition(".")[2]
    for candidate in (plain, plain.rstrip("_")):
        found = RULES.get(_ALIASES.get(candidate, candidate))
        if found is not None:
            return found
    return None
