"""Linear, convolution and embedding on a sparse weight: dense only while a kernel runs.

Each function saves the other operand and the values, never the dense weight. It scatters in
forward, scatters again in backward for the gradient of the input, and gathers the dense gradient
of the weight before it returns. What it saves is packed before it runs, as PyTorch's own functions
do it, so recomputation that needs no more than that ends before the scatter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from ...torch_private.autograd import active_saved_tensors_hooks
from .tensor import SparseTensor

Gradient = torch.Tensor | None


class ConvolutionSettings(NamedTuple):
    """Arguments of a convolution, in the order of `torch.convolution`."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


def _keep(ctx: Any, weight: SparseTensor, dtype: torch.dtype, *tensors: torch.Tensor) -> None:
    ctx.weight, ctx.dtype, ctx.version = weight, dtype, weight.version
    ctx.save_for_backward(*tensors)


def _unchanged(ctx: Any) -> SparseTensor:
    weight: SparseTensor = ctx.weight
    if ctx.version != weight.version:
        raise RuntimeError(f"{weight.name} was rewired between forward and backward")
    return weight


def _gathered(weight: SparseTensor, gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return weight.gather(gradient).to(like.dtype)


class _PackedFirst(torch.autograd.Function):
    """A function that gives what it saves to the saved-tensor hooks in force before it runs.

    PyTorch packs what a Python function saves once its forward is over. A region that is recomputed
    ends at the last tensor it packs, so it would make the dense weight and the product for nothing.
    """

    saved = 2
    """How many of the first arguments forward saves, in their order, and nothing else."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Pack, then run with the packed objects in the place of the tensors."""
        hooks = active_saved_tensors_hooks()
        in_graph = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        if hooks is None or not in_graph or not torch.is_grad_enabled():
            return super().apply(*args)
        pack, unpack = hooks
        with torch.no_grad():
            packed = [pack(tensor.detach()) for tensor in args[: cls.saved]]
        packed.reverse()
        with saved_tensors_hooks(lambda _: packed.pop(), unpack):
            return super().apply(*args)


class Linear(_PackedFirst):
    """x Wᵀ + b; with `transposed` the sparse tensor is Wᵀ."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor | None,
        weight: SparseTensor,
        transposed: bool,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Scatter, multiply, drop."""
        _keep(ctx, weight, dtype, x, values)
        ctx.transposed = transposed
        dense = weight.dense(values, dtype)
        return F.linear(x, dense.t() if transposed else dense, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Gradient, ...]:
        """Input by the weight recomputed, values by gathering, bias by adding."""
        weight = _unchanged(ctx)
        x, values = ctx.saved_tensors
        grad_x = grad_values = grad_bias = None
        if ctx.needs_input_grad[0]:
            dense = weight.dense(values, ctx.dtype)
            grad_x = grad @ (dense.t() if ctx.transposed else dense)
            del dense
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            inputs = x.reshape(-1, x.shape[-1])
            product = inputs.t() @ rows if ctx.transposed else rows.t() @ inputs
            grad_values = _gathered(weight, product, values)
            del product
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_values, grad_bias, None, None, None


class Convolution(_PackedFirst):
    """A convolution of 1 to 3 dimensions, transposed or not, in groups or not."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor | None,
        weight: SparseTensor,
        settings: ConvolutionSettings,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Scatter, convolve, drop."""
        _keep(ctx, weight, dtype, x, values)
        ctx.settings = settings
        return torch.convolution(x, weight.dense(values, dtype, x), bias, *settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Gradient, ...]:
        """Two calls: weight and gradient are never dense together, nor both gradients' operands.

        The gradient of the weight comes first, since only it reads the input, which may be gone
        after it. Of its other operand each call reads the shape, and of the input the layout too.
        """
        weight, settings = _unchanged(ctx), ctx.settings
        x, values = ctx.saved_tensors
        need_x, need_values, need_bias = ctx.needs_input_grad[:3]
        grad_x = grad_values = grad_bias = None
        run = torch.ops.aten.convolution_backward
        if need_values or need_bias:
            sizes = (grad.shape[1],) if need_bias else None
            masks = (False, need_values, need_bias)
            stand_in = values.new_empty((), dtype=ctx.dtype).expand(weight.shape)
            _, product, grad_bias = run(grad, x, stand_in, sizes, *settings, masks)
            grad_values = _gathered(weight, product, values) if need_values else None
            del product
        if need_x:
            dense = weight.dense(values, ctx.dtype, x)
            if grad.shape == x.shape and grad.stride() == x.stride():
                x = grad
            grad_x = run(grad, x, dense, None, *settings, (True, False, False))[0]
        return grad_x, grad_values, grad_bias, None, None, None


class Embedding(_PackedFirst):
    """Rows of the weight."""

    saved = 1

    @staticmethod
    def forward(
        ctx: Any,
        ids: torch.Tensor,
        values: torch.Tensor,
        weight: SparseTensor,
        padding_idx: int,
        scale_by_frequency: bool,
    ) -> torch.Tensor:
        """Scatter, look up, drop."""
        _keep(ctx, weight, values.dtype, ids)
        ctx.settings = (weight.shape[0], padding_idx, scale_by_frequency)
        return torch.embedding(weight.dense(values), ids, padding_idx, scale_by_frequency, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Gradient, ...]:
        """The rows added up, then gathered."""
        weight = _unchanged(ctx)
        (ids,) = ctx.saved_tensors
        product = torch.ops.aten.embedding_dense_backward(grad, ids, *ctx.settings)
        return None, weight.gather(product), None, None, None


class Dense(torch.autograd.Function):
    """The plain dense tensor, for every other use: whoever reads it may keep it for backward."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: SparseTensor) -> torch.Tensor:
        """Scatter."""
        ctx.weight, ctx.version = weight, weight.version
        return weight.dense(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Gradient, ...]:
        """Gather."""
        return _unchanged(ctx).gather(grad), None
