"""Products of groups of rows, for mixtures of experts: PyTorch's shape function has BF16 alone."""

from __future__ import annotations

from typing import Any

import torch

from ..torch_private.fake_tensors import FakeTensor

_PRODUCT = getattr(torch.ops.aten, "_grouped_mm", None)
_ALIGNED = 16
"""Bytes that a row of the result is a multiple of."""


def grouped_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of such a product of other types on fake tensors; None for all else."""
    if _PRODUCT is None or func is not _PRODUCT.default or not isinstance(args[0], FakeTensor):
        return None
    left, right, *more = args
    if left.dtype is torch.bfloat16:
        return None
    offsets = more[0] if more else kwargs.get("offs")
    kinds = left.dim(), right.dim()
    if kinds == (2, 2):
        assert offsets is not None
        size = [offsets.shape[0], left.shape[0], right.shape[1]]
    elif kinds == (3, 2):
        size = [left.shape[1], right.shape[1]]
    else:
        size = [*left.shape[:-1], right.shape[-1]]
    dtype = kwargs.get("out_dtype") or left.dtype
    step = _ALIGNED // dtype.itemsize
    wide = -(-size[-1] // step) * step
    stride = [size[-2] * wide, wide, 1][-len(size) :]
    return left.new_empty_strided(size, stride, dtype=dtype)
