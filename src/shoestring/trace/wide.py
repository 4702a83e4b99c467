"""A training step in FP64: the copy of a model, and the mode in which all of a step stays FP64.

Differences that are left between two such steps are not rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..torch_private.dispatch import OperationMode
from ..torch_private.trees import tensor_leaves, tree_map
from .attributes import copied_model
from .batches import map_tensors

_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """In FP64, if it holds real numbers; else as it is."""
    kind = _WIDER.get(tensor.dtype)
    return tensor if kind is None else tensor.detach().to(kind).requires_grad_(tensor.requires_grad)


def wide_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy in FP64, with tensors that are plain attributes of modules."""
    made = copied_model(model, memo)
    for module in made.modules():
        for name, held in vars(module).items():
            if isinstance(held, torch.Tensor):
                vars(module)[name] = widened(held)
    return made.double()


def wide_batch(batch: Any) -> Any:
    """The batch in FP64."""
    return map_tensors(widened, batch)


class Wide(OperationMode):
    """Types that a model asks for become FP64, and so do tensors that others hold."""

    narrowed: str | None = None
    """An operation without FP64 that ran in FP32, if there was one."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _WIDER:
            kwargs["dtype"] = _WIDER[kwargs["dtype"]]
        if func._schema.is_mutable or func.is_view:
            return func(*args, **kwargs)
        if any(tensor.dtype in _WIDER for tensor in tensor_leaves((args, kwargs))):
            args, kwargs = tree_map(_cast, (args, kwargs))
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            failed = error
        try:
            made = func(*tree_map(_narrow, args), **tree_map(_narrow, kwargs))
        except RuntimeError:
            raise failed from None
        self.narrowed = str(func)
        return tree_map(_cast, made)


def _cast(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.dtype in _WIDER:
        return leaf.to(_WIDER[leaf.dtype])
    return leaf


def _narrow(leaf: Any) -> Any:
    wide = isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float64
    return leaf.float() if wide else leaf


@contextmanager
def staying_wide() -> Iterator[Wide]:
    """Casts, autocast and new tensors inside are FP64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Wide() as mode:
            yield mode
    finally:
        torch.set_default_dtype(before)
