"""The type of a sparse `module.weight`: a tensor without storage that knows its uses.

Linear, convolution, embedding, matrix product and transposition go to the functions that keep
nothing dense. Any other use gets a plain differentiable dense tensor, which costs what it costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ...errors import InputError
from ...torch_private.autograd import DisableTorchFunctionSubclass
from ...torch_private.dispatch import make_wrapper_subclass
from ...torch_private.trees import tree_map
from ..metadata import LAYOUT, METADATA
from .functions import Convolution, ConvolutionSettings, Dense, Embedding, Linear
from .tensor import SparseTensor


class SparseWeight(torch.Tensor):
    """A view of a sparse tensor with its dense shape, perhaps transposed."""

    source: SparseTensor
    transposed: bool

    @staticmethod
    def __new__(cls, source: SparseTensor, transposed: bool = False) -> SparseWeight:
        shape = source.shape[::-1] if transposed else source.shape
        made = make_wrapper_subclass(
            cls,
            shape,
            dtype=source.values.dtype,
            device=source.values.device,
            requires_grad=source.values.requires_grad,
            storage_size=0,
        )
        made.source, made.transposed = source, transposed
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA or func in LAYOUT:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        route = _ROUTES.get(func)
        if route is not None:
            result = route(*args, **kwargs)
            if result is not NotImplemented:
                return result
        _refuse_writing(func, args)
        args, kwargs = tree_map(_plain, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} on a sparse weight")


def _plain(leaf: Any) -> Any:
    if not isinstance(leaf, SparseWeight):
        return leaf
    dense = Dense.apply(leaf.source.values, leaf.source)
    return dense.t() if leaf.transposed else dense


def _refuse_writing(func: Any, args: tuple[Any, ...]) -> None:
    name = getattr(func, "__name__", "")
    written = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    if (written and name not in ("__index__", "__int__", "__invert__")) or name in _WRITERS:
        if args and isinstance(args[0], SparseWeight):
            raise InputError(
                f"{args[0].source.name} is sparse: {name} would write to a copy",
                hint="change the parameter's values, or use load_dense",
            )


_WRITERS = ("__set__", "__setitem__", "__delete__")


def _dtype_for(x: torch.Tensor, weight: SparseWeight) -> torch.dtype:
    """The type autocast would run in, or the weight's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def _operands(x: Any, weight: Any, bias: Any) -> tuple[Any, Any, torch.dtype] | None:
    """Input and bias in the type of the kernel; None if the sparse one is not the weight."""
    if not isinstance(weight, SparseWeight) or isinstance(x, SparseWeight):
        return None
    dtype = _dtype_for(x, weight)
    if torch.is_autocast_enabled(x.device.type):
        x, bias = x.to(dtype), None if bias is None else _plain(bias).to(dtype)
    return x, _plain(bias), dtype


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    operands = _operands(input, weight, bias)
    if operands is None or weight.dim() != 2:
        return NotImplemented
    x, bias, dtype = operands
    return Linear.apply(x, weight.source.values, bias, weight.source, weight.transposed, dtype)


def _matmul(input: Any, other: Any) -> Any:
    if isinstance(input, SparseWeight) or not isinstance(other, SparseWeight) or other.dim() != 2:
        return NotImplemented
    return _linear(input, _transposed(other))


def _reflected_matmul(other: Any, input: Any) -> Any:
    return _matmul(input, other)


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    simple = beta == alpha == 1 and isinstance(input, torch.Tensor) and input.dim() == 1
    if not simple or isinstance(mat1, SparseWeight) or not isinstance(mat2, SparseWeight):
        return NotImplemented
    return _linear(mat1, _transposed(mat2), input)


def _transposed(weight: SparseWeight) -> Any:
    if weight.dim() != 2:
        return NotImplemented
    return SparseWeight(weight.source, not weight.transposed)


def _transpose(input: SparseWeight, dim0: int, dim1: int) -> Any:
    if input.dim() != 2:
        return NotImplemented
    return _transposed(input) if dim0 % 2 != dim1 % 2 else input


def _embedding(
    input: torch.Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if not isinstance(weight, SparseWeight) or weight.transposed or weight.dim() != 2:
        return NotImplemented
    if max_norm is not None:
        raise InputError(f"{weight.source.name}: max_norm would write to a sparse weight")
    skipped = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return Embedding.apply(input, weight.source.values, weight.source, skipped, scale_grad_by_freq)


def _each(value: Any, dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * dims if len(value) == 1 else tuple(value)


def _convolve(
    dims: int, x: Any, weight: Any, bias: Any, settings: Callable[[int], ConvolutionSettings]
) -> Any:
    operands = _operands(x, weight, bias)
    if operands is None:
        return NotImplemented
    x, bias, dtype = operands
    batched = x if x.dim() == dims + 2 else x.unsqueeze(0)
    out = Convolution.apply(
        batched, weight.source.values, bias, weight.source, settings(dims), dtype
    )
    return out if x.dim() == dims + 2 else out.squeeze(0)


def _convolution(dims: int) -> Callable[..., Any]:
    def run(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        if isinstance(padding, str) and isinstance(weight, SparseWeight):
            input, padding = _named_padding(input, weight.shape[2:], _each(dilation, dims), padding)
        return _convolve(
            dims,
            input,
            weight,
            bias,
            lambda d: ConvolutionSettings(
                _each(stride, d), _each(padding, d), _each(dilation, d), False, (0,) * d, groups
            ),
        )

    return run


def _named_padding(
    x: Any, kernel: Any, dilation: tuple[int, ...], padding: str
) -> tuple[Any, tuple[int, ...]]:
    """`valid` pads nothing; `same` pads the rest of an odd total at the end, before the kernel."""
    if padding == "valid":
        return x, (0,) * len(dilation)
    totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if any(total % 2 for total in totals):
        x = F.pad(x, [side for total in reversed(totals) for side in (0, total % 2)])
    return x, tuple(total // 2 for total in totals)


def _transposed_convolution(dims: int) -> Callable[..., Any]:
    def run(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        return _convolve(
            dims,
            input,
            weight,
            bias,
            lambda d: ConvolutionSettings(
                _each(stride, d),
                _each(padding, d),
                _each(dilation, d),
                True,
                _each(output_padding, d),
                groups,
            ),
        )

    return run


def _gradient(weight: SparseWeight) -> torch.Tensor | None:
    gradient = weight.source.values.grad
    if gradient is None:
        return None
    dense = weight.source.dense(gradient)
    return dense.t() if weight.transposed else dense


_T = torch.Tensor
_ROUTES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    torch.addmm: _addmm,
    _T.addmm: _addmm,
    torch.t: _transposed,
    _T.t: _transposed,
    _T.T.__get__: _transposed,  # type: ignore[attr-defined]
    _T.mT.__get__: _transposed,  # type: ignore[attr-defined]
    torch.transpose: _transpose,
    _T.transpose: _transpose,
    _T.__rmatmul__: _reflected_matmul,
    _T.grad.__get__: _gradient,  # type: ignore[union-attr]
    **dict.fromkeys((torch.matmul, torch.mm, _T.matmul, _T.mm, _T.__matmul__), _matmul),
    **{f: _convolution(d + 1) for d, f in enumerate((F.conv1d, F.conv2d, F.conv3d))},
    **{
        f: _transposed_convolution(d + 1)
        for d, f in enumerate((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d))
    },
}
