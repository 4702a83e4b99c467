"""A trace says what a step does, for every way to write a model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoestring.trace.graph import Op, Phase, Role, Trace
from shoestring.trace.tracing import trace_model


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    """A loss for any model of one tensor."""
    return model(batch).square().mean()


def trace_of(forward: Callable[..., Tensor], *shape: int, **modules: nn.Module) -> Trace:
    """The trace of a model with these modules and this forward, on a batch of this shape."""
    return trace_model(Written(forward, **modules), torch.randn(*shape), loss=mean_square)


class Written(nn.Module):
    """A model written as one function of itself and its input."""

    def __init__(self, forward: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.written = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Any) -> Tensor:
        return self.written(self, x)


def named(trace: Trace, name: str, phase: Phase = Phase.FORWARD) -> list[Op]:
    """The operations of this name in one phase."""
    return [op for op in trace.ops if op.name == f"aten.{name}" and op.phase is phase]


def role_bytes(trace: Trace, role: Role) -> int:
    return sum(storage.nbytes for storage in trace.storages if storage.role is role)


def storage_of(trace: Trace, value: int) -> int:
    return trace.values[value].storage


def check_consistent(trace: Trace) -> None:
    """What must hold of every trace."""
    for index, storage in enumerate(trace.storages):
        assert storage.index == index
        assert -1 <= storage.birth <= storage.death <= len(trace.ops)
    for index, op in enumerate(trace.ops):
        assert op.index == index
        assert op.forward_op < op.index
        for spec in [*(spec for _, spec in op.inputs), *op.outputs]:
            storage = trace.storages[storage_of(trace, spec.value)]
            if storage.birth < len(trace.ops):
                assert storage.birth <= index
    for index, value in enumerate(trace.values):
        assert value.index == index
    assert all(parameter.storage < len(trace.storages) for parameter in trace.parameters)


# -- what models may do ----------------------------------------------------------------------------


def test_a_linear_layer_by_hand() -> None:
    model = nn.Linear(3, 5)
    trace = trace_model(model, torch.randn(4, 3), loss=mean_square, optimizer="adam")
    check_consistent(trace)
    assert role_bytes(trace, Role.MODEL) == 4 * (15 + 5)
    assert role_bytes(trace, Role.GRADIENT) == 4 * (15 + 5)
    assert role_bytes(trace, Role.INPUT) == 4 * 12
    # Two moments of each parameter, and a step count of one number.
    assert role_bytes(trace, Role.OPTIMIZER_STATE) == 2 * 4 * (15 + 5) + 2 * 4
    # The output of the layer, kept by the square; the square and the mean are not kept.
    assert role_bytes(trace, Role.FORWARD_ACTIVATION) == 4 * 20 + 4
    assert trace.forward_flops >= 2 * 4 * 3 * 5
    assert [p.name for p in trace.parameters] == ["weight", "bias"]
    assert [p.state_elements for p in trace.parameters] == [(15, 15), (5, 5)]
    assert {op.phase for op in trace.ops} == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    assert trace.optimizer == "Adam"


def test_step_counts_lie_in_host_memory_on_cuda() -> None:
    model = nn.Linear(3, 5)
    trace = trace_model(model, torch.randn(4, 3), loss=mean_square, optimizer="adam", device="cuda")
    live = [s for s in trace.storages if s.role is Role.OPTIMIZER_STATE and s.birth < s.death]
    assert sum(storage.nbytes for storage in live) == 2 * 4 * (15 + 5)


def test_several_inputs() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 2), nn.Linear(5, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.left(a) * self.right(b)

    batch = (torch.randn(4, 3), torch.randn(4, 5), torch.randint(2, (4,)))
    trace = trace_model(Pair(), batch, loss=lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]))
    assert len(trace.inputs) == 3
    assert role_bytes(trace, Role.INPUT) == 4 * (12 + 20) + 8 * 4
    assert {op.module for op in named(trace, "addmm")} == {"left", "right"}


def test_nested_dictionary_of_inputs() -> None:
    batch = {"x": {"a": torch.randn(4, 3)}, "y": [torch.randn(4, 2), "a name"], "n": 2}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        assert batch["y"][1] == "a name"
        return F.mse_loss(model(batch["x"]["a"]) / batch["n"], batch["y"][0])

    trace = trace_model(nn.Linear(3, 2), batch, loss=loss)
    assert role_bytes(trace, Role.INPUT) == 4 * (12 + 8)


def test_inputs_that_share_memory_count_once() -> None:
    tokens = torch.randint(7, (3, 9))
    model = nn.Embedding(7, 4)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).mean() + model(batch[1]).mean()

    assert role_bytes(trace_model(model, (tokens, tokens), loss=loss), Role.INPUT) == 27 * 8
    shifted = (tokens[:, :-1], tokens[:, 1:])
    assert role_bytes(trace_model(model, shifted, loss=loss), Role.INPUT) == 27 * 8
    # Of a slice of a larger tensor, what the batch shows.
    rows = torch.randint(7, (100, 9))[10:13]
    assert role_bytes(trace_model(model, (rows, rows), loss=loss), Role.INPUT) == 27 * 8


def test_tied_weight_counts_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 4)
            self.head = nn.Linear(4, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens))

    trace = trace_model(Tied(), torch.randint(11, (2, 3)), loss=mean_square, optimizer="sgd")
    assert [p.name for p in trace.parameters] == ["embedding.weight"]
    for role in (Role.MODEL, Role.GRADIENT, Role.OPTIMIZER_STATE):
        assert role_bytes(trace, role) == 4 * 44


def test_module_called_twice() -> None:
    layer = nn.Linear(4, 4)
    trace = trace_of(lambda m, x: m.layer(torch.relu(m.layer(x))), 3, 4, layer=layer)
    calls = named(trace, "addmm")
    assert [op.module for op in calls] == ["layer", "layer"]
    weights = {dict(op.inputs)["mat2"].value for op in calls}
    assert len({storage_of(trace, value) for value in weights}) == 1
    assert role_bytes(trace, Role.GRADIENT) == 4 * 20


def test_nested_modules_are_named() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    trace = trace_model(model, torch.randn(3, 4), loss=mean_square)
    assert [op.module for op in named(trace, "addmm")] == ["0.0", "1"]
    assert [op.module for op in named(trace, "relu")] == ["0.1"]
    assert ("0", "Sequential") in trace.modules
    assert ("0.1", "ReLU") in trace.modules


def test_backward_knows_the_forward_operation() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    trace = trace_model(model, torch.randn(2, 3, 8, 8), loss=mean_square)
    pairs = {"convolution": "0", "native_batch_norm": "1", "threshold": "2"}
    forward = {"threshold": "relu"}
    for name, module in pairs.items():
        (backward,) = named(trace, f"{name}_backward", Phase.BACKWARD)
        assert backward.module == module
        assert trace.ops[backward.forward_op].name == f"aten.{forward.get(name, name)}"


def test_in_place_operations_make_new_values() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return model.layer(x).add_(1).relu_()

    trace = trace_of(forward, 3, 4, layer=nn.Linear(4, 5))
    (product,), (add,), (relu,) = (named(trace, n) for n in ("addmm", "add_", "relu_"))
    versions = [op.outputs[0].value for op in (product, add, relu)]
    assert len(set(versions)) == 3
    assert len({storage_of(trace, value) for value in versions}) == 1
    assert [trace.values[v].producer for v in versions] == [product.index, add.index, relu.index]
    assert relu.mutates == add.mutates == ("self",)
    assert dict(relu.inputs)["self"].value == versions[1]


def test_views_share_their_value() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        y = model.layer(x)
        return y.view(2, 10).t().reshape(-1)[3:] * 2

    trace = trace_of(forward, 4, 3, layer=nn.Linear(3, 5))
    (product,), (view,) = (named(trace, n) for n in ("addmm", "view"))
    transposed = named(trace, "t")[-1]
    assert view.is_view and transposed.is_view
    assert view.outputs[0].value == transposed.outputs[0].value == product.outputs[0].value
    assert view.outputs[0].shape == (2, 10) and view.flops == 0
    # The reshape of a transposed view copies, so the slice looks at another storage.
    (cut,) = named(trace, "slice")
    assert storage_of(trace, cut.outputs[0].value) != storage_of(trace, product.outputs[0].value)


def test_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    trace = trace_model(model, torch.randn(3, 4), loss=mean_square, optimizer="sgd")
    assert {p.name: p.has_gradient for p in trace.parameters} == {
        "0.weight": False,
        "0.bias": False,
        "2.weight": True,
        "2.bias": True,
    }
    assert role_bytes(trace, Role.MODEL) == 4 * (24 + 6 + 12 + 2)
    assert role_bytes(trace, Role.GRADIENT) == 4 * (12 + 2)
    assert not named(trace, "tanh")[0].differentiable
    assert not named(trace, "tanh_backward", Phase.BACKWARD)


def test_part_without_gradients() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = model.layer(x).exp()
        return model.layer(x) - target

    trace = trace_of(forward, 3, 4, layer=nn.Linear(4, 5))
    assert [op.differentiable for op in named(trace, "addmm")] == [False, True]
    (exponential,) = named(trace, "exp")
    made = trace.storages[storage_of(trace, exponential.outputs[0].value)]
    assert made.role is Role.TRANSIENT


@pytest.mark.parametrize("bidirectional", [False, True])
def test_lstm_keeps_its_workspace(bidirectional: bool) -> None:
    lstm = nn.LSTM(6, 5, num_layers=2, bidirectional=bidirectional)
    trace = trace_of(lambda m, x: m.lstm(x)[0], 7, 3, 6, lstm=lstm)
    layers = named(trace, "mkldnn_rnn_layer")
    assert len(layers) == 2 * (1 + bidirectional)
    for layer in layers:
        assert layer.module == "lstm"
        workspace = trace.storages[storage_of(trace, layer.outputs[3].value)]
        assert workspace.nbytes > 0
        assert workspace.role is Role.FORWARD_ACTIVATION
    assert len(named(trace, "mkldnn_rnn_layer_backward", Phase.BACKWARD)) == len(layers)
    assert all(p.has_gradient for p in trace.parameters)


def test_gru() -> None:
    trace = trace_of(lambda m, x: m.gru(x)[0], 7, 3, 6, gru=nn.GRU(6, 5))
    assert all(p.has_gradient for p in trace.parameters)
    assert {op.module for op in trace.forward_ops if not op.is_view} == {"gru", ""}
    # Every time step of the recurrence is there.
    assert len(named(trace, "tanh") + named(trace, "tanh_")) == 7


def test_scaled_dot_product_attention() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        q, k, v = model.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    trace = trace_of(forward, 2, 10, 16, qkv=nn.Linear(16, 48))
    (attention,) = named(trace, "_scaled_dot_product_flash_attention_for_cpu")
    # 2 products of (10 x 8) by (8 x 10) in each of 2 examples and 2 heads.
    assert attention.flops == 2 * 2 * 2 * 2 * 10 * 10 * 8
    name = "_scaled_dot_product_flash_attention_for_cpu_backward"
    (backward,) = named(trace, name, Phase.BACKWARD)
    assert backward.forward_op == attention.index
    # No matrix of all pairs is kept.
    assert all(s.nbytes <= 4 * 2 * 10 * 48 for s in trace.storages if s.birth >= 0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dropout_masks_hold_one_bit(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.25))
    trace = trace_model(model, torch.randn(3, 4), loss=mean_square, device=device)
    masks = [value for value in trace.values if value.information_bits == 1]
    kept = [v for v in masks if trace.storages[v.storage].role is Role.FORWARD_ACTIVATION]
    assert {value.numel for value in kept} == {18}
    expected = torch.float32 if device == "cpu" else torch.bool
    assert {value.dtype for value in kept} == {expected}


def test_no_mask_without_dropout() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.25)).eval()
    trace = trace_model(model, torch.randn(3, 4), loss=mean_square)
    assert not [value for value in trace.values if value.information_bits == 1]


def test_truth_values_hold_one_bit() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        y = model.layer(x)
        return y.masked_fill(y > 0, 0.0)

    trace = trace_of(forward, 3, 4, layer=nn.Linear(4, 5))
    (comparison,) = named(trace, "gt")
    value = trace.values[comparison.outputs[0].value]
    assert (value.dtype, value.information_bits, value.numel) == (torch.bool, 1, 15)
    assert trace.values[named(trace, "addmm")[0].outputs[0].value].information_bits is None


def test_embedding_bag() -> None:
    model = nn.EmbeddingBag(50, 4, mode="mean")
    trace = trace_model(model, torch.randint(50, (3, 7)), loss=mean_square)
    assert role_bytes(trace, Role.INPUT) == 8 * 21
    assert role_bytes(trace, Role.GRADIENT) == role_bytes(trace, Role.MODEL) == 4 * 200


# -- custom autograd functions ---------------------------------------------------------------------


class FrugalSwish(torch.autograd.Function):
    """Keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return gradient * gate * (1 + x * (1 - gate))


class Exponential(torch.autograd.Function):
    """Keeps its own output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y


bound_swish = FrugalSwish.apply


def test_custom_function_tells_what_it_saves() -> None:
    trace = trace_of(lambda m, x: FrugalSwish.apply(m.layer(x)), 3, 4, layer=nn.Linear(4, 5))
    (product,) = named(trace, "addmm")
    inside = [op for op in trace.forward_ops if op.function >= 0]
    assert [op.name for op in inside] == ["aten.sigmoid", "aten.mul"]
    assert len({op.function for op in inside}) == 1
    assert inside[-1].saved == (product.outputs[0].value,)
    gate = trace.storages[storage_of(trace, inside[0].outputs[0].value)]
    assert gate.role is Role.TRANSIENT
    backward = named(trace, "sigmoid", Phase.BACKWARD)
    assert len(backward) == 1


def test_custom_function_that_saves_its_output_lets_go_of_it() -> None:
    trace = trace_of(lambda m, x: Exponential.apply(m.layer(x)), 3, 4, layer=nn.Linear(4, 5))
    (exponential,) = named(trace, "exp")
    assert exponential.saved == (exponential.outputs[0].value,)
    kept = trace.storages[storage_of(trace, exponential.outputs[0].value)]
    assert kept.role is Role.FORWARD_ACTIVATION
    assert kept.death < len(trace.ops)


def test_custom_function_bound_at_import() -> None:
    trace = trace_of(lambda m, x: bound_swish(m.layer(x)), 3, 4, layer=nn.Linear(4, 5))
    hidden = [op for op in trace.forward_ops if op.name in ("aten.sigmoid", "aten.mul")]
    assert [op.function for op in hidden] == [-1, -1]
    assert all(op.differentiable for op in hidden)


# -- recomputation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_block(reentrant: bool) -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Dropout(0.5))

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(model.block, model.stem(x), use_reentrant=reentrant)

    trace = trace_of(forward, 3, 4, stem=nn.Linear(4, 4), block=block)
    check_consistent(trace)
    assert len(named(trace, "addmm")) == 3
    again = named(trace, "addmm", Phase.RECOMPUTE)
    assert [op.module for op in again] == ["block.0", "block.2"]
    (first_relu,) = named(trace, "relu")
    dropped = trace.storages[storage_of(trace, first_relu.outputs[0].value)]
    assert dropped.role is Role.TRANSIENT
    (second_relu,) = named(trace, "relu", Phase.RECOMPUTE)
    remade = trace.storages[storage_of(trace, second_relu.outputs[0].value)]
    assert remade.role is Role.FORWARD_ACTIVATION
    assert remade.birth == second_relu.index
    # Recomputation is counted apart from the backward pass: two gradients of each product but one,
    # for the input of the first layer.
    products = [op for op in trace.ops if op.phase is Phase.BACKWARD and op.name == "aten.mm"]
    assert sum(op.flops for op in products) == 5 * 2 * 3 * 4 * 4


# -- Hugging Face ----------------------------------------------------------------------------------


def test_hugging_face_model_from_a_configuration() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(64, (2, 8))
    trace = trace_model(
        model, {"input_ids": tokens, "labels": tokens}, loss=lambda m, b: m(**b).loss
    )
    check_consistent(trace)
    assert role_bytes(trace, Role.INPUT) == 2 * 8 * 8
    assert role_bytes(trace, Role.MODEL) == sum(p.nbytes for p in model.parameters())
    assert all(parameter.has_gradient for parameter in trace.parameters)
    modules = {op.module for op in trace.ops if op.phase is Phase.BACKWARD}
    assert "model.layers.1.mlp.down_proj" in modules


def test_a_matrix_in_compressed_rows_has_no_strides() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return torch.sparse.mm(torch.eye(len(x)).to_sparse_csr(), model.layer(x))

    trace = trace_of(forward, 6, 4, layer=nn.Linear(4, 4))
    assert trace.ops[-1].phase is not Phase.FORWARD
