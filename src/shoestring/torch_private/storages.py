"""Who holds a storage, and how a tensor's dimensions lie in it."""

from __future__ import annotations

import torch
from torch._prims_common import suggest_memory_format

__all__ = ["suggest_memory_format", "use_count"]


def use_count(storage: torch.UntypedStorage) -> int:
    """References to it, those of the autograd engine too."""
    return torch._C._storage_Use_Count(storage._cdata)
