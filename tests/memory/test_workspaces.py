"""Rules for memory inside CUDA operators, against numbers measured on an H200 (torch 2.11)."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoestring.memory.cuda.calibrate import _measured, learn_convolutions
from shoestring.memory.cuda.convolutions import _channels_last, convolution, convolutions
from shoestring.memory.cuda.cudnn import (
    KINDS,
    ConvolutionShape,
    ConvolutionTable,
    RecurrentShape,
    recurrent_bytes,
)
from shoestring.memory.cuda.operands import Operands
from shoestring.memory.cuda.reductions import reduction_bytes
from shoestring.memory.cuda.workspaces import persistent, temporaries
from shoestring.memory.device import device_timeline
from shoestring.trace.graph import Role
from shoestring.trace.tracing import trace_model

TABLE = ConvolutionTable.shipped()
CUBLAS_BYTES, CUBLAS_LT_BYTES = 32 * 2**20, 2**20
DROPOUT_STATE_BYTES = 132 * 48 * 2**10


@pytest.fixture(autouse=True)
def as_pytorch_has_it(monkeypatch):
    """Training sets both, for the whole process."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE", raising=False)


def _trace(model, *inputs, optimizer=None):
    def loss(model, batch):
        out = model(*batch)
        return (out[0] if isinstance(out, tuple) else out).square().mean()

    return trace_model(model, inputs, loss=loss, optimizer=optimizer, device="cuda")


def _temporaries(trace, name):
    return [temporaries(op, TABLE) for op in trace.ops if op.name == name]


@pytest.mark.parametrize(
    ("shape", "dims", "measured"),
    [
        ((65536, 10), (0,), 20_992),
        ((65536, 1024), (0,), 138_412_544),
        ((32768, 84), (0,), 5_505_536),
        ((512, 64, 256), (0, 1), 67_109_376),
        ((131072, 1), (0,), 1024),
        ((256, 100), (0,), 0),
        ((512, 65, 192), (0,), 0),
        ((512, 64, 256), (2,), 0),
    ],
)
def test_scratch_of_sums_as_measured(shape, dims, measured):
    blocks = sum(-(-nbytes // 512) * 512 for nbytes in reduction_bytes(shape, dims))
    assert blocks == measured


def test_a_measured_convolution_is_looked_up():
    shape = ConvolutionShape(
        (100, 32, 32, 32), (32, 32, 3, 3), (1, 1), (1, 1), (1, 1), False, (0, 0)
    )
    assert shape in TABLE.shapes
    assert TABLE.nbytes(shape, "weight", torch.float32) == 229_376_000


def test_the_table_has_a_provenance_and_whole_numbers():
    assert len(TABLE.shapes) > 1000
    for shape in TABLE.shapes:
        for kind in KINDS:
            for dtype in (torch.float32, torch.float16):
                assert TABLE.nbytes(shape, kind, dtype) >= 0


def test_a_convolution_held_out_is_guessed_from_others():
    shape = ConvolutionShape(
        (64, 64, 56, 56), (64, 64, 3, 3), (1, 1), (1, 1), (1, 1), False, (0, 0)
    )
    rest = TABLE.without([shape])
    assert shape not in rest.shapes
    assert shape in TABLE.shapes
    operands = sum(shape.operand_bytes(4))
    for kind in ("input", "weight"):  # cuDNN's choice for forward changes between batch sizes
        guess, measured = (table.nbytes(shape, kind, torch.float32) for table in (rest, TABLE))
        assert abs(guess - measured) < 0.1 * operands


def test_depthwise_convolutions_of_new_sizes_need_no_workspace():
    shape = ConvolutionShape(
        (48, 160, 24, 24), (160, 1, 3, 3), (1, 1), (1, 1), (1, 1), False, (0, 0), groups=160
    )
    assert TABLE.nbytes(shape, "forward", torch.float32) == 0


def test_output_shapes():
    plain = ConvolutionShape((2, 3, 32, 32), (8, 3, 5, 5), (2, 2), (2, 2), (1, 1))
    assert plain.output == (2, 8, 16, 16)
    transposed = ConvolutionShape((2, 8, 8, 8), (8, 4, 3, 3), (2, 2), (1, 1), (1, 1), True, (1, 1))
    assert transposed.output == (2, 4, 16, 16)


def test_recurrent_workspaces_measured_and_fitted():
    shape = RecurrentShape(2, 64, 512, 256, 256, 2, 1, True, 4)
    measured = recurrent_bytes(shape, backward=False)
    assert measured == 262_131_968
    assert recurrent_bytes(shape, False, exact=False) == pytest.approx(measured, rel=0.06)


def test_gradients_of_a_convolution_take_their_workspaces_one_after_the_other():
    model = nn.Sequential(
        nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.Conv2d(32, 32, 3, padding=1)
    )
    trace = _trace(model, torch.randn(100, 32, 32, 32))
    second, first = _temporaries(trace, "aten.convolution_backward")
    assert [t.results for t in second[:2]] == [1, 2]
    assert second[1].nbytes == (229_376_000,)
    assert len(first) == 1, "the first layer's input needs no gradient"


def test_softmax_backward_multiplies_into_a_temporary():
    class Softmax(nn.Linear):
        def forward(self, x):
            return super().forward(x).softmax(-1)

    trace = _trace(Softmax(8, 16), torch.randn(32, 8))
    (found,) = _temporaries(trace, "aten._softmax_backward_data")
    assert sum(found[0].nbytes) == 32 * 16 * 4


def test_embedding_backward_sorts_only_many_indices():
    model = nn.Embedding(1000, 16)
    few = _trace(model, torch.zeros(3072, dtype=torch.long))
    many = _trace(model, torch.zeros(3073, dtype=torch.long))
    assert _temporaries(few, "aten.embedding_dense_backward") == [()]
    sorting, summing = _temporaries(many, "aten.embedding_dense_backward")[0]
    assert sum(sorting.nbytes) == 40 * 3073
    assert sum(summing.nbytes) == 24 * 3073 + 16 * 1000 + (307 + 1000) * (8 + 4 * 16)


def test_cublas_keeps_a_workspace_for_each_thread():
    trace = _trace(nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True))
    assert [p.nbytes for p in persistent(trace)] == [CUBLAS_BYTES, CUBLAS_LT_BYTES, CUBLAS_BYTES]
    assert not persistent(_trace(nn.Conv2d(3, 8, 3), torch.randn(2, 3, 8, 8)))


def test_recurrent_dropout_keeps_its_random_states():
    model = nn.LSTM(8, 16, num_layers=2, dropout=0.5)
    reasons = {p.reason: p.nbytes for p in persistent(_trace(model, torch.randn(5, 3, 8)))}
    assert DROPOUT_STATE_BYTES in reasons.values()


def test_workspaces_are_a_line_of_their_own():
    trace = _trace(nn.Linear(8, 8), torch.randn(4, 8), optimizer="adam")
    timeline = device_timeline(trace)
    at_peak = timeline.roles_at(timeline.peak_instant)
    assert at_peak[Role.WORKSPACE] == 2 * CUBLAS_BYTES + CUBLAS_LT_BYTES
    # Weight and bias, two moments each; the step counts of Adam stay on the CPU.
    assert at_peak[Role.MODEL] == 2 * 512
    assert at_peak[Role.OPTIMIZER_STATE] == 4 * 512


def test_every_block_is_a_multiple_of_512_and_nothing_is_left_over():
    trace = _trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), torch.randn(4, 3, 16, 16))
    timeline = device_timeline(trace)
    assert (timeline.bytes_by_role % 512 == 0).all()
    assert (timeline.bytes_by_role >= 0).all()


def test_a_peak_measured_on_the_device():
    """The multilayer perceptron of the benchmark at batch 65536: 1,362,897,408 bytes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from architectures import ARCHITECTURES

    mlp = ARCHITECTURES["mlp"]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, batch = mlp.build(), mlp.batch(65536)
    trace = trace_model(model, batch, loss=mlp.loss, optimizer="sgd", device="cuda")
    assert device_timeline(trace).totals.max() == pytest.approx(1_362_897_408, rel=0.001)


def test_layer_norm_copies_strided_inputs():
    class Permuted(nn.LayerNorm):
        def forward(self, x):
            return super().forward(F.relu(x).transpose(1, 2))

    trace = _trace(Permuted(16), torch.randn(4, 16, 8))
    (found,) = _temporaries(trace, "aten.native_layer_norm")
    assert found[0].nbytes == (4 * 16 * 8 * 4,)


def test_convolutions_of_a_trace_are_listed_once_for_each_operator():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Flatten()
    )
    trace = _trace(model, torch.randn(2, 3, 6, 6))
    found = list(convolutions(trace))
    assert len(found) == len(set(found)) == 2 + 3, "the image has no gradient"
    assert [kind for shape, kind, _ in found if shape.weight == (8, 3, 3, 3)] == [
        "forward",
        "weight",
    ]
    images = torch.randn(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    last = list(convolutions(_trace(model.to(memory_format=torch.channels_last), images)))
    assert len(last) == 5 and all(shape.channels_last for shape, _, _ in last)


def _convolutions_of(model, *shape, dtype=torch.float32, **layout):
    """(channels-last, bytes of copies) of each convolution forward."""
    batch = torch.randn(shape, dtype=dtype).to(**layout)
    ops = [op for op in _trace(model, batch).ops if op.name == "aten.convolution"]
    for op in ops:
        (found,) = convolution(Operands(op), TABLE)
        yield _channels_last(Operands(op)), found.nbytes[:-1]


def test_a_layout_is_that_of_either_operand():
    """As `cudnn_conv_suggest_memory_format` has it: by the strides, also of extents of one."""
    last = {"memory_format": torch.channels_last}
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)).to(**last)
    copied = 2 * 3 * 6 * 6 * 4
    assert list(_convolutions_of(model, 2, 3, 6, 6)) == [(True, (copied,)), (True, ())]
    assert list(_convolutions_of(model, 2, 3, 6, 6, **last)) == [(True, ()), (True, ())]
    one = nn.Conv2d(1, 8, 3)
    assert list(_convolutions_of(one, 2, 1, 6, 6)) == [(False, ())]
    assert list(_convolutions_of(one, 2, 1, 6, 6, **last)) == [(True, ())]
    small = nn.Conv2d(8, 4, 1).to(**last)
    assert list(_convolutions_of(small, 2, 8, 6, 6)) == [(True, (2 * 8 * 6 * 6 * 4,))]


def test_no_channels_last_in_one_dimension_nor_in_double_precision():
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Conv1d(4, 8, 3)

        def forward(self, x):
            return self.inner(x.transpose(1, 2))

    assert list(_convolutions_of(Transposed(), 2, 10, 4)) == [(False, (2 * 10 * 4 * 4,))]
    double = nn.Conv2d(3, 8, 3).double()
    found = _convolutions_of(
        double, 2, 3, 6, 6, dtype=torch.float64, memory_format=torch.channels_last
    )
    assert list(found) == [(False, (2 * 3 * 6 * 6 * 8,))]


def test_what_is_measured_here_goes_before_the_table():
    table = ConvolutionTable({})
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten())
    trace = _trace(model, torch.randn(2, 3, 6, 6))
    before = int(device_timeline(trace, table).totals.max())
    for shape, kind, dtype in convolutions(trace):
        assert table.nbytes(shape, kind, dtype) == 0 and not table.has_learned(shape, kind, dtype)
        table.learn(shape, kind, dtype, 50_000_000)
        assert table.has_learned(shape, kind, dtype)
        assert table.nbytes(shape, kind, torch.float16) == 0
    assert int(device_timeline(trace, table).totals.max()) >= before + 50_000_000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_measured_convolutions_on_cuda():
    shape = ConvolutionShape(
        (100, 32, 32, 32), (32, 32, 3, 3), (1, 1), (1, 1), (1, 1), False, (0, 0)
    )
    known = TABLE.nbytes(shape, "weight", torch.float32)
    assert _measured(shape, "weight", torch.float32) == known or "H200" not in (
        torch.cuda.get_device_name()
    )
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten())
    trace = _trace(model, torch.randn(2, 3, 6, 6))
    assert learn_convolutions(trace) == 2 and learn_convolutions(trace) == 0
