"""A trace for CUDA holds CUDA's operators, what they keep and what they do not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoestring.trace.cuda import CudaKernels
from shoestring.trace.cudnn_rnn import MODES, reserve_bytes
from shoestring.trace.graph import Phase, Role
from shoestring.trace.tracing import trace_model


def _trace(model, *inputs):
    def loss(model, batch):
        out = model(*batch)
        return (out[0] if isinstance(out, tuple) else out).square().mean()

    return trace_model(model, inputs, loss=loss, device="cuda")


def _names(trace, phase=None):
    return [op.name.removeprefix("aten.") for op in trace.ops if phase in (None, op.phase)]


def _kept(trace):
    """Bytes of every storage that forward leaves for backward."""
    return sorted(s.nbytes for s in trace.storages if s.role is Role.FORWARD_ACTIVATION)


class Attention(nn.Module):
    def __init__(self, width, heads, dtype=torch.float32, **options):
        super().__init__()
        self.project = nn.Linear(width, 3 * width, dtype=dtype)
        self.heads, self.options = heads, options

    def forward(self, x, mask=None):
        q, k, v = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)


def test_dropout_keeps_a_mask_of_one_byte_an_element():
    trace = _trace(nn.Sequential(nn.Linear(8, 100), nn.Dropout(0.5)), torch.randn(10, 8))
    assert "native_dropout" in _names(trace)
    assert "bernoulli_" not in _names(trace)
    assert 1000 in _kept(trace)


def test_dropout_inside_functions_of_pytorch_is_seen_too():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    names = _names(_trace(layer, torch.randn(2, 6, 32)))
    assert names.count("native_dropout") == 3
    assert names.count("_scaled_dot_product_efficient_attention") == 1


def test_no_dropout_in_evaluation_or_at_rate_zero():
    for model in (nn.Dropout(0.5).eval(), nn.Dropout(0.0)):
        names = _names(_trace(nn.Sequential(nn.Linear(4, 4), model), torch.randn(2, 4)))
        assert "native_dropout" not in names


def test_efficient_attention_keeps_no_matrix_of_weights():
    length, heads, width = 256, 2, 32
    trace = _trace(Attention(width, heads), torch.randn(2, length, width))
    assert "_scaled_dot_product_efficient_attention" in _names(trace, Phase.FORWARD)
    assert "_scaled_dot_product_efficient_attention_backward" in _names(trace, Phase.BACKWARD)
    # Queries, keys and values (one storage), the output, and a sum for each row.
    tensor, sums = 2 * length * width * 4, 2 * heads * length * 4
    kept = _kept(trace)
    assert [n for n in kept if n >= sums] == sorted([3 * tensor, tensor, sums])
    assert max(s.nbytes for s in trace.storages) < 2 * heads * length * length * 4


@pytest.mark.parametrize(
    ("dtype", "width", "kernel"),
    [
        (torch.float32, 32, "_scaled_dot_product_efficient_attention"),
        (torch.float16, 32, "_scaled_dot_product_cudnn_attention"),
        (torch.bfloat16, 32, "_scaled_dot_product_cudnn_attention"),
        (torch.float16, 20, "_scaled_dot_product_flash_attention"),
        (torch.float32, 18, "_safe_softmax"),
        (torch.float64, 32, "_safe_softmax"),
    ],
)
def test_which_kernel_runs(dtype, width, kernel):
    """Heads of 16 elements fit all; 10 is padded for flash; 9 fills no vector in float32."""
    x = torch.randn(2, 8, width, dtype=dtype)
    assert kernel in _names(_trace(Attention(width, 2, dtype), x))


def test_grouped_queries_in_float32_have_no_fused_kernel():
    class Grouped(Attention):
        def forward(self, x):
            q = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            k, v = q[1][:, :2], q[2][:, :2]
            return F.scaled_dot_product_attention(q[0], k, v, enable_gqa=True)

    names = _names(_trace(Grouped(64, 4), torch.randn(2, 8, 64)))
    assert "_safe_softmax" in names


def test_a_mask_whose_rows_are_not_aligned_is_padded():
    names = _names(_trace(Attention(32, 2), torch.randn(2, 10, 32), torch.zeros(1, 2, 10, 10)))
    assert "constant_pad_nd" in names
    names = _names(_trace(Attention(32, 2), torch.randn(2, 16, 32), torch.zeros(1, 2, 16, 16)))
    assert "constant_pad_nd" not in names


def test_batch_norm_is_cudnns_for_images_and_pytorchs_for_vectors():
    images = _names(_trace(nn.BatchNorm2d(4), torch.randn(2, 4, 3, 3)))
    assert "cudnn_batch_norm" in images
    assert "cudnn_batch_norm_backward" in images
    vectors = _names(_trace(nn.BatchNorm1d(4), torch.randn(8, 4)))
    assert "native_batch_norm" in vectors


@pytest.mark.parametrize(
    ("arguments", "measured"),
    [
        ((MODES["lstm"], 64, 512, 256, 2, 1, 0.5, 4), 370_147_584),
        ((MODES["gru"], 64, 2048, 256, 1, 2, 0.0, 4), 1_610_612_992),
        ((MODES["gru"], 24, 1024, 128, 1, 1, 0.0, 4), 75_497_728),
    ],
)
def test_what_a_recurrent_layer_keeps_as_measured(arguments, measured):
    assert reserve_bytes(*arguments) == measured


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [False, True])
def test_recurrent_layers_are_one_operator_each_way(kind, batch_first):
    steps, batch, width, hidden = 5, 3, 8, 16
    x = torch.randn(*((batch, steps) if batch_first else (steps, batch)), width)
    model = kind(width, hidden, num_layers=2, bidirectional=True, batch_first=batch_first)
    trace = _trace(model, x)
    assert _names(trace).count("_cudnn_rnn") == 1
    assert _names(trace).count("_cudnn_rnn_backward") == 1
    mode = MODES[{nn.LSTM: "lstm", nn.GRU: "gru", nn.RNN: "tanh"}[kind]]
    assert reserve_bytes(mode, steps, batch, hidden, 2, 2, 0.0, 4) in _kept(trace)
    (output,) = (op.outputs[0].shape for op in trace.ops if op.name == "aten._cudnn_rnn")
    assert output == (*x.shape[:2], 2 * hidden)
    assert all(p.has_gradient for p in trace.parameters)


def test_gradients_are_added_in_place():
    class Twice(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y.sin() + y.cos()

    trace = _trace(Twice(8, 64), torch.randn(16, 8))
    adds = [op for op in trace.ops if op.phase is Phase.BACKWARD and op.name == "aten.add"]
    storage = [trace.values[op.outputs[0].value].storage for op in adds]
    held = [trace.values[op.inputs[0][1].value].storage for op in adds]
    assert adds
    assert storage == held


def test_a_reduced_loss_holds_a_storage_as_large_as_its_input():
    def loss(model, batch):
        return F.mse_loss(model(batch), torch.zeros(16, 64))

    trace = trace_model(nn.Linear(8, 64), torch.randn(16, 8), loss=loss, device="cuda")
    (op,) = (op for op in trace.ops if op.name == "aten.mse_loss")
    assert op.outputs[0].shape == ()
    assert trace.storages[trace.values[op.outputs[0].value].storage].nbytes == 16 * 64 * 4


def test_checkpointed_parts_run_cudas_operators_again():
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    model = Checkpointed(nn.Linear(8, 8), nn.Dropout(0.5))
    trace = _trace(model, torch.randn(4, 8))
    assert "native_dropout" in _names(trace, Phase.RECOMPUTE)


def test_functions_are_as_before_afterwards():
    before = F.has_torch_function_unary, F.dropout
    with CudaKernels():
        pass
    assert (F.has_torch_function_unary, F.dropout) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_attention_of_fewer_key_heads_counts_its_products(dtype: torch.dtype) -> None:
    """Two products forward and five backward, keys and values read once for each query head."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=dtype))

        def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            query, key = query * self.scale, key * self.scale
            return F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)

    batch = torch.randn(2, 4, 8, 16, dtype=dtype), torch.randn(2, 2, 8, 16, dtype=dtype)
    trace = trace_model(
        Model(), batch, loss=lambda model, batch: model(*batch).float().mean(), device="cuda"
    )
    names = ("attention", "bmm", "mm")
    products = sum(op.flops for op in trace.ops if any(n in op.name for n in names))
    assert products == pytest.approx(7 * 2 * (2 * 4 * 8 * 8 * 16), rel=0.2)
