"""Operations that CUDA runs where the CPU would run others.

A machine without CUDA cannot run fake CUDA tensors backward, but autograd and the shape functions
of CUDA's own operators are there: each function below is replaced by the operator PyTorch would
choose on the GPU, so a trace made anywhere has the saves and temporaries of a CUDA step. Two
operators of recurrent layers have no shape function; theirs are written here.

    model code          F.dropout(x)                  a call of PyTorch's function
      │ _Functions      → native_dropout(x)           what CUDA would call instead (`_REPLACED`)
    autograd            notes the node of native_dropout: it saves a mask of bytes
      │ _Shapes         results as on CUDA            layouts, statistics, sums in place
    fake tensors        shapes and storages, on the CPU

`_Functions` works above autograd, so that the right tensors are saved; `_Shapes` below it, in both
passes. `_open_functions` lets `_Functions` see the calls that PyTorch's own Python functions make
inside (`F.multi_head_attention_forward` calls `scaled_dot_product_attention`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ..torch_private.autograd import current_node, tensor_methods
from ..torch_private.dispatch import (
    OperationMode,
    function_modes,
    without_innermost_function_mode,
)
from ..torch_private.fake_tensors import DataDependentOutputException
from ..torch_private.storages import suggest_memory_format, use_count
from ..torch_private.trees import tensor_leaves
from .cuda_attention import attention
from .cudnn_rnn import MODES, recurrent_backward, recurrent_forward
from .statistics import with_wide_statistics

_aten = torch.ops.aten


def _dropout(original: Any, input: torch.Tensor, p: float, train: bool) -> Any:
    """One fused kernel with a byte mask, instead of a float mask and a product."""
    if not train or p == 0 or p == 1 or input.numel() == 0:
        return original(input, p, train)
    return torch.native_dropout(input, p, train)[0]


def _batch_norm(
    original: Any,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """cuDNN's kernels for images and sequences; vectors and bfloat16 stay with PyTorch's own."""
    running = (running_mean is not None) + (running_var is not None)
    eligible = (
        cudnn_enabled
        and weight is not None
        and bias is not None
        and input.dim() >= 3
        and input.numel() > 0
        and input.dtype is not torch.bfloat16
        and weight.dtype is not torch.bfloat16
        and (running == 2 or (running == 0 and training))
        and input.shape[0] <= (880801 if training else 65535)
    )
    if not eligible:
        return original(
            input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
        )
    return _aten.cudnn_batch_norm(
        input.contiguous() if not is_dense(input) else input,
        weight,
        bias,
        running_mean,
        running_var,
        training,
        momentum,
        eps,
    )[0]


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie beside each other, contiguous or channels-last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    other = formats.get(tensor.dim())
    return tensor.is_contiguous() or (
        other is not None and tensor.is_contiguous(memory_format=other)
    )


def lies_as(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether an offset finds the same element in both: strides of a single element tell nothing.

    The gradient of a convolution of 1 x 1 has other ones from batch to batch.
    """
    strides = zip(one.shape, one.stride(), other.stride(), strict=False)
    return one.shape == other.shape and all(size == 1 or a == b for size, a, b in strides)


# -- recurrent layers --------------------------------------------------------------------------


def _recurrent(mode: int) -> Callable[..., Any]:
    def run(original: Any, *args: Any) -> Any:
        packed = isinstance(args[1], torch.Tensor) and isinstance(args[3], (list, tuple))
        if packed:
            input, sizes, hidden, weights = args[:4]
            batch_sizes, batch_first = _lengths(sizes), False
        else:
            input, hidden, weights = args[:3]
            batch_sizes, batch_first = [], args[8]
        first = 4 if packed else 3
        has_bias, layers, dropout, train, bidirectional = args[first : first + 5]
        is_lstm = mode == MODES["lstm"]
        hx, cx = (hidden[0], hidden[1]) if is_lstm else (hidden, None)
        width = hx.shape[2] if cx is None else cx.shape[2]
        projection = hx.shape[2] if cx is not None and hx.shape[2] != width else 0
        stride = (4 if has_bias else 2) + (1 if projection else 0)
        output, hy, cy, _, _ = _aten._cudnn_rnn(
            input,
            list(weights),
            stride,
            weights[0].detach(),
            hx,
            cx,
            mode,
            width,
            projection,
            layers,
            batch_first,
            dropout if train else 0.0,
            train,
            bidirectional,
            batch_sizes,
            None,
        )
        return (output, hy, cy) if is_lstm else (output, hy)

    return run


def _lengths(sizes: torch.Tensor) -> list[int]:
    """Sequences at each time step of a packed batch; a fake tensor has no values, so one each."""
    try:
        return [int(size) for size in sizes.tolist()]
    except (RuntimeError, DataDependentOutputException):
        return [1] * int(sizes.shape[0])


_REPLACED: dict[Any, Callable[..., Any]] = {
    torch.dropout: _dropout,
    torch.batch_norm: _batch_norm,
    F.scaled_dot_product_attention: attention,
    torch.lstm: _recurrent(MODES["lstm"]),
    torch.gru: _recurrent(MODES["gru"]),
    torch.rnn_tanh: _recurrent(MODES["tanh"]),
    torch.rnn_relu: _recurrent(MODES["relu"]),
}


class _Functions(TorchFunctionMode):
    """Replace the functions whose CUDA operator differs from the CPU's."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        replacement = _REPLACED.get(func)
        if replacement is not None:
            return replacement(func, *args, **kwargs)
        return func(*args, **kwargs)


class _Shapes(OperationMode):
    """Give operators the results they have on CUDA, where fake tensors would have others."""

    def __init__(self) -> None:
        super().__init__()
        self._node_of: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        node = current_node()
        if node is None or torch.is_grad_enabled():
            return _result(func, args, kwargs)
        if func is _aten.add.Tensor and not kwargs and self._accumulates(args, node):
            func = _aten.add_.Tensor
        out = _result(func, args, kwargs)
        for leaf in tensor_leaves(out):
            self._node_of[leaf.untyped_storage()._cdata] = node._sequence_nr()
        return out

    def _accumulates(self, args: tuple[Any, ...], node: Any) -> bool:
        """Whether the engine adds a gradient to one it holds already, which it does in place.

        With fake tensors it does not. The one it holds came from another node and has no other
        user: of its storage, this call and the engine hold a reference each.
        """
        held, new = args[0], args[1]
        if not isinstance(new, torch.Tensor) or held.shape != new.shape:
            return False
        storage = held.untyped_storage()
        return (
            held.dtype == new.dtype
            and self._node_of.get(storage._cdata, node._sequence_nr()) != node._sequence_nr()
            and storage.nbytes() == held.numel() * held.element_size()
            and use_count(storage) <= _ENGINE_AND_CALL
        )


_ENGINE_AND_CALL = 2


def _result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is _aten._cudnn_rnn.default:
        return recurrent_forward(*args)
    if func is _aten._cudnn_rnn_backward.default:
        return recurrent_backward(*args)
    if func is _aten.native_dropout_backward.default:
        return torch.empty_like(args[0], memory_format=suggest_memory_format(args[0]))
    return with_wide_statistics(func, args, func(*args, **kwargs), cuda=True)


@contextmanager
def _open_functions() -> Iterator[None]:
    """Let PyTorch's Python functions run their own bodies, so that the calls inside are seen too.

    They hand themselves to an active function mode, and run unseen from there.
    """
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    plain = [
        (module, name, getattr(module, name))
        for module in (F, torch.functional, torch.autograd, tensor_methods)
        for name in names
        if hasattr(module, name)
    ]

    def outside(check: Any) -> Any:
        def ask(*args: Any) -> bool:
            with ExitStack() as without_modes:
                for _ in range(function_modes()):
                    without_modes.enter_context(without_innermost_function_mode())
                return check(*args)

        return ask

    try:
        for module, name, check in plain:
            setattr(module, name, outside(check))
        yield
    finally:
        for module, name, check in plain:
            setattr(module, name, check)


def on_cuda(tensor: torch.Tensor) -> bool:
    """Whether it lies there, or stands for one that does."""
    return tensor.is_cuda or CudaKernels.depth > 0


class CudaKernels(AbstractContextManager[None]):
    """Inside, fake CPU tensors run the operators CUDA would run."""

    depth = 0

    def __enter__(self) -> None:
        CudaKernels.depth += 1
        self._stack = ExitStack()
        self._stack.enter_context(_Shapes())
        self._stack.enter_context(_Functions())
        self._stack.enter_context(_open_functions())

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        CudaKernels.depth -= 1
