"""Who holds a storage, and how a tensor's dimensions lie in it."""

from __future__ import annotations

import torch
from torch._prims_common import (
    make_channels_last_strides_for,
    make_contiguous_strides_for,
    suggest_memory_format,
)

__all__ = ["dense_strides", "held_in", "suggest_memory_format", "use_count"]


def held_in(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors that have its storages: itself, or the values and indices of a sparse one."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values(), tensor._indices()
    return (tensor,)


def dense_strides(shape: tuple[int, ...], kind: torch.memory_format) -> tuple[int, ...]:
    """Of a tensor without gaps, contiguous or with its channels last."""
    if kind is torch.contiguous_format:
        return tuple(make_contiguous_strides_for(shape))
    return tuple(make_channels_last_strides_for(shape))


def use_count(storage: torch.UntypedStorage) -> int:
    """References to it, those of the autograd engine too."""
    return torch._C._storage_Use_Count(storage._cdata)
