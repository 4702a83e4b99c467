"""Results that lie in a storage larger than they are, on every device."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..torch_private.fake_tensors import FakeTensor

_aten = torch.ops.aten

_LOSSES = (
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.soft_margin_loss.default,
    _aten.binary_cross_entropy.default,
)
"""They write a term for every element, then shrink that tensor to the number they return."""


def held_elements(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Elements of the result's storage; 0 where it is as large as the result."""
    if func in _LOSSES:
        names = [argument.name for argument in func._schema.arguments]
        if (dict(zip(names, args, strict=False)) | kwargs).get("reduction", 1) != 0:
            return math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape))
    if func is _aten.col2im.default:  # `F.fold`: made as large as the patches, then shrunk
        return args[0].numel() if args[0].numel() > out.numel() else 0
    return 0


def with_storage_of(elements: int, out: Any) -> Any:
    """Give a fake result the storage a real one has; PyTorch's shape functions have its own."""
    if not isinstance(out, FakeTensor):
        return out
    return out.new_empty(elements).resize_(out.shape)
