"""Storages that are on the host between the forward and the backward pass.

Beside a GPU a stream of its own copies a storage out while the forward pass goes on, and another
copies it back ahead of the backward pass:

    forward, saves       h1            h2              h3
    out                  h1 →          h2 →            h3 →
    on the device        h1            h1, h2          h2, h3        h1 goes when h2 is saved
    backward, reads      h3            h2              h1
    in                   h2 ←          h1 ←
    on the device        h3, h2        h2, h1          h1

The storages on the device at any operation do not depend on the speed of copies: before an earlier
storage is freed, the compute stream waits for its copy. So a prediction on fake tensors holds
the same. Beside the CPU a storage is copied into a mapped file, and read from there.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ...trace.cuda import on_cuda
from ...trace.fakes import is_fake
from ...units import format_size
from ..host import available_bytes, place_for

_HOST_SHARE = 0.9
"""Of the host's free memory, what pinned memory may take: it cannot be swapped out."""


class HostLink:
    """The way to the host and back, with at most `depth` storages under way each way."""

    def __init__(self, folder: str, depth: int) -> None:
        self._folder, self.depth = folder, depth
        self._leaving: deque[weakref.ref[Moved]] = deque()
        self._order: list[weakref.ref[Moved]] = []
        """Of one forward pass, as they were saved."""
        self.held_bytes = self._most_bytes = 0
        self._streams: dict[torch.device, tuple[Any, Any]] = {}

    def begin(self) -> None:
        """A forward pass begins."""
        self._order = []

    def move(self, flat: torch.Tensor) -> Moved:
        """Begin to copy a storage to the host. OSError if there is no room."""
        self._make_room(self.depth - 1)
        moved = Moved(self, flat, self._place(flat), self._order)
        self._order.append(weakref.ref(moved))
        if moved.comes_back:
            self._leaving.append(weakref.ref(moved))
        return moved

    def _make_room(self, most: int) -> None:
        """Of what is leaving, all but the last go when they are on the host."""
        while len(self._leaving) > most:
            oldest = self._leaving.popleft()()
            if oldest is not None:
                oldest.leave()

    def _place(self, flat: torch.Tensor) -> torch.Tensor:
        after = self.held_bytes + flat.nbytes
        if flat.is_cuda and not is_fake(flat) and after > self._most_bytes:
            free = available_bytes()  # asked only where PyTorch's pool of pinned memory grows
            if free is not None and flat.nbytes > _HOST_SHARE * free:
                raise OSError(f"the host has {format_size(free)} of memory left")
        there = place_for(flat, self._folder, pinned=flat.is_cuda)
        self._most_bytes = max(self._most_bytes, after)
        return there

    def streams(self, device: torch.device) -> tuple[Any, Any]:
        """Out and in."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]


class Moved:
    """One storage on the host; on the device as long as it leaves, or is about to be read."""

    def __init__(
        self,
        link: HostLink,
        flat: torch.Tensor,
        there: torch.Tensor,
        order: list[weakref.ref[Moved]],
    ) -> None:
        self._link, self._there, self._order = link, there, order
        self._number = len(order)
        self.comes_back = on_cuda(flat)
        self._streamed = flat.is_cuda and not is_fake(flat)
        self._device, self._version = flat.device, flat._version
        self._here: torch.Tensor | None = flat if self.comes_back else None
        self._left: Any = None
        """When the copy out is done, until what computes has waited for it."""
        self._filled: Any = None
        """When the copy in is done, until what computes has waited for it."""
        self._changed = False
        link.held_bytes += flat.nbytes
        with self._on_stream(0):
            there.copy_(flat, non_blocking=self._streamed)

    def leave(self) -> None:
        """Free the bytes on the device, once they are on the host."""
        if self._here is None or self._filled is not None:
            return
        if self._streamed:
            torch.cuda.current_stream(self._device).wait_event(self._left)
            self._left = None
        # Autograd would refuse to read it, too; here it may have been copied while it changed.
        self._changed = self._streamed and self._here._version != self._version
        self._here = None

    def flat(self) -> torch.Tensor:
        """The storage, to be read now; those saved before it are fetched ahead."""
        if self._changed or (self._here is not None and self._here._version != self._version):
            raise RuntimeError(
                "a tensor was changed in place after it was saved for backward, while it was "
                "copied to the host: change a copy, or plan without activation_offload"
            )
        if not self.comes_back:
            return self._there
        self._fetch()
        for before in self._saved_before():
            before._fetch_ahead()
        if self._filled is not None:
            torch.cuda.current_stream(self._device).wait_event(self._filled)
            self._filled = None
        assert self._here is not None
        return self._here

    def _saved_before(self) -> Iterator[Moved]:
        """The next that backward will read."""
        found, number = 0, self._number
        while number and found < self._link.depth:
            number -= 1
            moved = self._order[number]()
            if moved is not None:
                found += 1
                yield moved

    def _fetch_ahead(self) -> None:
        with suppress(torch.OutOfMemoryError):  # there will be room when it is needed
            self._fetch()

    def _fetch(self) -> None:
        if self._here is not None:
            return
        # Memory of the stream that computes: it is free when that has come here, no sooner.
        there = self._there
        here = torch.empty(there.shape, dtype=there.dtype, device=self._device)
        with self._on_stream(1):
            here.copy_(there, non_blocking=self._streamed)
        self._here, self._version = here, here._version

    @contextmanager
    def _on_stream(self, which: int) -> Iterator[None]:
        """On the stream out or in, after all that was to be computed so far."""
        if not self._streamed:
            yield
            return
        stream = self._link.streams(self._device)[which]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield
        if which:
            self._filled = stream.record_event()
        else:
            self._left = stream.record_event()

    def __del__(self) -> None:
        link = getattr(self, "_link", None)
        if link is None:
            return
        link.held_bytes -= self._there.nbytes
        for event in (self._left, self._filled):  # its memory is still read, or written
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)


class Window:
    """A tensor that was saved, as a window on a storage that was moved."""

    __slots__ = ("_moved", "_offset", "_shape", "_stride")

    def __init__(self, moved: Moved, tensor: torch.Tensor) -> None:
        self._moved = moved
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()

    def value(self) -> torch.Tensor:
        """The tensor again."""
        with torch.no_grad():
            return self._moved.flat().as_strided(self._shape, self._stride, self._offset)
