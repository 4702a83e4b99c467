"""Forward graphs of small real models: what is a node, what it keeps, which block it is in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shoestring.lab.models import builtin
from shoestring.lab.models.dynamic_conv import dc_transformer, label_smoothed_loss
from shoestring.memory.model import memory_profile
from shoestring.memory.nodes import ForwardGraph, Node, forward_graph
from shoestring.trace.graph import Role
from shoestring.trace.rules import Flow
from shoestring.trace.tracing import trace_model

ROWS = 16
X_BYTES = ROWS * 8 * 4
"""Sixteen rows of eight numbers."""


def graph_of(model: nn.Module, batch: Any, loss: Callable | None = None) -> ForwardGraph:
    return forward_graph(trace_model(model, batch, loss=loss or (lambda m, b: m(b).sum())))


class Between(nn.Module):
    """A function between two linear layers of eight inputs and outputs."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.function(self.before(x)))


def graph_between(function: Callable[[Tensor], Tensor]) -> ForwardGraph:
    return graph_of(Between(function), torch.zeros(ROWS, 8))


def kept_bytes(graph: ForwardGraph) -> int:
    """All keys that some gradient reads, each once."""
    keys = {k for node in graph.nodes for gradient in node.gradients for k in gradient.reads}
    return sum(graph.key_bytes[k] for k in keys)


def only(graph: ForwardGraph, name: str) -> Node:
    found = [node for node in graph.nodes if node.name == name]
    assert len(found) == 1, [node.name for node in graph.nodes]
    return found[0]


# -- what a node keeps -----------------------------------------------------------------------------


def test_linear_layers_keep_their_inputs_and_parameters_are_free() -> None:
    graph = graph_between(lambda h: h)
    first, second, _ = graph.nodes
    assert [n.name for n in graph.nodes] == ["aten.addmm", "aten.addmm", "aten.sum"]
    # The batch takes no gradient; bias and weight come before the input.
    assert [g.is_parameter for g in first.gradients] == [True, True]
    assert [g.is_parameter for g in second.gradients] == [True, True, False]
    assert second.gradients[-1].of == first.outputs[0]
    assert second.gradients[-1].reads == ()
    assert kept_bytes(graph) == 2 * X_BYTES
    parameters = {g.of for node in graph.nodes for g in node.gradients if g.is_parameter}
    assert len(parameters) == 4 and not any(graph.key_bytes[k] for k in parameters)


class HalfSquare(torch.autograd.Function):
    """x²/2 that keeps a narrow copy of its input, and computes what nobody keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        narrow = x.to(torch.bfloat16)
        ctx.save_for_backward(narrow)
        return (x * x).exp().log() / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (narrow,) = ctx.saved_tensors
        return gradient * narrow


def test_a_custom_function_keeps_what_it_saved() -> None:
    graph = graph_between(lambda h: HalfSquare.apply(h))
    node = only(graph, "custom function")
    assert [graph.key_bytes[k] for k in node.gradients[0].reads] == [X_BYTES // 2]
    assert kept_bytes(graph) == 2 * X_BYTES + X_BYTES // 2
    assert not graph.unknown


def test_a_custom_function_called_unseen_counts_as_its_operations() -> None:
    bound = HalfSquare.apply
    graph = graph_between(bound)
    assert {"aten.mul", "aten.exp", "aten.log", "aten.div"} <= {n.name for n in graph.nodes}
    assert kept_bytes(graph) >= 2 * X_BYTES + X_BYTES // 2


class KeepsNothing(torch.autograd.Function):
    """A scaling by a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


def test_a_custom_function_that_saves_nothing_keeps_nothing() -> None:
    graph = graph_between(lambda h: KeepsNothing.apply(h))
    assert [g.reads for g in only(graph, "aten.mul").gradients] == [()]
    assert kept_bytes(graph) == 2 * X_BYTES


@pytest.mark.parametrize("in_place", [False, True])
def test_relu_keeps_a_bit_in_place_or_not(in_place: bool) -> None:
    graph = graph_between(nn.ReLU(inplace=in_place))
    node = only(graph, "aten.relu_" if in_place else "aten.relu")
    assert node.gradients[0].reads == (node.record,)
    assert graph.key_bytes[node.record] == ROWS * 8 // 8
    assert node.cheap and node.elementwise and node.flow is Flow.IN_PLACE
    # In place is a new value on the same memory, and the next layer reads that one.
    assert node.outputs != node.inputs and graph.producer[node.outputs[0]] == node.index
    assert graph.nodes[node.index + 1].gradients[1].reads == node.outputs
    assert kept_bytes(graph) == 2 * X_BYTES + ROWS


def test_in_place_and_plain_relu_cost_the_same() -> None:
    peaks = {
        memory_profile(
            trace_model(
                Between(nn.ReLU(inplace=in_place)),
                torch.zeros(ROWS, 8),
                loss=lambda m, b: m(b).sum(),
            )
        ).peak_bytes
        for in_place in (False, True)
    }
    assert len(peaks) == 1


@pytest.mark.parametrize(
    "view",
    [
        lambda h: h.view(ROWS, 8),
        lambda h: h.reshape(8, 16).flatten().unflatten(0, (ROWS, 8)),
        lambda h: h.t().t(),
        lambda h: h[None].squeeze(0),
        lambda h: h.expand(1, ROWS, 8)[0],
        lambda h: h.contiguous(),
        lambda h: h.chunk(1, dim=1)[0],
    ],
)
def test_views_are_free(view: Callable[[Tensor], Tensor]) -> None:
    graph = graph_between(view)
    assert [n.name for n in graph.nodes] == ["aten.addmm", "aten.addmm", "aten.sum"]
    assert graph.nodes[1].inputs[1] == graph.nodes[0].outputs[0]
    assert kept_bytes(graph) == 2 * X_BYTES


def test_dropout_keeps_a_bit_for_each_element() -> None:
    # On the CPU dropout is a product with a mask that bernoulli made and a division scaled.
    graph = graph_between(nn.Dropout(0.5))
    product = only(graph, "aten.mul")
    assert [graph.key_bytes[k] for k in product.gradients[0].reads] == [ROWS * 8 // 8]
    assert kept_bytes(graph) == 2 * X_BYTES + ROWS


@pytest.mark.parametrize("function", [torch.sigmoid, torch.tanh, torch.exp, F.elu])
def test_functions_of_their_output_keep_what_the_next_layer_keeps_anyway(
    function: Callable[[Tensor], Tensor],
) -> None:
    assert kept_bytes(graph_between(function)) == 2 * X_BYTES


@pytest.mark.parametrize("function", [F.gelu, F.silu, F.mish, F.softplus, torch.sin])
def test_functions_of_their_input_keep_it(function: Callable[[Tensor], Tensor]) -> None:
    assert kept_bytes(graph_between(function)) == 3 * X_BYTES


def test_batch_norm_keeps_its_input_and_small_statistics() -> None:
    graph = graph_between(nn.BatchNorm1d(8))
    node = only(graph, "aten.native_batch_norm")
    assert node.statistics_bytes == 4 * 8 * 4
    assert node.recompute_flops == 2 * ROWS * 8 < node.flops
    assert kept_bytes(graph) == 3 * X_BYTES
    # Weight, then bias, then input, which reads the input once more.
    assert [g.is_parameter for g in node.gradients] == [True, True, False]


def test_no_gradient_no_record() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = torch.relu(x + 1)
            return self.linear(x)

    graph = graph_of(Frozen(), torch.zeros(ROWS, 8))
    node = only(graph, "aten.relu")
    assert node.record == 0 and node.gradients == ()


def test_a_tensor_used_twice_has_one_gradient() -> None:
    graph = graph_between(lambda h: h * h)
    node = only(graph, "aten.mul")
    assert len(node.gradients) == 1
    assert node.gradients[0].reads == node.inputs == graph.nodes[0].outputs


def test_tied_weights_are_one_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 8)
            self.scores = nn.Linear(8, 10, bias=False)
            self.scores.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.scores(self.embedding(tokens))

    trace = trace_model(
        Tied(),
        torch.zeros(2, 5, dtype=torch.int64),
        loss=lambda m, b: m(b).sum(),
        optimizer="sgd",
    )
    graph = forward_graph(trace)
    lookup, product = only(graph, "aten.embedding"), only(graph, "aten.mm")
    assert lookup.gradients[0].of == product.gradients[0].of
    assert lookup.gradients[0].is_parameter and product.gradients[0].is_parameter
    # The indices for the lookup, 8 bytes each, and the rows found for the product.
    assert kept_bytes(graph) == 10 * 8 + 10 * 8 * 4
    roles = memory_profile(trace).bytes_by_role
    for role in (Role.MODEL, Role.GRADIENT, Role.OPTIMIZER_STATE):
        assert roles[role] == 10 * 8 * 4


def test_several_outputs_belong_to_one_node() -> None:
    graph = graph_between(lambda h: h.sort(dim=1).values)
    node = only(graph, "aten.sort")
    assert len(node.outputs) == 2
    assert node.gradients[0].reads == (node.outputs[1],)
    assert graph.key_bytes[node.outputs[1]] == ROWS * 8 * 8


# -- residual blocks -------------------------------------------------------------------------------


def numbering(graph: ForwardGraph) -> list[int]:
    """The blocks in the order they run, each once, if none comes back."""
    seen = [n.block for n in graph.nodes if n.block >= 0]
    assert seen == sorted(seen)
    return list(dict.fromkeys(seen))


def test_wide_resnet_has_one_block_for_each_of_its_own() -> None:
    model = builtin("wrn-16-1")
    with FakeTensorMode(allow_non_fake_inputs=True):
        network, batch = model.build(), model.batch(2)
    graph = graph_of(network, batch, model.loss)
    assert graph.blocks == 6 and numbering(graph) == list(range(6))
    for block in range(6):
        names = Counter(n.name for n in graph.nodes if n.block == block)
        assert names["aten.convolution"] == 2 and names["aten.add"] == 1
    outside = [n.name for n in graph.nodes if n.block < 0]
    assert outside[0] == "aten.convolution" and "aten.addmm" in outside


def test_dc_transformer_has_two_blocks_a_encoder_layer_and_three_a_decoder_layer() -> None:
    network = dc_transformer(
        width=16, encoder_layers=3, decoder_layers=2, source_vocabulary=20, target_vocabulary=20
    )
    tokens = torch.full((2, 6), 5)
    graph = graph_of(network, tokens, lambda m, b: label_smoothed_loss(m(b, b), b))
    assert graph.blocks == 3 * 2 + 2 * 3 and numbering(graph) == list(range(12))
    modules = {n.block: n.module for n in graph.nodes if n.block >= 0}
    assert [modules[b].split(".")[:3] for b in (1, 5, 8, 11)] == [
        ["encoder", "layers", "0"],
        ["encoder", "layers", "2"],
        ["decoder", "layers", "0"],
        ["decoder", "layers", "1"],
    ]


class PreNormLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), as GPT-2 has it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(self.ln_1(x)).chunk(3, dim=2)
        heads = [part.unflatten(2, (2, -1)).transpose(1, 2) for part in parts]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.dropout(self.c_proj(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.ln_2(x)))))


class LanguageModel(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(20, 16), nn.Embedding(8, 16)
        self.h = nn.ModuleList(PreNormLayer() for _ in range(layers))
        self.ln_f = nn.LayerNorm(16)
        self.head = nn.Linear(16, 20, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for layer in self.h:
            x = layer(x)
        return self.head(self.ln_f(x))


def test_gpt_has_two_blocks_a_layer() -> None:
    graph = graph_of(LanguageModel(), torch.zeros(2, 8, dtype=torch.int64))
    assert graph.blocks == 6 and numbering(graph) == list(range(6))
    for layer in range(3):
        attention = {n.name for n in graph.nodes if n.block == 2 * layer}
        feed_forward = {n.name for n in graph.nodes if n.block == 2 * layer + 1}
        assert "aten._scaled_dot_product_flash_attention_for_cpu" in attention
        assert "aten.gelu" in feed_forward - attention
    assert not graph.unknown


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer_layer_is_two_blocks_whichever_norm_comes_first(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, norm_first=norm_first, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    graph = graph_of(model, torch.zeros(2, 5, 16))
    assert graph.blocks == 6 and numbering(graph) == list(range(6))
    last = {n.block: n.name for n in graph.nodes if n.block >= 0}
    # Post-norm: the norm behind the addition belongs to the block it ends.
    expected = "aten.add" if norm_first else "aten.native_layer_norm"
    assert set(last.values()) == {expected}


def test_layers_without_residual_connections_are_a_block_each() -> None:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)]

    class Layer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    graph = graph_of(nn.Sequential(*map(Layer, layers)), torch.zeros(ROWS, 8))
    assert graph.blocks == 3 and numbering(graph) == [0, 1, 2]


def test_no_repeated_layers_no_blocks() -> None:
    assert graph_between(torch.relu).blocks == 0


def test_the_example_of_the_module() -> None:
    """Two linear layers with a ReLU between them: the table at the top of memory/nodes.py."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
    graph = graph_of(model, torch.randn(3, 4))
    bits = graph.nodes[1].record
    assert [node.name for node in graph.nodes] == ["aten.mm", "aten.relu", "aten.mm", "aten.sum"]
    assert [(g.of, g.reads) for node in graph.nodes for g in node.gradients] == [
        (0, (2,)), (3, (bits,)), (1, (4,)), (4, ()), (5, ()),
    ]  # fmt: skip
    assert graph.key_bytes == {0: 0, 1: 0, 2: 48, 3: 96, 4: 96, bits: 3, 5: 24, 6: 4}
