"""Weights on the host, and their copies on the device while something reads them.

A weight is brought when a function reads it, and goes when nobody holds its copy any more: the
function's own arguments, a view of it that was saved, or the store, which keeps the last one.

    forward       layer 1        layer 2        layer 3
    on the device w1             w2             w3            w1 goes when w2 is brought
    stage         w2 ←           w3 ←           w3 again ←    copied ahead, by a stream of its own
    backward                                    w3            layer 2: w2 is brought again …

The order is that of the step before: which weight follows two others. What is copied ahead waits
in two buffers of a fixed size, and is copied from there when it is its turn. So the bytes on the
device at any operation do not depend on what was copied ahead, nor on the link's speed, and a
prediction on fake tensors has the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...torch_private.autograd import DisableTorchFunction
from ...torch_private.storages import use_count
from ...torch_private.trees import tensor_leaves
from ...trace.fakes import is_fake
from ...trace.places import mark_passing
from ..host import wait_when_gone

_ALIGN = 512
_SHARE = 0.75
"""Of all bytes of weights, those in tensors that fit a buffer."""


class HostWeight:
    """One parameter: its numbers on the host, and how its copy on the device must lie."""

    def __init__(self, store: HostWeights, parameter: torch.Tensor, there: torch.Tensor) -> None:
        self.store, self.there = store, there
        self.parameter = weakref.ref(parameter)
        self.device = parameter.device
        self.here: weakref.ref[torch.Tensor] | None = None
        self.present = 0
        """Calls that use the parameter with its numbers now."""
        self.left: Any = None
        """When its last copy to the host is done."""
        self.read: Any = None
        """When the last copy ahead of it is done, which may have been for nothing."""
        with torch.no_grad():
            bare = torch.empty((1,) * parameter.dim(), dtype=parameter.dtype, device=self.device)
            self.bare = bare.fill_(_unlikely(parameter.dtype)).expand(parameter.shape)
        """In place of the numbers while they are not there."""

    @property
    def nbytes(self) -> int:
        """Of its numbers."""
        return self.there.numel() * self.there.element_size()


class HostWeights:
    """All weights of a model that lie on the host."""

    def __init__(self) -> None:
        self._last: tuple[HostWeight, torch.Tensor] | None = None
        self._written: dict[HostWeight, torch.Tensor] = {}
        """Copies that differ from what the host has."""
        self._watched: dict[HostWeight, Aliases] = {}
        """Copies that somebody holds another tensor of, and may write through it."""
        self._leaving: tuple[torch.Tensor, Any] | None = None
        """The last copy that was written, until the next one is."""
        self._by_storage: dict[int, tuple[weakref.ref[HostWeight], Any]] = {}
        self._before: tuple[HostWeight | None, HostWeight | None] = None, None
        self._after: dict[tuple[HostWeight | None, HostWeight | None], HostWeight] = {}
        """Two weights that were brought one after the other → the next."""
        self._ahead: AheadBuffers | None = None
        self._out: Any = None
        self.saving = False
        """A state dict is made: the host's copies go into it."""

    def open(self, weights: Sequence[HostWeight]) -> None:
        """Buffers for these; the order in which a step brings them is not known yet."""
        if weights:
            self._ahead = AheadBuffers(weights[0], _buffer_bytes([w.nbytes for w in weights]))

    def close(self) -> None:
        """Everything is on the host, and nothing on the device."""
        self._after.clear()
        self.rest()
        self._ahead = None

    # -- bringing ------------------------------------------------------------------------------

    def bring(self, weight: HostWeight) -> torch.Tensor:
        """The weight's copy on the device."""
        found = None if weight.here is None else weight.here()
        if found is None:
            self._last = None  # it goes before there is another
            found = self._copied(weight)
        self._last = weight, found
        if weight is not self._before[1]:
            self._after[self._before] = weight
            self._before = self._before[1], weight
            self._look_ahead()
        return found

    def _copied(self, weight: HostWeight) -> torch.Tensor:
        there = weight.there
        with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction():
            made = torch.empty_strided(
                there.shape, there.stride(), dtype=there.dtype, device=weight.device
            )
            if self._ahead is None or not self._ahead.give(weight, made):
                made.copy_(there, non_blocking=True)
        weight.here = weakref.ref(made)
        storage, known = made.untyped_storage(), self._by_storage
        key = storage._cdata

        def gone(_: Any) -> None:
            known.pop(key, None)

        known[key] = weakref.ref(weight), weakref.ref(storage, gone)
        return made

    def _look_ahead(self) -> None:
        if self._ahead is None:
            return
        before = self._before
        for _ in range(AheadBuffers.SLOTS):
            following = self._after.get(before)
            if following is None:
                return
            if following.here is None or following.here() is None:
                self._ahead.fill(following)
            before = before[1], following

    def weight_of(self, tensor: torch.Tensor) -> HostWeight | None:
        """The weight whose copy a tensor shows."""
        known = self._by_storage.get(tensor.untyped_storage()._cdata)
        weight = None if known is None else known[0]()
        return weight if weight is not None and weight.there.dtype is tensor.dtype else None

    # -- writing back --------------------------------------------------------------------------

    @contextmanager
    def brought(
        self, weights: Iterable[HostWeight], writes: Collection[HostWeight] = ()
    ) -> Iterator[None]:
        """Within: the parameters have their numbers; some of them are written."""
        entered: list[tuple[HostWeight, torch.Tensor, torch.Tensor]] = []
        try:
            for weight in dict.fromkeys(weights):
                parameter = weight.parameter()
                assert parameter is not None
                here = weight.store.bring(weight)
                if not weight.present:
                    set_data(parameter, here)
                weight.present += 1
                entered.append((weight, parameter, here))
            yield
        finally:
            for weight, parameter, here in entered:
                weight.present -= 1
                if not weight.present:
                    set_data(parameter, weight.bare)
                if weight in writes:
                    weight.store._written[weight] = here

    def watch(self, result: Any) -> None:
        """Keep the copy that a function's result shows, as long as it can be written there."""
        for tensor in tensor_leaves(result):
            if tensor.layout is not torch.strided or tensor.requires_grad:
                continue
            weight = self.weight_of(tensor)
            here = None if weight is None or weight.here is None else weight.here()
            if weight is not None and here is not None:
                self._watched.setdefault(weight, Aliases(here)).note(tensor)

    def _look_at_watched(self) -> None:
        for weight, aliases in list(self._watched.items()):
            if aliases.were_written():
                self._written[weight] = aliases.here
            if aliases.are_gone():
                del self._watched[weight]

    def flush(self, but: Iterable[HostWeight] = ()) -> None:
        """Copy to the host what was written, except what is about to be read again."""
        if self._watched:
            self._look_at_watched()
        if self._written:
            kept = set(but)
            for weight in [w for w in self._written if w not in kept]:
                self._leave(weight, self._written.pop(weight))

    def _leave(self, weight: HostWeight, here: torch.Tensor) -> None:
        self._make_room()
        with torch.no_grad(), DisableTorchFunction():
            if _streams(here):
                if self._out is None:
                    self._out = torch.cuda.Stream(here.device)
                self._out.wait_stream(torch.cuda.current_stream(here.device))
                if weight.read is not None:
                    self._out.wait_event(weight.read)
                with torch.cuda.stream(self._out):
                    weight.there.copy_(here, non_blocking=True)
                    weight.left = self._out.record_event()
            else:
                weight.there.copy_(here)
        if self._ahead is not None:
            self._ahead.forget(weight)
        self._leaving = here, weight.left

    def _make_room(self) -> None:
        """The copy that is leaving goes when it is on the host."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None and leaving[1] is not None:
            torch.cuda.current_stream(leaving[0].device).wait_event(leaving[1])

    def clear(self) -> None:
        """Nothing is on the device that no one else holds."""
        self.flush()
        self._make_room()
        self._last = None

    def rest(self) -> None:
        """After a step: the next one begins with the first weight again."""
        self.clear()
        self._before = None, None
        self._look_ahead()

    def settle(self, weight: HostWeight) -> torch.Tensor:
        """Its numbers on the host, complete."""
        self.flush()
        if weight.left is not None:
            weight.left.synchronize()
        return weight.there


class Aliases:
    """Tensors that show a weight's copy and are not part of a graph: they can be written."""

    def __init__(self, here: torch.Tensor) -> None:
        self.here = here
        self._seen: list[tuple[torch.Tensor, int]] = []
        """Each with the version it had; `.data` counts its own, a view its parameter's."""

    def note(self, tensor: torch.Tensor) -> None:
        """One more."""
        with torch.no_grad(), DisableTorchFunction():
            tensor = tensor.detach()
        self._seen.append((tensor, tensor._version))

    def were_written(self) -> bool:
        """Since it was asked last."""
        before = [version for _, version in self._seen]
        self._seen = [(tensor, tensor._version) for tensor, _ in self._seen]
        return before != [version for _, version in self._seen]

    def are_gone(self) -> bool:
        """Nobody else holds the storage: the copy, these tensors and Python's own reference do."""
        return use_count(self.here.untyped_storage()) <= 2 + len(self._seen)


class AheadBuffers:
    """Two buffers on the device into which weights are copied ahead."""

    SLOTS = 2

    def __init__(self, like: HostWeight, nbytes: int) -> None:
        self._nbytes, self._device = -(-nbytes // _ALIGN) * _ALIGN, like.device
        # One piece, so that a trace that copies nothing ahead knows of all.
        whole = torch.empty(self.SLOTS * self._nbytes, dtype=torch.uint8, device=like.device)
        mark_passing(whole)
        self._buffers = list(whole.chunk(self.SLOTS))
        self._streams = _streams(self._buffers[0])
        if self._streams:
            self._in = torch.cuda.Stream(like.device)
            self._in.wait_stream(torch.cuda.current_stream(like.device))
            wait_when_gone(self, [self._in], like.device)
        self._filled: dict[HostWeight, tuple[int, Any]] = {}
        """The weight in a buffer: which buffer, and when it is there."""
        self._emptied: list[Any] = [None] * self.SLOTS
        self._views: dict[tuple[HostWeight, int], torch.Tensor] = {}

    def fill(self, weight: HostWeight) -> None:
        """Begin to copy it, if it fits a buffer and one is free."""
        if not self._streams or weight in self._filled or weight.nbytes > self._nbytes:
            return
        taken = {slot for slot, _ in self._filled.values()}
        free = [slot for slot in range(self.SLOTS) if slot not in taken]
        if not free:
            return
        slot = free[0]
        for event in (self._emptied[slot], weight.left):
            if event is not None:
                self._in.wait_event(event)
        with torch.no_grad(), DisableTorchFunction(), torch.cuda.stream(self._in):
            self._view(weight, slot).copy_(weight.there, non_blocking=True)
            weight.read = self._in.record_event()
            self._filled[weight] = slot, weight.read

    def give(self, weight: HostWeight, made: torch.Tensor) -> bool:
        """Fill the copy from a buffer; False where it is in none."""
        if not self._streams and weight.nbytes <= self._nbytes:  # as if it had been copied ahead
            made.copy_(self._view(weight, 0).copy_(weight.there))
            return True
        slot, filled = self._filled.pop(weight, (None, None))
        if slot is None:
            self._drop_oldest()
            return False
        now = torch.cuda.current_stream(self._device)
        if filled is not None:
            now.wait_event(filled)
        made.copy_(self._view(weight, slot))
        self._emptied[slot] = now.record_event()
        return True

    def _drop_oldest(self) -> None:
        """The order was another than the last time: what waits may not be asked for."""
        if len(self._filled) == self.SLOTS:
            self.forget(next(iter(self._filled)))

    def forget(self, weight: HostWeight) -> None:
        """Drop a copy that differs from the host's by now, or is not needed."""
        slot, filled = self._filled.pop(weight, (None, None))
        if slot is not None:
            self._emptied[slot] = filled

    def _view(self, weight: HostWeight, slot: int) -> torch.Tensor:
        key = weight, slot
        if key not in self._views:
            typed, there = self._buffers[slot].view(weight.there.dtype), weight.there
            start = typed.storage_offset()
            self._views[key] = typed.as_strided(there.shape, there.stride(), start)
        return self._views[key]


def _buffer_bytes(sizes: Iterable[int]) -> int:
    """Of a buffer: weights of no more bytes are most of all."""
    ordered, seen = sorted(sizes), 0
    for nbytes in ordered:
        seen += nbytes
        if seen >= _SHARE * sum(ordered):
            return nbytes
    return 0


def _streams(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and not is_fake(tensor)


def set_data(parameter: torch.Tensor, data: torch.Tensor) -> None:
    """`parameter.data = data`, which whoever watches for that need not undo."""
    with DisableTorchFunction():
        parameter.data = data


def _unlikely(dtype: torch.dtype) -> float:
    return torch.nan if dtype.is_floating_point or dtype.is_complex else 0
