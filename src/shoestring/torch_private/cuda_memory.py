"""The CUDA allocator's pools and history, and the workspaces of libraries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch


def clear_cublas_workspaces() -> None:
    """Free those of all threads and streams; the next product takes one again."""
    torch._C._cuda_clearCublasWorkspaces()


def free_idle_pinned_memory() -> None:
    """Give back what PyTorch keeps of pinned memory that nobody uses any more."""
    if torch.cuda.is_initialized() and hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()


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


def expand_segments() -> None:
    """From now on the allocator maps memory page by page, unless the user said how it shall work.

    Blocks of other sizes then share one range of addresses, and far less lies idle between them.
    """
    said = next((os.environ[name] for name in _SETTINGS if os.environ.get(name)), "")
    if "expandable_segments" in said or "backend" in said:
        return
    settings = ",".join([*([said] if said else []), "expandable_segments:True"])
    torch._C._accelerator_setAllocatorSettings(settings)


_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@contextmanager
def at_most(nbytes: int, device: torch.device) -> Iterator[None]:
    """Within: the allocator takes no more from the card, and gives back what lies idle instead."""
    index = torch.cuda.current_device() if device.index is None else device.index
    total = torch.cuda.get_device_properties(index).total_memory
    before = torch.cuda.get_per_process_memory_fraction(index)
    torch.cuda.set_per_process_memory_fraction(min(before, nbytes / total), index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, index)
