"""Which of the tensors that autograd saves go to the host.

Saved-tensor hooks around the forward pass see each tensor as it is saved. Parameters, buffers and
the batch stay, they are there anyway; so does what is small, and a window on a storage that is much
larger. A storage that is saved several times is moved once, and one that somebody keeps on the
device is not moved.
"""

from __future__ import annotations

import warnings
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ...errors import first_line
from ...torch_private.autograd import DisableTorchFunction, active_saved_tensors_hooks
from ...trace.batches import tensors_of
from ...trace.fakes import is_fake
from ...trace.places import is_elsewhere
from ...units import format_size
from ..saving import Saved, block_inputs_are_kept, storage_key
from .moving import HostLink, Moved, Window

_SHARE = 4
"""A window of less than one in so many of its storage does not move it."""


class Host:
    """State between forward passes: the link, and whether the host had room."""

    def __init__(self, folder: str, depth: int) -> None:
        self.link = HostLink(folder, depth)
        self._left_bytes, self._full = 0, ""

    def move(self, flat: torch.Tensor) -> Moved | None:
        """To the host; None where there is no room, from then on."""
        if self._full:
            return None
        try:
            return self.link.move(flat)
        except OSError as error:
            self._left_bytes, self._full = flat.nbytes, first_line(error)
            return None

    def warn(self) -> None:
        """Say once that there was no room; what had none stays on the device, and is read there."""
        nbytes, self._left_bytes = self._left_bytes, 0
        if nbytes:
            warnings.warn(
                f"activation_offload: a saved tensor of {format_size(nbytes)} and all that follow "
                f"stay on the device: {self._full}",
                RuntimeWarning,
                stacklevel=3,
            )


class SavingOnHost(AbstractContextManager["SavingOnHost"]):
    """A context of one forward pass."""

    def __init__(
        self, model: nn.Module, batch: Any, host: Host, *, everything: bool, smallest: int
    ) -> None:
        self._host, self._everything, self._smallest = host, everything, smallest
        held = (*model.parameters(), *model.buffers(), *tensors_of(batch))
        self._there = {storage_key(t) for t in held if t.layout is torch.strided}
        self._known: dict[Any, tuple[Any, Any]] = {}
        """Storage, version, type and part → what was moved, None if it stays; when it goes."""
        self._outer: Any = None
        self.seen = 0
        """Storages that were to be moved."""

    def __enter__(self) -> SavingOnHost:
        self._outer = active_saved_tensors_hooks()
        self._host.link.begin()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._known.clear()
        del self._hooks  # no cycle may hold what was saved
        self._outer = None

    def _pack(self, tensor: torch.Tensor) -> Window | Saved:
        with DisableTorchFunction(), torch.no_grad():
            moved = self._moved(tensor) if self._movable(tensor) else None
            return Saved(tensor, self._outer) if moved is None else Window(moved, tensor)

    def _movable(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.layout is torch.strided
            and (type(tensor) is torch.Tensor or is_fake(tensor))
            and not (tensor.is_leaf and tensor.requires_grad)
            and not tensor.is_conj()
            and not tensor.is_neg()
            and not is_elsewhere(tensor)
            and storage_key(tensor) not in self._there
            and not isinstance(tensor._base, nn.Parameter)  # which ranks that split it gathered
        )

    def _moved(self, tensor: torch.Tensor) -> Moved | None:
        """Where its storage was moved; None where it stays."""
        key = storage_key(tensor), tensor._version, tensor.dtype, _counted_alone(tensor)
        known = self._known.get(key)
        found = None if known is None else known[0]()
        if isinstance(found, Moved) or found is _STAYS:
            return found if isinstance(found, Moved) else None
        flat = self._wanted(tensor)
        moved = None if flat is None else self._host.move(flat)
        self.seen += flat is not None
        held = weakref.ref(moved) if moved is not None else lambda: _STAYS

        def gone(_: Any) -> None:
            self._known.pop(key, None)

        self._known[key] = held, weakref.ref(tensor.untyped_storage(), gone)
        return moved

    def _wanted(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Its whole storage, if that is to be moved for it."""
        if not (self._everything or block_inputs_are_kept()):
            return None
        nbytes, itemsize = tensor.untyped_storage().nbytes(), tensor.element_size()
        elements = nbytes // itemsize
        if elements < self._smallest or nbytes % itemsize or tensor.numel() * _SHARE < elements:
            return None
        return tensor.detach().as_strided((elements,), (1,), 0)


def _counted_alone(tensor: torch.Tensor) -> Any:
    """The part of a storage whose writes a version counts; None for all of it.

    Parts made by `unsafe_chunk`, as in a GRU, share a storage and each count their own writes.
    """
    base = tensor if tensor._base is None else tensor._base
    if base.numel() * base.element_size() == base.untyped_storage().nbytes():
        return None
    return base.storage_offset(), base.shape, base.stride()


_STAYS = object()
"""Somebody keeps the storage on the device: it costs nothing to keep it for others, too."""


def _unpack(packed: Window | Saved) -> torch.Tensor:
    return packed.value()
