"""Each rule says what a gradient reads; autograd says whether that is enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.errors import UnknownOperationWarning
from shoestring.memory.nodes import forward_graph
from shoestring.step.profiling import profile
from shoestring.trace.rules import _ALIASES, FALLBACK, RULES, UNDIFFERENTIATED, Flow, Rule, rule_for
from shoestring.trace.tracing import trace_model

aten = torch.ops.aten
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}
"""Everything here is in float64."""


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Between 0.1 and 2.1 in size, of either sign."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 + 0.1
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return values * signs


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, (tuple, list)) else out


def gradients_of(function: Callable[..., Any], arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of every floating-point argument, for one fixed gradient of the output."""
    given = {
        name: a.clone().requires_grad_() if a.is_floating_point() else a
        for name, a in arguments.items()
    }
    out = first(function(**given))
    upstream = numbers(*out.shape, seed=99)
    wanted = {name: a for name, a in given.items() if a.is_floating_point()}
    found = torch.autograd.grad(out, list(wanted.values()), upstream, allow_unused=True)
    return {name: g for name, g in zip(wanted, found, strict=True) if g is not None}


# -- the table itself ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_every_rule_has_a_reason(name: str) -> None:
    rule = RULES[name]
    assert len(rule.reason) > 1 or rule.reason in ("y",)
    assert rule.reason == rule.reason.strip() and not rule.reason.endswith(".")


@pytest.mark.parametrize("name", RULES)
def test_a_rule_asks_for_bits_exactly_when_it_writes_some(name: str) -> None:
    rule = RULES[name]
    asked = any("bits" in sources for sources in rule.needs.values())
    assert asked == (rule.bits > 0)


def overloads(name: str) -> list[Any]:
    packet = getattr(aten, name)
    return [getattr(packet, overload)._schema for overload in packet.overloads()]


@pytest.mark.parametrize("name", sorted(set(RULES) | set(_ALIASES)))
def test_the_names_in_a_rule_are_those_of_the_operator(name: str) -> None:
    rule = rule_for(f"aten.{name}")
    assert rule is not None
    sources = {source for needs in rule.needs.values() for source in needs}
    sources -= {"bits", "whole"}
    outputs = {source for source in sources if source.startswith("output")}
    most_outputs = 1 + max((int(s.partition(".")[2] or 0) for s in outputs), default=0)
    named = (sources - outputs) | (set(rule.needs) - {"*"})
    if name == "scaled_dot_product_attention":
        assert all(_ALIASES[a] in RULES for a in _ALIASES)
        return  # never dispatched: one of the kernels named as its aliases is
    fits = [
        schema
        for schema in overloads(name)
        if named <= {a.name for a in schema.arguments} and most_outputs <= len(schema.returns)
    ]
    assert fits, f"no overload of {name} has {sorted(named)} and {most_outputs} outputs"


def test_names_are_found_in_place_and_by_alias() -> None:
    assert rule_for("aten.relu_") is rule_for("aten.relu") is RULES["relu"]
    assert rule_for("aten.cudnn_batch_norm") is RULES["native_batch_norm"]
    assert rule_for("aten._to_copy") is RULES["_to_copy"]
    assert rule_for("aten.no_such_operation") is None
    assert set(_ALIASES.values()) <= set(RULES)
    assert not set(_ALIASES) & set(RULES)
    assert not UNDIFFERENTIATED & set(RULES)


# -- rules that name arguments ---------------------------------------------------------------------

MASK = torch.tensor([[True, False, True, False], [False, False, True, True]])
INDEX = torch.tensor([[0, 2, 1, 0], [1, 1, 0, 2]])
ROWS = torch.tensor([2, 0, 1])
M, N, V = numbers(3, 4), numbers(3, 4, seed=1), numbers(4)
IMAGE = numbers(2, 4, 6, 6)
VOLUME = numbers(2, 2, 4, 4, 4)

BY_ARGUMENT: dict[str, tuple[Callable[..., Any], dict[str, Tensor]]] = {
    "add": (aten.add, {"self": M, "other": N}),
    "sub": (aten.sub, {"self": M, "other": N}),
    "rsub": (aten.rsub, {"self": M, "other": N}),
    "neg": (aten.neg, {"self": M}),
    "clone": (aten.clone, {"self": M}),
    "copy": (lambda self, src: self.clone().copy_(src), {"self": M, "src": N}),
    "_to_copy": (lambda self: aten._to_copy(self, dtype=torch.float64), {"self": M}),
    "cat": (lambda a, b: aten.cat([a, b]), {"a": M, "b": N}),
    "stack": (lambda a, b: aten.stack([a, b]), {"a": M, "b": N}),
    "unsafe_split": (lambda self: aten.unsafe_split(self, 2), {"self": M}),
    "split_with_sizes_copy": (lambda self: aten.split_with_sizes_copy(self, [1, 2]), {"self": M}),
    "constant_pad_nd": (lambda self: aten.constant_pad_nd(self, [1, 2], 3.0), {"self": M}),
    "pixel_shuffle": (lambda self: aten.pixel_shuffle(self, 2), {"self": IMAGE}),
    "pixel_unshuffle": (lambda self: aten.pixel_unshuffle(self, 2), {"self": IMAGE}),
    "repeat": (lambda self: aten.repeat(self, [2, 3]), {"self": M}),
    "roll": (lambda self: aten.roll(self, [1], [0]), {"self": M}),
    "flip": (lambda self: aten.flip(self, [1]), {"self": M}),
    "tril": (aten.tril, {"self": M}),
    "triu": (aten.triu, {"self": M}),
    "sum": (lambda self: aten.sum(self, [1]), {"self": M}),
    "mean": (lambda self: aten.mean(self, [1]), {"self": M}),
    "cumsum": (lambda self: aten.cumsum(self, 1), {"self": M}),
    "avg_pool2d": (lambda self: aten.avg_pool2d(self, [2, 2]), {"self": IMAGE}),
    "avg_pool3d": (lambda self: aten.avg_pool3d(self, [2, 2, 2]), {"self": VOLUME}),
    "_adaptive_avg_pool2d": (lambda self: aten._adaptive_avg_pool2d(self, [2, 3]), {"self": IMAGE}),
    "_adaptive_avg_pool3d": (
        lambda self: aten._adaptive_avg_pool3d(self, [2, 2, 3]), {"self": VOLUME},
    ),
    "upsample_nearest2d": (lambda self: aten.upsample_nearest2d(self, [9, 12]), {"self": IMAGE}),
    "upsample_bilinear2d": (
        lambda self: aten.upsample_bilinear2d(self, [9, 12], False), {"self": IMAGE},
    ),
    "unfold": (lambda self: aten.unfold(self, 1, 2, 1), {"self": M}),
    "im2col": (lambda self: aten.im2col(self, [3, 3], [1, 1], [1, 1], [1, 1]), {"self": IMAGE}),
    "col2im": (
        lambda self: aten.col2im(self, [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]),
        {"self": numbers(1, 8, 4)},
    ),
    "masked_fill": (
        lambda self, mask: aten.masked_fill(self, mask, 7.0), {"self": numbers(2, 4), "mask": MASK},
    ),
    "where": (
        aten.where, {"condition": MASK, "self": numbers(2, 4), "other": numbers(2, 4, seed=1)},
    ),
    "embedding": (aten.embedding, {"weight": M, "indices": ROWS}),
    "index_select": (
        lambda self, index: aten.index_select(self, 0, index), {"self": M, "index": ROWS},
    ),
    "index": (
        lambda self, indices: aten.index(self, [indices]), {"self": M, "indices": ROWS},
    ),
    "gather": (
        lambda self, index: aten.gather(self, 0, index), {"self": M, "index": INDEX},
    ),
    "scatter_add": (
        lambda self, index, src: aten.scatter_add(self, 0, index, src),
        {"self": M, "index": INDEX, "src": numbers(2, 4)},
    ),
    "mul": (aten.mul, {"self": M, "other": N}),
    "div": (aten.div, {"self": M, "other": N}),
    "addcmul": (aten.addcmul, {"self": M, "tensor1": N, "tensor2": V}),
    "mm": (aten.mm, {"self": M, "mat2": numbers(4, 5)}),
    "bmm": (aten.bmm, {"self": numbers(2, 3, 4), "mat2": numbers(2, 4, 5)}),
    "addmm": (aten.addmm, {"self": numbers(5), "mat1": M, "mat2": numbers(4, 5)}),
    "baddbmm": (
        aten.baddbmm,
        {"self": numbers(2, 3, 5), "batch1": numbers(2, 3, 4), "batch2": numbers(2, 4, 5)},
    ),
    "dot": (aten.dot, {"self": V, "tensor": numbers(4, seed=1)}),
    "vdot": (aten.vdot, {"self": V, "other": numbers(4, seed=1)}),
    "mv": (aten.mv, {"self": M, "vec": V}),
    "linear": (aten.linear, {"input": M, "weight": numbers(5, 4), "bias": numbers(5)}),
    "convolution": (
        lambda input, weight, bias: aten.convolution(
            input, weight, bias, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
        ),
        {"input": IMAGE, "weight": numbers(3, 4, 3, 3), "bias": numbers(3)},
    ),
    "log": (aten.log, {"self": M.abs()}),
    "pow": (aten.pow, {"self": M.abs() + 0.5, "exponent": numbers(*M.shape, seed=5)}),
    "sin": (aten.sin, {"self": M}),
    "cos": (aten.cos, {"self": M}),
    "gelu": (aten.gelu, {"self": M}),
    "silu": (aten.silu, {"self": M}),
    "hardswish": (aten.hardswish, {"self": M}),
    "mish": (aten.mish, {"self": M}),
    "softplus": (aten.softplus, {"self": M}),
    "log_sigmoid_forward": (aten.log_sigmoid_forward, {"self": M}),
    "var": (lambda self: aten.var(self, [1]), {"self": M}),
    "var_mean": (lambda self: aten.var_mean(self, [1]), {"self": M}),
    "nll_loss_forward": (
        lambda self, target: aten.nll_loss_forward(self, target, None, 1, -100),
        {"self": M, "target": ROWS},
    ),
    "nll_loss2d_forward": (
        lambda self, target: aten.nll_loss2d_forward(self, target, None, 1, -100),
        {"self": IMAGE, "target": torch.arange(72).view(2, 6, 6) % 4},
    ),
    "mse_loss": (aten.mse_loss, {"self": M, "target": N}),
    "smooth_l1_loss": (aten.smooth_l1_loss, {"self": M, "target": N}),
    "binary_cross_entropy_with_logits": (
        aten.binary_cross_entropy_with_logits, {"self": M, "target": N.abs() / 3},
    ),
    "native_layer_norm": (
        lambda input, weight, bias: aten.native_layer_norm(input, [4], weight, bias, 1e-5),
        {"input": M, "weight": V, "bias": numbers(4, seed=1)},
    ),
    "native_group_norm": (
        lambda input, weight, bias: aten.native_group_norm(
            input, weight, bias, 2, 4, 36, 2, 1e-5
        ),
        {"input": IMAGE, "weight": V, "bias": numbers(4, seed=1)},
    ),
    "native_batch_norm": (
        lambda input, weight, bias: aten.native_batch_norm(
            input, weight, bias, None, None, True, 0.1, 1e-5
        ),
        {"input": IMAGE, "weight": V, "bias": numbers(4, seed=1)},
    ),
}  # fmt: skip

# The weight of a normalization is a parameter, which costs nothing to read.
PARAMETERS = {name: {"weight"} for name in RULES if name.startswith("native_")}


@pytest.mark.parametrize("name", BY_ARGUMENT)
def test_a_gradient_depends_on_nothing_but_what_the_rule_names(name: str) -> None:
    """Every other argument is drawn anew, and the gradient stays the same."""
    function, arguments = BY_ARGUMENT[name]
    rule = RULES[name]
    before = gradients_of(function, arguments)
    assert before
    for argument, expected in before.items():
        reads = set(rule.needs.get(argument, rule.needs.get("*", ())))
        assert reads <= set(arguments), "a rule with outputs or bits belongs into the other table"
        redrawn = {
            other: numbers(*a.shape, seed=7)
            if a.is_floating_point() and other not in reads | PARAMETERS.get(name, set())
            else a
            for other, a in arguments.items()
        }
        torch.testing.assert_close(gradients_of(function, redrawn)[argument], expected)


@pytest.mark.parametrize("name", BY_ARGUMENT)
def test_a_rule_names_nothing_in_vain(name: str) -> None:
    """Each floating-point argument that is kept changes the gradient it is kept for."""
    function, arguments = BY_ARGUMENT[name]
    rule = RULES[name]
    before = gradients_of(function, arguments)
    for argument, expected in before.items():
        for read in rule.needs.get(argument, rule.needs.get("*", ())):
            if not arguments[read].is_floating_point() or argument == "target":
                continue  # a target's own gradient is seldom asked for
            redrawn = {**arguments, read: numbers(*arguments[read].shape, seed=7)}
            if name in ("log", "binary_cross_entropy_with_logits"):
                redrawn[read] = redrawn[read].abs() / 3
            assert not torch.allclose(gradients_of(function, redrawn)[argument], expected)


# -- rules that name the output or bits ------------------------------------------------------------

# name → operation, the bit it could write down while it ran, and the gradient from that alone.
OF_BITS: dict[str, tuple[Callable, Callable[[Tensor], Tensor], Callable]] = {
    "relu": (aten.relu, lambda x: x > 0, lambda bit, g: g * bit),
    "leaky_relu": (
        lambda self: aten.leaky_relu(self, 0.1),
        lambda x: x > 0,
        lambda bit, g: g.where(bit, 0.1 * g),
    ),
    "hardtanh": (aten.hardtanh, lambda x: x.abs() < 1, lambda bit, g: g * bit),
    "clamp": (
        lambda self: aten.clamp(self, -1.0, 0.5),
        lambda x: (x > -1) & (x < 0.5),
        lambda bit, g: g * bit,
    ),
    "clamp_min": (
        lambda self: aten.clamp_min(self, 0.3),
        lambda x: x > 0.3,
        lambda bit, g: g * bit,
    ),
    "abs": (aten.abs, lambda x: x > 0, lambda bit, g: g.where(bit, -g)),
    "threshold": (
        lambda self: aten.threshold(self, 0.3, 5.0),
        lambda x: x > 0.3,
        lambda bit, g: g * bit,
    ),
}

# name → operation, and the gradient from its output alone.
OF_OUTPUT: dict[str, tuple[Callable, Callable[[Tensor, Tensor], Tensor]]] = {
    "sigmoid": (aten.sigmoid, lambda y, g: g * y * (1 - y)),
    "tanh": (aten.tanh, lambda y, g: g * (1 - y * y)),
    "elu": (aten.elu, lambda y, g: g.where(y > 0, g * (y + 1))),
    "exp": (aten.exp, lambda y, g: g * y),
    "sqrt": (aten.sqrt, lambda y, g: g / (2 * y)),
    "rsqrt": (aten.rsqrt, lambda y, g: -g * y**3 / 2),
    "reciprocal": (aten.reciprocal, lambda y, g: -g * y * y),
    "_softmax": (
        lambda self: aten._softmax(self, 1, False),
        lambda y, g: y * (g - (g * y).sum(1, keepdim=True)),
    ),
    "_log_softmax": (
        lambda self: aten._log_softmax(self, 1, False),
        lambda y, g: g - y.exp() * g.sum(1, keepdim=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_BITS)
def test_one_bit_is_enough(name: str) -> None:
    function, bit_of, gradient = OF_BITS[name]
    assert RULES[name].bits == 1 and set(RULES[name].needs.values()) == {("bits",)}
    x = numbers(5, 6)
    (found,) = gradients_of(function, {"self": x}).values()
    bits = bit_of(x)
    assert bits.dtype is torch.bool and bits.any() and not bits.all()
    torch.testing.assert_close(gradient(bits, numbers(5, 6, seed=99)), found, **TOLERANCE)


@pytest.mark.parametrize("name", OF_OUTPUT)
def test_the_output_is_enough(name: str) -> None:
    function, gradient = OF_OUTPUT[name]
    assert set(RULES[name].needs.values()) == {("output",)}
    x = numbers(5, 6)
    if "sqrt" in name:
        x = x.abs()
    (found,) = gradients_of(function, {"self": x}).values()
    torch.testing.assert_close(gradient(function(x), numbers(5, 6, seed=99)), found, **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("topk", lambda self: aten.topk(self, 2)),
        ("sort", lambda self: aten.sort(self)),
        ("max", lambda self: aten.max(self, 1, True)),
        ("min", lambda self: aten.min(self, 1, True)),
    ],
)
def test_positions_are_enough(name: str, function: Callable) -> None:
    assert {needs[0] for needs in RULES[name].needs.values()} == {"output.1"}
    x = numbers(5, 6)
    (found,) = gradients_of(function, {"self": x}).values()
    values, positions = function(x)
    upstream = numbers(*values.shape, seed=99)
    torch.testing.assert_close(torch.zeros_like(x).scatter(1, positions, upstream), found)


def test_a_dropout_mask_is_enough() -> None:
    rule = RULES["native_dropout"]
    assert rule.bits == 1 and set(rule.needs.values()) == {("bits",)}
    x = numbers(5, 6).requires_grad_()
    out, mask = aten.native_dropout(x, 0.25, True)
    upstream = numbers(5, 6, seed=99)
    (found,) = torch.autograd.grad(out, x, upstream)
    torch.testing.assert_close(upstream * mask / 0.75, found)


def test_a_byte_for_each_window_is_enough() -> None:
    rule = RULES["max_pool2d_with_indices"]
    assert rule.bits == 8 and set(rule.needs.values()) == {("bits",)}
    (found,) = gradients_of(
        lambda self: aten.max_pool2d_with_indices(self, [2, 3], [2, 3]), {"self": IMAGE}
    ).values()
    windows = IMAGE.unfold(2, 2, 2).unfold(3, 3, 3).flatten(-2)
    place = windows.argmax(-1)
    assert place.max() < 256
    one_hot = F.one_hot(place, 6) * numbers(*place.shape, seed=99)[..., None]
    rebuilt = one_hot.unflatten(-1, (2, 3)).permute(0, 1, 2, 4, 3, 5).reshape(IMAGE.shape)
    torch.testing.assert_close(rebuilt, found)


@pytest.mark.parametrize(
    ("name", "function", "gradient"),
    [
        ("norm", lambda self: aten.norm(self, 2, [1], True), lambda x, y, g: g * x / y),
        (
            "linalg_vector_norm",
            lambda self: aten.linalg_vector_norm(self, 2, [1], True),
            lambda x, y, g: g * x / y,
        ),
        ("amax", lambda self: aten.amax(self, [1], True), lambda x, y, g: g * (x == y)),
    ],
)
def test_input_and_output_are_enough(name: str, function: Callable, gradient: Callable) -> None:
    assert set(RULES[name].needs.values()) == {("self", "output")}
    x = numbers(5, 6)
    (found,) = gradients_of(function, {"self": x}).values()
    torch.testing.assert_close(gradient(x, function(x), numbers(5, 1, seed=99)), found, **TOLERANCE)


def test_attention_is_rebuilt_from_what_is_kept() -> None:
    kept = {"query", "key", "value", "output", "output.1"}
    assert {frozenset(n) for n in RULES["scaled_dot_product_attention"].needs.values()} == {
        frozenset(kept)
    }
    arguments = {n: numbers(1, 2, 5, 4, seed=s) for s, n in enumerate(("query", "key", "value"))}
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    found = gradients_of(kernel, arguments)
    q, k, v = arguments.values()
    output, log_sum = kernel(**arguments)
    gradient = numbers(*output.shape, seed=99)
    scores = (q @ k.mT / 2 - log_sum[..., None]).exp()
    by_score = scores * (gradient @ v.mT - (gradient * output).sum(-1, keepdim=True)) / 2
    torch.testing.assert_close(by_score @ k, found["query"])
    torch.testing.assert_close(by_score.mT @ q, found["key"])
    torch.testing.assert_close(scores.mT @ gradient, found["value"])


UNCHECKED = {
    "fill": "no gradient to what was there",
    "zero": "no gradient to what was there",
    "_embedding_bag": "the embedding's, summed",
    "max_pool3d_with_indices": "as in two dimensions",
    "mkldnn_rnn_layer": "the kernel's own workspace",
    "_cudnn_rnn": "the kernel's own workspace",
}


def test_every_rule_is_checked_here_or_says_why_not() -> None:
    by_hand = {"topk", "sort", "max", "min", "native_dropout", "max_pool2d_with_indices", "norm",
               "linalg_vector_norm", "amax", "scaled_dot_product_attention"}  # fmt: skip
    checked = [set(BY_ARGUMENT), set(OF_BITS), set(OF_OUTPUT), by_hand, set(UNCHECKED)]
    assert set().union(*checked) == set(RULES)
    assert sum(map(len, checked)) == len(RULES)


# -- how the gradient flows ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [n for n in BY_ARGUMENT if RULES[n].flow is Flow.SAME and n != "copy"]
)
def test_the_same_gradient_passes_on(name: str) -> None:
    """As a bag of numbers: shapes and places may change, bytes do not."""
    function, arguments = BY_ARGUMENT[name]
    upstream = numbers(*first(function(**arguments)).shape, seed=99)
    for gradient in gradients_of(function, arguments).values():
        torch.testing.assert_close(gradient.flatten().sort()[0], upstream.flatten().sort()[0])


@pytest.mark.parametrize("name", [n for n in RULES if RULES[n].cheap])
def test_cheap_operations_are_norms_and_activation_functions(name: str) -> None:
    rule = RULES[name]
    assert rule.flow is Flow.IN_PLACE
    assert rule.elementwise or name.startswith("native_")
    assert rule.normalization == (name == "native_batch_norm")


# -- operations without a rule ---------------------------------------------------------------------


class Between(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.function(self.before(x)))


def total(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).sum()


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("aten.special_i0e", torch.special.i0e),
        ("aten.lgamma", torch.lgamma),
    ],
)
def test_an_unknown_operation_is_named_and_keeps_everything(
    name: str, function: Callable[[Tensor], Tensor]
) -> None:
    model, batch = Between(function), torch.zeros(16, 8)
    with pytest.warns(UnknownOperationWarning, match=name):
        found = profile(model, batch, loss=total)
    assert any(name in warning for warning in found.warnings)
    graph = forward_graph(trace_model(model, batch, loss=total))
    assert graph.unknown == (name,)
    node = next(n for n in graph.nodes if n.name == name)
    assert set(node.gradients[0].reads) == {*node.inputs, *node.outputs}
    # Input and output of the unknown one, and the batch for the first layer.
    assert found.stored_activation_bytes >= 3 * 16 * 8 * 4


@torch.library.custom_op("shoestring_tests::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    """A cube, known to the dispatcher by a name of its own."""
    return x**3


@cube.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _cube_backward(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return 3 * gradient * x * x


cube.register_autograd(_cube_backward, setup_context=_save)


def test_a_library_operation_keeps_what_its_gradient_saved() -> None:
    # Its registered gradient is a custom autograd function: no rule, and none needed.
    model, batch = Between(lambda x: cube(x)), torch.zeros(16, 8)
    assert profile(model, batch, loss=total).warnings == ()
    node = forward_graph(trace_model(model, batch, loss=total)).nodes[1]
    assert node.name == "shoestring_tests.cube"
    assert [gradient.reads for gradient in node.gradients] == [node.inputs]


def test_a_known_operation_is_not_named() -> None:
    found = profile(Between(torch.relu), torch.zeros(16, 8), loss=total)
    assert found.warnings == ()


def test_an_unknown_operation_without_a_gradient_is_not_named() -> None:
    class Prepared(Between):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.special.i0e(x))

    found = profile(Prepared(torch.relu), torch.zeros(16, 8), loss=total)
    assert found.warnings == ()


def test_the_fallback_keeps_everything() -> None:
    assert Rule({"*": ("*",)}, FALLBACK.reason) == FALLBACK
    assert FALLBACK.flow is Flow.FRESH and not FALLBACK.elementwise and not FALLBACK.cheap


def test_a_view_in_place_is_a_view() -> None:
    """It changes how a tensor is read: nothing is written, kept or named as unknown."""

    class Turned(nn.Module):
        def __init__(self, in_place: bool) -> None:
            super().__init__()
            self.layer, self.in_place = nn.Linear(6, 6), in_place

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            y = y.transpose_(0, 1).unsqueeze_(0) if self.in_place else y.transpose(0, 1)[None]
            return y.exp()

    both = [
        profile(Turned(kind), torch.randn(6, 6), loss=lambda m, x: m(x).sum(), optimizer="sgd")
        for kind in (False, True)
    ]
    assert both[0].peak_bytes == both[1].peak_bytes
