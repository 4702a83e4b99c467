"""Tensors that lie elsewhere than on the device: on the host, or in files.

A storage that is marked takes no bytes in a trace, nor in what is measured on the CPU. A fake
tensor has no device of its own, and a mapped file looks like memory, so whoever puts a tensor
there says so.
"""

from __future__ import annotations

import weakref

import torch

_elsewhere: dict[int, weakref.ref[torch.UntypedStorage]] = {}


def mark_elsewhere(held: torch.Tensor | torch.UntypedStorage) -> None:
    """The storage, a tensor's or itself, takes nothing of the device from now on."""
    storage = held.untyped_storage() if isinstance(held, torch.Tensor) else held
    key = storage._cdata

    def gone(_: object) -> None:
        _elsewhere.pop(key, None)

    _elsewhere[key] = weakref.ref(storage, gone)


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether its storage was marked."""
    return bool(_elsewhere) and tensor.untyped_storage()._cdata in _elsewhere


def bytes_here(storage: torch.UntypedStorage) -> int:
    """Bytes a storage takes on the device."""
    return 0 if storage._cdata in _elsewhere else storage.nbytes()
