"""Dynamic convolution as an autograd function: plain PyTorch here, Triton on CUDA.

Neither makes the unfolded copy of the input, `taps` times its size, that the usual form keeps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...kernels import has_triton
from ...torch_private.fake_tensors import FakeTensor
from ...trace.passes import passes

KERNEL_TYPES = (torch.float16, torch.bfloat16, torch.float32)
SUM_BYTES, PARTS = 2**16, 16
"""FP32 sums of 16-bit values are twice the size of the result: no more than so much of it is made
at a time, but in no more than so many parts, since each costs the calls of all taps."""
TILE_TIMES = 32
"""Positions whose products with all they reach are made at once, for the gradient of the taps."""


class DynamicConv(torch.autograd.Function):
    """Dynamic convolution that keeps its two arguments for backward and no unfolded copy.

    y[b, t, c] = sum_k w[b, t, h(c), k] x[b, t + k - left, c], with zeros outside the sentence and
    h(c) = floor(c heads / channels) (Wu et al., 2019, section 4). Shapes: x is (batch,
    time, channels) and w (batch, time, heads, taps). Half-precision sums are accumulated in FP32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, left: int) -> Tensor:
        """Sum the shifted products one tap at a time."""
        ctx.save_for_backward(x, weights)
        ctx.left = left
        if _has_kernel(x, weights):
            from ...kernels import dynamic_conv as kernels

            return kernels.convolve(x, weights, left)
        return _sum_taps(x, weights, left)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Gradients of x, a convolution the other way round, and of w, sums over the channels."""
        x, weights = ctx.saved_tensors
        for_x, for_weights = ctx.needs_input_grad[:2]
        if _has_kernel(x, weights):
            from ...kernels import dynamic_conv as kernels

            return *kernels.gradients(x, weights, grad_output, ctx.left, for_x, for_weights), None
        grad_weights = _weight_gradient(x, weights, grad_output, ctx.left) if for_weights else None
        grad_x = _sum_taps(grad_output, weights, ctx.left, back=True) if for_x else None
        return grad_x, grad_weights, None


def _sum_taps(values: Tensor, weights: Tensor, left: int, back: bool = False) -> Tensor:
    """The convolution, or the way back: every output's gradient to where its taps read."""
    time, heads, taps = weights.shape[1:]
    by_head = values.unflatten(2, (heads, -1))
    made = torch.zeros_like(by_head, memory_format=torch.contiguous_format)
    dtype = torch.promote_types(values.dtype, torch.float32)
    in_place = dtype == values.dtype
    parts = 1 if in_place else min(-(-made.numel() * dtype.itemsize // SUM_BYTES), PARTS)
    step = -(-time // max(parts, 1))
    for start in passes(range(0, time, step)):
        part = made[:, start : start + step]
        total = part if in_place else torch.zeros_like(part, dtype=dtype)
        for k in passes(range(taps)):
            shift = left - k if back else k - left  # from where it goes to where it is read
            low, high = max(start, -shift), min(start + part.shape[1], time - shift)
            if low < high:
                source = slice(low + shift, high + shift)
                tap = weights[:, source if back else slice(low, high), :, k, None]
                total[:, low - start : high - start].addcmul_(by_head[:, source], tap)
        if not in_place:
            part.copy_(total)
        del total
    return made.flatten(2)


def _weight_gradient(x: Tensor, weights: Tensor, grad_output: Tensor, left: int) -> Tensor:
    """Scalar products of output gradients and inputs, as bands of small matrix products.

    A product for every tap would need a temporary of the size of x, and takes three times as long.
    """
    (batch, time, heads, taps), each = weights.shape, x.shape[2] // weights.shape[2]
    made = torch.empty_like(weights, memory_format=torch.contiguous_format)
    for start in passes(range(0, time, TILE_TIMES)):
        rows = min(TILE_TIMES, time - start)
        first = start - left  # the input that tap 0 of the first row reads
        low, high = max(0, first), min(time, first + rows + taps - 1)
        for head in passes(range(heads)):
            part = slice(head * each, (head + 1) * each)
            band = x.new_zeros(batch, rows, rows + taps - 1)
            if low < high:
                grads, inputs = grad_output[:, start : start + rows, part], x[:, low:high, part]
                torch.bmm(grads, inputs.transpose(1, 2), out=band[:, :, low - first : high - first])
            # Row i holds the products with inputs i … i + taps - 1 of the band.
            steps = rows * (rows + taps - 1), rows + taps, 1
            made[:, start : start + rows, head] = band.as_strided((batch, rows, taps), steps)
            del band
    return made


def _has_kernel(x: Tensor, weights: Tensor) -> bool:
    return (
        x.is_cuda
        and x.dtype in KERNEL_TYPES
        and weights.dtype in KERNEL_TYPES
        and x.numel() > 0
        and not isinstance(x, FakeTensor)
        and has_triton()
    )
