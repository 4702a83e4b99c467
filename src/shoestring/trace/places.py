"""Tensors that lie elsewhere than on the device: on the host, or in files.

A storage that is marked takes no bytes in a trace, nor in what is measured on the CPU. A fake
tensor has no device of its own, and a mapped file looks like memory, so whoever puts a tensor
there says so.
"""

from __future__ import annotations

import weakref

import torch

_Marks = dict[int, weakref.ref[torch.UntypedStorage]]
_elsewhere: _Marks = {}
_passing: _Marks = {}


def mark_elsewhere(held: torch.Tensor | torch.UntypedStorage) -> None:
    """The storage, a tensor's or itself, takes nothing of the device from now on."""
    _mark(held.untyped_storage() if isinstance(held, torch.Tensor) else held, _elsewhere)


def mark_passing(buffer: torch.Tensor) -> None:
    """Copies pass through its storage, and whoever made it knows which: nobody puts it back."""
    _mark(buffer.untyped_storage(), _passing)


def _mark(storage: torch.UntypedStorage, marks: _Marks) -> None:
    key = storage._cdata

    def gone(_: object) -> None:
        marks.pop(key, None)

    marks[key] = weakref.ref(storage, gone)


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether its storage was marked."""
    return bool(_elsewhere) and tensor.untyped_storage()._cdata in _elsewhere


def is_passing(tensor: torch.Tensor) -> bool:
    """Whether its storage is a buffer of `mark_passing`."""
    return bool(_passing) and tensor.untyped_storage()._cdata in _passing


def bytes_here(storage: torch.UntypedStorage) -> int:
    """Bytes a storage takes on the device."""
    return 0 if storage._cdata in _elsewhere else storage.nbytes()
