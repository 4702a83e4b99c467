"""Positions that are out of range are an error that can be caught, also on CUDA.

A batch may hold positions of its own rows. In a part of it they point past the end: on the CPU an
IndexError, on CUDA an assertion in a kernel, after which nothing runs any more in the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...torch_private.dispatch import OperationMode

_ALONG = frozenset(
    "index_select index_add index_copy index_fill gather scatter scatter_add scatter_reduce".split()
)
_LISTS = frozenset("index index_put _index_put_impl _unsafe_index".split())


class InBounds(OperationMode):
    """Looks at every position before a kernel does."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for index, size in _positions(func._opname.rstrip("_"), args):
            if index.numel() and not (index < size).all() & (index >= -size).all():
                raise IndexError(f"a position is out of bounds for {size} rows")
        return func(*args, **(kwargs or {}))


def _positions(name: str, args: tuple[Any, ...]) -> Iterator[tuple[torch.Tensor, int]]:
    if name == "embedding":
        yield args[1], args[0].shape[0]
    elif name in _ALONG and args[0].dim():
        yield args[2], args[0].shape[args[1]]
    elif name in _LISTS:
        for dim, index in enumerate(args[1]):
            if index is not None and index.dtype not in (torch.bool, torch.uint8):
                yield index, args[0].shape[dim]
