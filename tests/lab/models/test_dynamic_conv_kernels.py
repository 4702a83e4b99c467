"""The dynamic convolution in Triton against the plain one, in the interpreter and on a GPU."""

from collections.abc import Iterable
from itertools import product

import pytest
import torch
from torch import Tensor

from interpreter import run_interpreted
from shoestring.lab.models.dynamic_conv_function import DynamicConv

# (batch, time, channels, heads, taps, left): lengths under, at and over a tile, sentences shorter
# than the kernel, channels that are no power of two, causal and centered.
SMALL = [
    (2, 5, 24, 2, 3, 1), (1, 17, 64, 1, 7, 6), (1, 4, 12, 2, 31, 15), (1, 1, 8, 2, 3, 2),
    (1, 9, 96, 1, 3, 0),
]  # fmt: skip
LARGE = [
    (batch, time, width, 4, taps, left)
    for (batch, time), width, taps in product(
        [(500, 8), (160, 25), (16, 250), (1, 250)], (512, 256), (3, 7, 15, 31)
    )
    for left in (taps - 1, taps // 2)
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def drawn(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Input, taps that sum to one, and the gradient of the output."""
    batch, time, channels, heads, taps, _ = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    x = torch.randn(batch, time, channels, generator=generator)
    weights = torch.randn(batch, time, heads, taps, generator=generator).softmax(-1)
    grad = torch.randn(batch, time, channels, generator=generator)
    return tuple(made.to(dtype).to(device) for made in (x, weights, grad))


def plain(x: Tensor, weights: Tensor, grad: Tensor, left: int) -> tuple[Tensor, ...]:
    """Output and gradients of the plain path, in FP64."""
    x, weights, grad = (v.detach().double().requires_grad_() for v in (x, weights, grad))
    y = DynamicConv.apply(x, weights, left)
    return y, *torch.autograd.grad(y, (x, weights), grad)


def close(actual: Tensor | None, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual is not None and actual.dtype == dtype
    limit = TOLERANCE[dtype] * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=limit)


def compare(
    device: str, cases: list[tuple[int, ...]], kinds: Iterable[torch.dtype] = TOLERANCE
) -> None:
    """Output and both gradients of the kernels, in every type."""
    from shoestring.kernels import dynamic_conv as kernels

    for sizes, dtype in product(cases, kinds):
        x, weights, grad = drawn(sizes, dtype, device)
        y, grad_x, grad_weights = plain(x, weights, grad, sizes[-1])
        close(kernels.convolve(x, weights, sizes[-1]), y, dtype)
        found = kernels.gradients(x, weights, grad, sizes[-1])
        close(found[0], grad_x, dtype)
        close(found[1], grad_weights, dtype)


def one_gradient_alone(device: str) -> None:
    """Each gradient without the other has the same bits; views are read right."""
    from shoestring.kernels import dynamic_conv as kernels

    x, weights, grad = drawn(SMALL[0], torch.float32, device)
    both = kernels.gradients(x, weights, grad, 1)
    turned = (v.transpose(0, 1).contiguous().transpose(0, 1) for v in (x, weights, grad))
    only_x = kernels.gradients(*turned, 1, for_weights=False)
    only_weights = kernels.gradients(x, weights, grad, 1, for_x=False)
    assert both[0] is not None and both[1] is not None
    assert only_x[1] is None and only_weights[0] is None
    assert only_x[0] is not None and torch.equal(only_x[0], both[0])
    assert only_weights[1] is not None and torch.equal(only_weights[1], both[1])


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_interpreted(__file__, "compare('cpu', SMALL)", "one_gradient_alone('cpu')")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu() -> None:
    compare("cuda", [*SMALL, *LARGE])
    one_gradient_alone("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_function_takes_the_kernels_and_no_more_memory(dtype: torch.dtype) -> None:
    """Beside the result and what is kept, forward and backward allocate the gradients alone."""
    sizes = (160, 25, 512, 4, 31, 15)
    x, weights, grad = drawn(sizes, dtype, "cuda")
    x.requires_grad_()
    weights.requires_grad_()
    DynamicConv.apply(x, weights, 15).backward(grad)
    x.grad = weights.grad = None
    torch.cuda.reset_peak_memory_stats()  # requested: a block that is found may be larger
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    y = DynamicConv.apply(x, weights, 15)
    y.backward(grad)
    needed = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    counted = sum(v.nbytes for v in (y, x, weights))
    assert needed <= 1.01 * counted
    expected = plain(x, weights, grad, 15)
    for actual, wanted in zip((y, x.grad, weights.grad), expected, strict=True):
        close(actual, wanted, dtype)
