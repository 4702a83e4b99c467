"""The way of state between the host and a GPU: two buffers, and a stream each way.

    host  ── in ──►  buffer 1   chunk 3 comes in, while the update reads chunk 2
                     buffer 2   chunk 2, then goes back     ── out ──►  host

`buffer_sizes` says how large they are: one holds the state of any tensor, the other that of
most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...trace.fakes import is_fake
from ...trace.places import mark_passing
from ..host import wait_when_gone
from .state import OffloadedEntries, Pair, aligned

CHUNK_BYTES = 2**26
"""Of state that moves together, at most; a single tensor may be more."""
_CHUNKS = 16
"""The weights of a small model are so many times as large: buffers must be small beside state."""
_MOST = 0.75
"""Of all tensors, those whose state fits the smaller buffer."""
_TIMES_LARGEST = 16
"""State of which a part leaves is at least so many times that of its largest tensor, if it can."""


class Link:
    """Buffers on the device, and the streams that fill and empty them."""

    def __init__(self, like: torch.Tensor, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        # One piece, so that a trace knows of both where a step needs one only.
        both = torch.empty(sum(sizes), dtype=torch.uint8, device=like.device)
        mark_passing(both)
        self._buffers = list(both.split(sizes)) if sizes else []
        self._real = like.is_cuda and not is_fake(like)
        if self._real:
            self._in, self._out = (torch.cuda.Stream(like.device) for _ in range(2))
            for stream in (self._in, self._out):
                stream.wait_stream(torch.cuda.current_stream())
            wait_when_gone(self, [self._in, self._out], like.device)
        self._ready: dict[int, tuple[int, Any, dict[int, Passage]]] = {}
        """Key of a chunk → its buffer, when it is filled, what is in it by parameter."""
        self._emptied: list[Any] = [None] * len(sizes)
        self._known: dict[tuple[int, int, int], Passage] = {}
        """Buffer, start and parameter → as it passed last."""

    def fetch(
        self, key: int, hosted: dict[int, OffloadedEntries], beside: int | None = None
    ) -> None:
        """Begin to copy a chunk to the device, unless that was begun.

        `beside` a chunk that is there, it is left for later if the other buffer is too small.
        """
        nbytes = sum(held.moved_bytes for held in hosted.values())
        begun = self._ready.get(key)
        if begun is not None and begun[2].keys() == hosted.keys():
            if all(passage.fits(hosted[owner]) for owner, passage in begun[2].items()):
                return
        self._ready.pop(key, None)  # other parameters follow, or another state was loaded since
        if not nbytes:
            return
        taken = {index: k for k, (index, _, _) in self._ready.items()}
        fitting = [i for i, size in enumerate(self.sizes) if size >= nbytes]
        free = [i for i in fitting if i not in taken]
        if not free and beside is not None:
            return
        which = (free or fitting)[-1]  # the smallest; what was guessed wrongly goes
        self._ready.pop(taken.get(which, -1), None)
        made: dict[int, Passage] = {}
        start = 0
        with self._on("in"):
            if self._emptied[which] is not None:
                self._in.wait_event(self._emptied[which])
            for owner, held in hosted.items():
                passage = self._known.get((which, start, owner))
                if passage is None or not passage.fits(held):
                    if passage is not None:  # others, too, may hold on to state that was replaced
                        self._known.clear()
                    passage = Passage(self._buffers[which], start, held)
                    self._known[which, start, owner] = passage
                passage.bring()
                made[owner] = passage
                start += held.moved_bytes
            filled = self._in.record_event() if self._real else None
        self._ready[key] = which, filled, made

    def take(self, key: int) -> dict[int, dict[str, Pair]]:
        """The chunk, on the device; what computes waits for it there."""
        if key not in self._ready:
            return {}
        _, filled, made = self._ready[key]
        if self._real:
            torch.cuda.current_stream().wait_event(filled)
        return {owner: passage.pairs for owner, passage in made.items()}

    def store(self, key: int, back: dict[int, list[Pair]]) -> None:
        """Begin to copy it back."""
        which, _, made = self._ready.pop(key, (None, None, {}))
        if self._real:
            self._out.wait_stream(torch.cuda.current_stream())
        with self._on("out"):
            for owner, pairs in back.items():
                if owner in made:
                    made[owner].take_back(pairs)
            if self._real and which is not None:
                self._emptied[which] = self._out.record_event()

    def written(self) -> None:
        """The host waits until what was stored is there."""
        if self._real:
            self._out.synchronize()

    def rest(self) -> Callable[[], None] | None:
        """Between steps: what comes in next was copied out before. Returns what the host waits for.

        Whoever reads the state may write it, too, so what was fetched ahead is fetched again.
        """
        if not self._real:
            return self._ready.clear
        self._ready.clear()
        self._in.wait_stream(self._out)

        def wait() -> None:
            self._in.synchronize()  # after the copies out; it reads what is fetched ahead
            self._ready.clear()

        return wait

    def wait(self) -> None:
        """Computations from here on wait for all copies."""
        if self._real:
            for stream in (self._in, self._out):
                torch.cuda.current_stream().wait_stream(stream)

    def forget(self) -> None:
        """Nothing is on its way; events of before are not waited for."""
        self._ready.clear()
        self._emptied = [None] * len(self.sizes)

    def follow(self) -> None:
        """Copies from here on wait for all computations before."""
        self.forget()
        if self._real:
            for stream in (self._in, self._out):
                stream.wait_stream(torch.cuda.current_stream())

    def finish(self) -> Callable[[], None] | None:
        """The next computation may use the buffers' memory: it waits for the last copy.

        Returns what waits for it on the host.
        """
        self.wait()
        self._ready.clear()
        self._known.clear()
        self._buffers.clear()
        if not self._real:
            return None
        wait: Callable[[], None] = self._out.record_event().synchronize
        return wait

    @contextmanager
    def _on(self, name: str) -> Iterator[None]:
        if not self._real:
            yield
            return
        with torch.cuda.stream(self._in if name == "in" else self._out):
            yield


class Passage:
    """The state of one parameter and its place in a buffer: one copy each way where it is packed.

    The views of the buffer are made once; to make them anew for every step takes longer than the
    copies of small tensors.
    """

    def __init__(self, buffer: torch.Tensor, start: int, held: OffloadedEntries) -> None:
        self._flat = held.flat
        self.pairs: dict[str, Pair] = {}
        if self._flat is not None:
            self._room = buffer[start : start + held.moved_bytes]
        typed: dict[torch.dtype, torch.Tensor] = {}
        for name, there in held.moved():
            each = there.element_size()
            if there.dtype not in typed:
                typed[there.dtype] = buffer.view(there.dtype)
            first = typed[there.dtype].storage_offset() + start // each
            here = typed[there.dtype].as_strided(there.shape, there.stride(), first)
            self.pairs[name] = here, there
            start += aligned(there.numel() * each)
        self._there = [id(there) for _, there in self.pairs.values()]

    def fits(self, held: OffloadedEntries) -> bool:
        """Whether the tensors on the host are still the same."""
        return self._flat is held.flat and self._there == [id(t) for _, t in held.moved()]

    def bring(self) -> None:
        """To the device."""
        if self._flat is not None:
            self._room.copy_(self._flat, non_blocking=True)
            return
        for here, there in self.pairs.values():
            here.copy_(there, non_blocking=True)

    def take_back(self, pairs: list[Pair]) -> None:
        """To the host; those that an update replaced are there already."""
        if self._flat is not None and len(pairs) == len(self.pairs):
            self._flat.copy_(self._room, non_blocking=True)
            return
        for here, there in pairs:
            there.copy_(here, non_blocking=True)


def chunk_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Of state that moves together, for an optimizer of these parameters."""
    weights = sum(p.numel() * p.element_size() for p in parameters)
    return min(CHUNK_BYTES, aligned(weights // _CHUNKS))


def buffer_sizes(each: Sequence[int], chunk: int) -> tuple[int, ...]:
    """Bytes of the buffers for tensors whose state takes so much: one holds any, one most."""
    moved = sorted(nbytes for nbytes in each if nbytes)
    if not moved:
        return ()
    large = min(max(moved[-1], chunk), sum(moved))
    most = moved[int(_MOST * (len(moved) - 1))]
    return large, min(max(most, chunk), large)


def which_move(sizes: Sequence[int], share: float) -> frozenset[int]:
    """Numbers of the tensors whose state leaves, of those with so many elements.

    Each buffer holds the largest of them, so it begins with the largest that are small beside all
    that must go. Of equal ones they are evenly apart, so that copies hide under what is between.
    """
    wanted = share * sum(sizes)
    small = wanted / _TIMES_LARGEST
    order = sorted(set(sizes), key=lambda size: (size > small, -size if size <= small else size))
    chosen: set[int] = set()
    for size in order:
        alike = [number for number, own in enumerate(sizes) if own == size]
        count = min(math.ceil(wanted / size), len(alike)) if wanted > 0 else 0
        chosen.update(alike[turn * len(alike) // count] for turn in range(count))
        wanted -= count * size
    return frozenset(chosen)
