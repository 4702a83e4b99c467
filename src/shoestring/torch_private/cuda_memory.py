"""The CUDA allocator's pools and history, and the workspaces of libraries."""

from __future__ import annotations

from typing import Any, Literal

import torch


def clear_cublas_workspaces() -> None:
    """Free those of all threads and streams; the next product takes one again."""
    torch._C._cuda_clearCublasWorkspaces()


def end_allocate_to_pool(device_index: int, pool: Any) -> None:
    """Stop serving requests from a graph's pool."""
    torch._C._cuda_endAllocateToPool(device_index, pool)


def release_pool(device_index: int, pool: Any) -> None:
    """Drop one reference to the pool."""
    torch._C._cuda_releasePool(device_index, pool)


def record_history(enabled: Literal["state", "all"] | None, **settings: Any) -> None:
    """Start to record each request with the Python code that made it; None stops."""
    torch.cuda.memory._record_memory_history(enabled, **settings)


def snapshot() -> dict[str, Any]:
    """Segments, blocks, and the recorded requests of each device."""
    return torch.cuda.memory._snapshot()
