"""PyTorch functions that take deferred logits without computing them.

Each gets the arguments of the call, and returns NotImplemented where it does need them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...trace.fakes import readable
from .deferred import ROUTES, DeferredLogits
from .function import LossForm, row_losses

_T = torch.Tensor


def _cast(logits: DeferredLogits, dtype: torch.dtype) -> Any:
    if dtype == logits.projection.dtype:
        return logits
    if logits.projection.normalized or not dtype.is_floating_point:
        return NotImplemented
    narrower = dtype.itemsize < logits.projection.dtype.itemsize
    return NotImplemented if narrower else logits.copy_as_this(dtype=dtype)


def _to(logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs:
        return NotImplemented
    (wanted,) = args
    if isinstance(wanted, torch.dtype):
        return _cast(logits, wanted)
    here = not isinstance(wanted, Tensor) and torch.device(wanted) == logits.device
    return logits if here else NotImplemented


def _contiguous(logits: DeferredLogits, **kwargs: Any) -> Any:
    return NotImplemented if kwargs or not logits.projection.classes_last else logits


def _view(logits: DeferredLogits, *shape: Any) -> Any:
    """Where the classes stay a dimension of their own."""
    given = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    own = logits.projection
    if not own.classes_last or not all(isinstance(size, int) for size in given):
        return NotImplemented
    classes, sizes = own.weight.shape[0], list(given)
    if sizes and sizes[-1] == -1:
        known = 1
        for size in sizes[:-1]:
            known *= size
        if known * classes != logits.numel():
            return NotImplemented
        sizes[-1] = classes
    if len(sizes) < 2 or sizes[-1] != classes:
        return NotImplemented
    return logits.view_as_this(hidden=own.hidden.reshape(*sizes[:-1], own.hidden.shape[-1]))


def _flatten(logits: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    own = logits.projection
    start, end = start_dim % logits.dim(), end_dim % logits.dim()
    if not own.classes_last or end == logits.dim() - 1:
        return NotImplemented if start != end or not own.classes_last else logits
    return logits.view_as_this(hidden=own.hidden.flatten(start, end))


def _squeeze(logits: DeferredLogits, dim: Any = None) -> Any:
    own = logits.projection
    if not isinstance(dim, int) or not own.classes_last or dim % logits.dim() == logits.dim() - 1:
        return NotImplemented
    return logits.view_as_this(hidden=own.hidden.squeeze(dim % logits.dim()))


def _getitem(logits: DeferredLogits, index: Any) -> Any:
    """An index that takes all classes."""
    own, given = logits.projection, index if isinstance(index, tuple) else (index,)
    if not own.classes_last or _reaches_classes(given, logits.dim()):
        return NotImplemented
    if sum(item is Ellipsis for item in given) and given[-1] == slice(None):
        given = given[:-1] if given[-2] is Ellipsis else given
    return logits.view_as_this(hidden=own.hidden[given])


def _reaches_classes(index: tuple[Any, ...], dims: int) -> bool:
    """Whether an index chooses among the elements of the last of so many dimensions."""
    if not all(isinstance(i, (int, slice, Tensor)) or i is None or i is Ellipsis for i in index):
        return True  # lists, arrays: not looked into
    if any(isinstance(item, DeferredLogits) for item in index):
        return True
    takes = [_dims_taken(item) for item in index]
    if any(item is Ellipsis for item in index):
        last = index[-1]
        return last is not Ellipsis and not (isinstance(last, slice) and last == slice(None))
    whole = bool(index) and isinstance(index[-1], slice) and index[-1] == slice(None)
    return sum(takes) - whole > dims - 1


def _dims_taken(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1


def _transpose(logits: DeferredLogits, dim0: int, dim1: int) -> Any:
    """(N, L, C) to (N, C, L), as cross-entropy wants it."""
    dims = {dim0 % logits.dim(), dim1 % logits.dim()}
    if not logits.projection.classes_last or logits.dim() != 3 or dims != {1, 2}:
        return NotImplemented
    return logits.view_as_this(classes_last=False)


def _permute(logits: DeferredLogits, *dims: Any) -> Any:
    given = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    size = logits.dim()
    if not logits.projection.classes_last or size < 3:
        return NotImplemented
    if [d % size for d in given] != [0, size - 1, *range(1, size - 1)]:
        return NotImplemented
    return logits.view_as_this(classes_last=False)


def _times(logits: DeferredLogits, other: Any) -> Any:
    plain = isinstance(other, (int, float)) and not isinstance(other, bool) and other != 0
    if not plain or logits.projection.normalized:
        return NotImplemented
    own = logits.projection
    if own.cap is not None:
        return logits.copy_as_this(cap=own.cap * other)
    return logits.copy_as_this(scale=own.scale * other)


def _tanh(logits: DeferredLogits) -> Any:
    own = logits.projection
    capped = own.cap is not None or own.normalized
    return NotImplemented if capped else logits.copy_as_this(cap=1.0)


def _divided(logits: DeferredLogits, other: Any, **kwargs: Any) -> Any:
    if kwargs or not isinstance(other, (int, float)) or isinstance(other, bool) or other == 0:
        return NotImplemented
    return _times(logits, 1 / other)


def _plus(logits: DeferredLogits, other: Any, **kwargs: Any) -> Any:
    """One number for each class is a bias."""
    own = logits.projection
    if kwargs or not isinstance(other, Tensor) or isinstance(other, DeferredLogits):
        return NotImplemented
    fits = other.dim() and other.numel() == other.shape[-1] == own.weight.shape[0]
    if not fits or own.scale != 1 or own.cap is not None or own.normalized or not own.classes_last:
        return NotImplemented
    if other.dim() > logits.dim() or torch.promote_types(other.dtype, own.dtype) != own.dtype:
        return NotImplemented
    more = other.reshape(-1).to(own.hidden.dtype)
    return logits.copy_as_this(bias=more if own.bias is None else own.bias + more)


def _log_softmax(
    logits: DeferredLogits, dim: Any = None, _stacklevel: int = 3, dtype: Any = None
) -> Any:
    own = logits.projection
    classes = logits.dim() - 1 if own.classes_last else 1
    if not isinstance(dim, int) or dim % logits.dim() != classes or own.normalized:
        return NotImplemented
    cast = logits if dtype is None else _cast(logits, dtype)
    return cast if cast is NotImplemented else cast.copy_as_this(normalized=True)


def _nll_loss(
    logits: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    if not logits.projection.normalized:
        return NotImplemented
    return _loss(logits, target, weight, size_average, ignore_index, reduce, reduction, 0.0)


def _cross_entropy(
    logits: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if logits.projection.normalized:
        return NotImplemented
    given = size_average, ignore_index, reduce, reduction, label_smoothing
    return _loss(logits, target, weight, *given)


_NONE_IGNORED = -(2**63)


def _gather(logits: DeferredLogits, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    """One class of each row of a log-softmax, as losses written by hand take it."""
    own = logits.projection
    fits = isinstance(index, Tensor) and index.shape == (*own.hidden.shape[:-1], 1)
    if not _has_rows(logits, dim) or not fits:
        return NotImplemented
    _check_target(index, own.weight.shape[0], _NONE_IGNORED)
    return _log_p(logits, index.reshape(-1), 0.0).view(index.shape)


def _mean(logits: DeferredLogits, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """Over the classes of a log-softmax, as label smoothing takes it: a loss that is all smoothing.

    -mean_j log p_j = lse - Σ_j s_j / V.
    """
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        (dim,) = dim
    if kwargs or not _has_rows(logits, dim):
        return NotImplemented
    hidden = logits.projection.hidden
    anyone = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    made = _log_p(logits, anyone.reshape(-1), 1.0).view(anyone.shape)
    return made.unsqueeze(-1) if keepdim else made


def _sum(logits: DeferredLogits, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    made = _mean(logits, dim, keepdim, **kwargs)
    return made if made is NotImplemented else made * logits.projection.weight.shape[0]


def _has_rows(logits: DeferredLogits, dim: Any) -> bool:
    """Whether it is a log-softmax whose classes are this dimension, the last one."""
    own, last = logits.projection, logits.dim() - 1
    return own.normalized and own.classes_last and type(dim) is int and dim in (-1, last)


def _log_p(logits: DeferredLogits, target: Tensor, smoothing: float) -> Tensor:
    """Of every row the log-probability of its target, or with smoothing 1 the mean of all."""
    logits.check_unchanged()
    own = logits.projection
    own.chosen()
    form = LossForm(_NONE_IGNORED, smoothing, own.scale, own.cap, own.columns)
    with torch.autocast(own.hidden.device.type, enabled=False):
        rows = own.hidden.flatten(0, -2)
        return -row_losses(rows, own.weight, own.bias, target, None, form).to(own.dtype)


def _loss(
    logits: DeferredLogits,
    target: Tensor,
    weight: Tensor | None,
    size_average: Any,
    ignored: int,
    reduce: Any,
    reduction: str,
    smoothing: float,
) -> Any:
    own, dims = logits.projection, logits.dim()
    where = own.shape if dims < 2 else (own.shape[0], *own.shape[2:])
    known = (
        size_average is None
        and reduce is None
        and reduction in ("none", "mean", "sum")
        and isinstance(target, Tensor)
        and target.dtype is torch.int64  # else of probabilities, or refused by PyTorch
        and tuple(target.shape) == where
        and (dims == 2 or (dims > 2 and not own.classes_last))
        and (weight is None or (weight.shape == own.weight.shape[:1] and not weight.requires_grad))
    )
    if not known:
        return NotImplemented
    logits.check_unchanged()
    _check_target(target, own.weight.shape[0], ignored)
    own.chosen()
    form = LossForm(ignored, smoothing, own.scale, own.cap, own.columns)
    # (N, C, L) holds rows of (N, L); hidden states were never moved.
    rows, wanted = own.hidden.flatten(0, -2), target.reshape(-1)
    with torch.autocast(rows.device.type, enabled=False):
        each = row_losses(rows, own.weight, own.bias, wanted, weight, form)
        if reduction == "none":
            return each.view(target.shape).to(own.dtype)
        total = each.sum()
        if reduction == "mean":
            total = total / _units(wanted, weight, ignored, each)
    return total.to(_loss_type(own.dtype, rows.device.type))


def _units(target: Tensor, weight: Tensor | None, ignored: int, each: Tensor) -> Tensor:
    """The divisor of a mean: tokens, or their weights."""
    kept = target != ignored
    if weight is None:
        return kept.sum()
    own = weight.to(each.dtype)[target.clamp(0, weight.shape[0] - 1)]
    return torch.where(kept, own, 0.0).sum()


def _loss_type(dtype: torch.dtype, device: str) -> torch.dtype:
    """Autocast takes losses in FP32."""
    return torch.float32 if torch.is_autocast_enabled(device) else dtype


def _check_target(target: Tensor, classes: int, ignored: int) -> None:
    """As PyTorch refuses it; on CUDA, where no value is read, the loss is NaN."""
    if not readable(target) or not target.numel():
        return
    wrong = ((target < 0) | (target >= classes)) & (target != ignored)
    if bool(wrong.any()):
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")


def _register_hook(logits: DeferredLogits, hook: Any) -> Any:
    """FSDP's hook wants to know when backward begins, not the gradient of the logits."""
    owner, hidden = type(getattr(hook, "__self__", None)), logits.projection.hidden
    if not owner.__module__.startswith("torch.distributed.fsdp") or not hidden.requires_grad:
        return NotImplemented
    return hidden.register_hook(hook)


ROUTES.update(
    {
        F.cross_entropy: _cross_entropy,
        F.nll_loss: _nll_loss,
        **dict.fromkeys((F.log_softmax, torch.log_softmax, _T.log_softmax), _log_softmax),
        **dict.fromkeys((_T.gather, torch.gather), _gather),
        **dict.fromkeys((_T.mean, torch.mean), _mean),
        **dict.fromkeys((_T.sum, torch.sum), _sum),
        _T.float: lambda logits: _cast(logits, torch.float32),
        _T.double: lambda logits: _cast(logits, torch.float64),
        _T.to: _to,
        _T.register_hook: _register_hook,
        _T.contiguous: _contiguous,
        **dict.fromkeys((_T.view, _T.reshape, torch.reshape), _view),
        **dict.fromkeys((_T.flatten, torch.flatten), _flatten),
        **dict.fromkeys((_T.squeeze, torch.squeeze), _squeeze),
        _T.__getitem__: _getitem,
        **dict.fromkeys((_T.transpose, torch.transpose, _T.swapaxes), _transpose),
        _T.mT.__get__: lambda logits: _transpose(logits, -1, -2),  # type: ignore[attr-defined]
        **dict.fromkeys((_T.permute, torch.permute), _permute),
        **dict.fromkeys((_T.mul, torch.mul, _T.__mul__, _T.__rmul__), _times),
        **dict.fromkeys((_T.div, torch.div, _T.__truediv__), _divided),
        **dict.fromkeys((_T.tanh, torch.tanh), _tanh),
        **dict.fromkeys((_T.add, torch.add, _T.__add__, _T.__radd__), _plus),
    }
)
