"""Losses whose one number lies in a storage as large as their input, on every device."""

from __future__ import annotations

from typing import Any

import torch

from ..torch_private.fake_tensors import FakeTensor

_aten = torch.ops.aten

_WHOLE = (
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.soft_margin_loss.default,
    _aten.binary_cross_entropy.default,
)
"""They write a term for every element, then shrink that tensor to the number they return."""


def is_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call is one of these losses, with a reduction."""
    if func not in _WHOLE:
        return False
    names = [argument.name for argument in func._schema.arguments]
    return bool((dict(zip(names, args, strict=False)) | kwargs).get("reduction", 1) != 0)


def with_whole_storage(args: tuple[Any, ...], out: Any) -> Any:
    """Give a fake loss the storage a real one has; PyTorch's shape functions have one element."""
    if not isinstance(out, FakeTensor):
        return out
    return out.new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape)).resize_(())
