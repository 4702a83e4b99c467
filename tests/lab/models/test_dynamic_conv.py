"""The DC-Transformer: the dynamic convolution, the whole model, its loss and its names."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import shoestring as ss
from reference.dynamic_conv_loop import convolution_block, dynamic_conv
from shoestring.errors import InputError
from shoestring.lab.models import builtin
from shoestring.lab.models.dynamic_conv import (
    DECODER_KERNELS,
    ENCODER_KERNELS,
    PADDING,
    ConvolutionBlock,
    DCTransformer,
    DynamicConv,
    TransformerConfig,
    dc_transformer,
    label_smoothed_loss,
    layer_kernels,
    sinusoidal_positions,
)
from shoestring.trace.blocks import block_paths

PARAMETERS = {
    "dc-transformer": 38_685_184,
    "dc-transformer-decoder-3": 30_746_624,
    "dc-transformer-decoder-1": 25_361_408,
    "dc-transformer-width-384": 24_000_384,
    "dc-transformer-width-256": 12_657_920,
    "dc-transformer-width-192": 8_240_064,
    "dc-transformer-width-128": 4_657_792,
}

# Of outputs and gradients against the FP64 loop: one rounding of the inputs and one of the result.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


def counted(width: int, decoder_kernels: tuple[int, ...]) -> int:
    """The parameters layer by layer, by hand, with four heads and a feed-forward of 2 width."""
    square, norm = width * width + width, 2 * width
    feed_forward = width * 2 * width + 2 * width + 2 * width * width + width
    common = 2 * square + feed_forward + 2 * norm
    encoder = sum(common + 4 * k * width for k in ENCODER_KERNELS)
    decoder = sum(common + 4 * k * width + 4 * square + norm for k in decoder_kernels)
    return (8848 + 6632 + 6632) * width + encoder + decoder


def tiny(**sizes: float) -> DCTransformer:
    """A model of a few thousand parameters, without dropout unless asked for."""
    torch.manual_seed(0)
    rates = {"dropout": 0.0, "attention_dropout": 0.0, "weight_dropout": 0.0}
    settings = {"source_vocabulary": 20, "target_vocabulary": 24} | rates | sizes
    return dc_transformer(width=16, encoder_layers=2, decoder_layers=2, **settings)  # type: ignore[arg-type]


def operands(time: int, taps: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """An input of 6 channels and weights of 2 heads that sum to one."""
    generator = torch.Generator().manual_seed(time * 100 + taps)
    x = torch.randn(2, time, 6, dtype=torch.float64, generator=generator)
    weights = torch.randn(2, time, 2, taps, dtype=torch.float64, generator=generator).softmax(-1)
    return x.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("time", "taps", "left"), [(7, 3, 1), (7, 3, 2), (3, 9, 4), (3, 9, 8)])
def test_dynamic_conv_agrees_with_the_loop(
    time: int, taps: int, left: int, dtype: torch.dtype
) -> None:
    x, weights = operands(time, taps, dtype)
    y = DynamicConv.apply(x, weights, left)
    direction = torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)
    actual = (y, *torch.autograd.grad(y, (x, weights), direction))

    x64, weights64 = (v.detach().double().requires_grad_() for v in (x, weights))
    y64 = dynamic_conv(x64, weights64, left)
    expected = (y64, *torch.autograd.grad(y64, (x64, weights64), direction.double()))
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.dtype == dtype
        limit = TOLERANCE[dtype]
        torch.testing.assert_close(mine.double(), theirs, rtol=limit, atol=limit)


@settings(max_examples=25, deadline=None)
@given(time=st.integers(1, 6), taps=st.integers(1, 8), data=st.data())
def test_dynamic_conv_at_any_length_and_shift(time: int, taps: int, data: st.DataObject) -> None:
    left = data.draw(st.integers(0, taps - 1))
    x, weights = operands(time, taps)
    with torch.no_grad():
        y = DynamicConv.apply(x, weights, left)
        torch.testing.assert_close(y, dynamic_conv(x, weights, left), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("time", "taps", "left"), [(5, 3, 1), (5, 3, 2), (2, 7, 3), (2, 7, 6)])
def test_dynamic_conv_gradcheck(time: int, taps: int, left: int) -> None:
    x, weights = operands(time, taps)
    assert torch.autograd.gradcheck(lambda a, b: DynamicConv.apply(a, b, left), (x, weights))
    transposed = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: DynamicConv.apply(a, weights, left), (transposed,))


def test_dynamic_conv_is_differentiable_once() -> None:
    x, weights = operands(4, 3)
    y = DynamicConv.apply(x, weights, 1)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_dynamic_conv_keeps_its_arguments_and_nothing_else() -> None:
    x, weights = operands(50, 31)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        DynamicConv.apply(x, weights, 15)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr(), weights.data_ptr()]


@pytest.mark.parametrize(
    ("causal", "dtype"), [(True, torch.float32), (False, torch.float32), (False, torch.bfloat16)]
)
def test_convolution_block_takes_what_is_counted(causal: bool, dtype: torch.dtype) -> None:
    """Beside weights, 1.1 of the fundamental count: a dropout's mask is full numbers here."""
    block = ConvolutionBlock(TransformerConfig(), 31, causal).to(dtype)
    x = torch.randn(20, 25, 512).to(dtype)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum()

    counted = ss.profile(block, x, loss=loss).activation_bytes
    measured = ss.measure(block, x, loss=loss, warmup_steps=1)
    weights_bytes = measured.bytes_by_role["model"] + measured.bytes_by_role["gradient"]
    assert counted > 4 * x.nbytes
    assert measured.peak_bytes - weights_bytes <= 1.1 * counted


@pytest.mark.parametrize("causal", [True, False])
def test_convolution_block_agrees_with_the_loop(causal: bool) -> None:
    torch.manual_seed(0)
    block = ConvolutionBlock(TransformerConfig(width=8, heads=2), 5, causal).double().eval()
    x, lengths = torch.randn(2, 4, 8, dtype=torch.float64), [4, 2]
    padding = torch.arange(4) >= torch.tensor(lengths)[:, None]
    with torch.no_grad():
        expected = convolution_block(x, block.state_dict(), 2, causal, lengths)
        torch.testing.assert_close(block(x, padding), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts(name: str) -> None:
    with torch.device("meta"):
        model = builtin(name).build()
    assert isinstance(model, DCTransformer)
    config = model.config
    kernels = layer_kernels(DECODER_KERNELS, config.decoder_layers)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    assert PARAMETERS[name] == counted(config.width, kernels)
    assert not list(model.buffers())


def test_base_model_is_the_reports() -> None:
    with torch.device("meta"):
        model = dc_transformer()
    assert round(PARAMETERS["dc-transformer"] / 1e6, 1) == 38.7
    assert isinstance(model.encoder.layers, nn.ModuleList)
    assert isinstance(model.decoder.layers, nn.ModuleList)
    assert (len(model.encoder.layers), len(model.decoder.layers)) == (7, 6)
    blocks = block_paths(model)  # what is recomputed as one: a residual connection, as counted
    assert len(blocks) == 7 * 2 + 6 * 3
    assert blocks[0] == "encoder.layers.0.0" and blocks[-1] == "decoder.layers.5.2"
    sparse = [m.weight for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    assert sum(w.numel() for w in sparse) > 0.98 * PARAMETERS["dc-transformer"]


def test_shallow_stacks_keep_the_widest_kernels() -> None:
    assert layer_kernels(DECODER_KERNELS, 6) == DECODER_KERNELS
    assert layer_kernels(DECODER_KERNELS, 3) == (31, 31, 31)
    assert layer_kernels(DECODER_KERNELS, 1) == (31,)
    assert layer_kernels(DECODER_KERNELS, 8) == (3, 7, 15, 31, 31, 31, 31, 31)


def test_positions() -> None:
    positions = sinusoidal_positions(5, 8, torch.device("cpu"))
    assert positions.shape == (5, 8)
    for t, i in ((0, 0), (3, 0), (4, 2)):
        angle = t / 10000 ** (2 * i / 8)
        assert positions[t, i].item() == pytest.approx(math.sin(angle), abs=1e-6)
        assert positions[t, 4 + i].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_decoder_is_causal() -> None:
    model = tiny().double()
    source, target = torch.randint(4, 20, (2, 6)), torch.randint(4, 24, (2, 40))
    changed = target.clone()
    changed[:, 20:] = (changed[:, 20:] - 4 + 1) % 20 + 4
    with torch.no_grad():
        before, after = model(source, target), model(source, changed)
    assert before.shape == (2, 40, 24)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.isclose(before[:, 20], after[:, 20]).all()


def test_decoder_reads_the_source() -> None:
    model = tiny().double()
    target = torch.randint(4, 24, (1, 5))
    with torch.no_grad():
        one, other = (model(torch.full((1, 5), token), target) for token in (5, 6))
    assert not torch.isclose(one, other).all()


def test_padding_changes_nothing() -> None:
    model = tiny().double()
    source, target = torch.randint(4, 20, (2, 6)), torch.randint(4, 24, (2, 5))
    longer = F.pad(source, (0, 7), value=PADDING)
    target_longer = F.pad(target, (0, 3), value=PADDING)
    with torch.no_grad():
        expected, padded = model(source, target), model(longer, target_longer)
    torch.testing.assert_close(padded[:, :5], expected, rtol=1e-12, atol=1e-12)
    losses = [
        label_smoothed_loss(expected, target),
        label_smoothed_loss(padded, target_longer),
    ]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)


def test_a_sentence_of_padding_alone_stays_finite() -> None:
    model = tiny()
    source = torch.full((1, 4), PADDING)
    loss = label_smoothed_loss(model(source, source), source)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_agrees_with_cross_entropy(smoothing: float) -> None:
    logits = torch.randn(2, 5, 9, dtype=torch.float64)
    target = torch.randint(2, 9, (2, 5))
    target[1, 3:] = PADDING
    expected = F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=PADDING, label_smoothing=smoothing
    )
    torch.testing.assert_close(label_smoothed_loss(logits, target, smoothing), expected)


def test_loss_of_half_precision_logits_is_summed_in_fp32() -> None:
    logits, target = torch.randn(2, 5, 9).half(), torch.randint(2, 9, (2, 5))
    loss = label_smoothed_loss(logits, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, label_smoothed_loss(logits.float(), target))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_model_has_half_precision_gradients(dtype: torch.dtype) -> None:
    model = tiny().to(dtype)
    tokens = torch.randint(4, 20, (2, 6))
    label_smoothed_loss(model(tokens, tokens), tokens).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.dtype == dtype
        assert parameter.grad.isfinite().all()


def test_a_few_steps_reduce_the_loss() -> None:
    model = tiny(dropout=0.1, weight_dropout=0.1)
    tokens = torch.randint(4, 20, (4, 7))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.98))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = label_smoothed_loss(model(tokens, tokens), tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("tokens", [4000, 250])
def test_a_step_on_fake_tensors(tokens: int) -> None:
    entry = builtin("dc-transformer")
    with FakeTensorMode():
        model, batch = entry.build(), entry.batch(tokens)
        loss = entry.loss(model, batch)
        loss.backward()
        assert isinstance(loss, FakeTensor)
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize(
    ("tokens", "shape"),
    [(4000, (160, 25)), (275, (11, 25)), (250, (1, 250)), (25, (1, 25)), (301, (1, 301))],
)
def test_registry_entry(tokens: int, shape: tuple[int, int]) -> None:
    entry = builtin("dc-transformer-width-256")
    assert (entry.default_batch, entry.batch_unit) == (4000, "tokens")
    assert entry.default_optimizer == "adam"
    batch = entry.batch(tokens)
    assert set(batch) == {"source", "target_in", "target_out"}
    for tensor in batch.values():
        assert tensor.shape == shape and tensor.dtype == torch.int64
        assert not (tensor == PADDING).any()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dc-transformer-width-255", "try 256"),
        ("dc-transformer-width-0", "1 or more"),
        ("dc-transformer-decoder-0", "1 or more"),
        ("dc-transformer-decoder", "dc-transformer-decoder-3"),
        ("dctransformer", "dc-transformer"),
    ],
)
def test_bad_names_say_the_way_out(name: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        builtin(name)
    assert hint in str(caught.value.hint)


def test_bad_batch() -> None:
    with pytest.raises(InputError, match="0 tokens"):
        builtin("dc-transformer").batch(0)
