"""Updates with state on the host.

Beside the CPU the state lies in mapped files, and the update runs on them as on memory. Beside a
GPU it is streamed through a few buffers, chunk after chunk, by streams of their own:

    in        chunk 1   chunk 2   chunk 3   …
    compute             update 1  update 2  …
    out                           chunk 1   chunk 2  …

Where each update is called for by the backward pass, the next chunk is that of the last step, and
the buffers stay: the first chunk of a step comes in under its forward pass, and the last one goes
out under the next.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from ...trace.fakes import is_fake
from ...trace.passes import passes
from ..apart import Chunk, hooks_once, run_alone, with_gradient
from ..base import Setup
from .state import OffloadedEntries, OffloadedState, Pair, aligned

_CHUNK_BYTES = 2**26
"""Of state that moves together; a single tensor may be more."""
_MOST = 0.75
"""Of all tensors, those whose state fits the smaller buffer."""
_TIMES_LARGEST = 16
"""State of which a part leaves is at least so many times that of its largest tensor, if it can."""


class MappedUpdate:
    """The update, as it is. Only SGD's first one must not make all state before any is moved."""

    def __init__(self, optimizer: Optimizer, update: Callable[[], None], *, plain: bool) -> None:
        self._optimizer, self._update = optimizer, update
        self._apart = plain and type(optimizer) is SGD

    def __call__(self) -> None:
        """One update."""
        state = _state_of(self._optimizer)
        work = list(with_gradient(self._optimizer))
        if self._apart and any(not state.has(p) for _, p in work):
            with hooks_once(self._optimizer):
                for group, parameter in passes(work):
                    run_alone(self._optimizer, (group, [parameter]), self._update)
        else:
            self._update()
        _state_of(self._optimizer).warn()


class StreamedUpdate:
    """The update of one chunk after the other, state streamed in ahead and out behind."""

    def __init__(self, setup: Setup) -> None:
        self._optimizer, self._update = setup.optimizer, setup.update
        self._setup = weakref.ref(setup)
        self._link: Link | None = None
        self._after: dict[int, Chunk] = {}
        """Number of a chunk's first parameter → the chunk that followed in the last step."""
        self._last: int | None = None
        self._first: Chunk | None = None
        self._counted = 0

    def __call__(self) -> None:
        """Update all parameters that have a gradient now."""
        kept = _state_of(self._optimizer).kept
        work = list(with_gradient(self._optimizer))
        chunks = self._chunks([one for one in work if one[1] not in kept])
        here = [one for one in work if one[1] in kept]
        if not work:
            return
        with hooks_once(self._optimizer):
            if chunks and here:  # the first comes in under the update of what stays
                self._fetch(chunks[0])
            for _, alike in groupby(here, key=lambda one: id(one[0])):
                self._run_here(list(alike))
            for index, chunk in enumerate(chunks):
                following = chunks[index + 1] if index + 1 < len(chunks) else None
                self._run(chunk, following)
        setup = self._setup()
        if setup is None or not setup.updates_in_backward:
            self.finish()
        _state_of(self._optimizer).warn()

    def finish(self) -> None:
        """After a step: buffers go when what lies in them is on the host, or wait for the next."""
        link, state = self._link, _state_of(self._optimizer)
        if link is None:
            return
        setup = self._setup()
        if setup is None or not setup.updates_in_backward:
            state.pending = link.finish()
            self._link, self._last = None, None
            return
        state.pending = link.rest()
        self._last, first = None, self._first
        if first is not None:
            link.fetch(id(first[1][0]), self._hosted(first))

    def _run_here(self, work: list[tuple[dict[str, Any], torch.Tensor]]) -> None:
        """Update parameters of one group whose state stays; what is being copied is not read."""
        state = _state_of(self._optimizer)
        pending, state.pending = state.pending, None
        run_alone(self._optimizer, (work[0][0], [p for _, p in work]), self._update)
        state.pending = pending

    def _fetch(self, chunk: Chunk) -> Link:
        link = self._linked(chunk[1][0])
        link.fetch(id(chunk[1][0]), self._hosted(chunk))
        return link

    def _run(self, chunk: Chunk, following: Chunk | None) -> None:
        state, key = _state_of(self._optimizer), id(chunk[1][0])
        if all(state.has(p) and not state.entries(p).moved_bytes for p in chunk[1]):
            self._run_here([(chunk[0], p) for p in chunk[1]])  # what follows it is copied already
            return
        state.pending = None  # the streams wait for one another; nothing is read here
        if self._last is not None:
            self._after[self._last] = chunk
        else:
            self._first = chunk
        self._last = key
        link = self._fetch(chunk)
        ahead = following or self._after.get(key)
        if ahead is not None and id(ahead[1][0]) != key:
            link.fetch(id(ahead[1][0]), self._hosted(ahead), beside=key)
        held = link.take(key)
        for parameter in chunk[1]:
            state.entries(parameter).enter(held.get(id(parameter), {}))
        try:
            run_alone(self._optimizer, chunk, self._update)
        finally:
            back = {id(p): state.entries(p).leave() for p in chunk[1]}
            link.store(key, back)
            for parameter in chunk[1]:
                if state.entries(parameter).flat is None:
                    link.written()  # what is packed must be there
                    state.pack(parameter)

    def _linked(self, like: torch.Tensor) -> Link:
        """Buffers for what state there is; larger ones when there is more."""
        if self._link is None or self._counted != len(_state_of(self._optimizer)):
            state = _state_of(self._optimizer)
            self._counted, sizes = len(state), buffer_sizes([self._bytes_of(p) for p in state])
            if self._link is not None and self._link.sizes != sizes:
                self._link.finish()
                self._link = None
            self._link = self._link or Link(like, sizes)
        return self._link

    def _hosted(self, chunk: Chunk) -> dict[int, OffloadedEntries]:
        state = _state_of(self._optimizer)
        return {id(p): state.entries(p) for p in chunk[1] if state.has(p)}

    def _chunks(self, work: list[tuple[dict[str, Any], torch.Tensor]]) -> list[Chunk]:
        chunks: list[Chunk] = []
        size = 0
        for group, parameter in work:
            own = self._bytes_of(parameter)
            if chunks and chunks[-1][0] is group and size + own <= _CHUNK_BYTES:
                chunks[-1][1].append(parameter)
                size += own
            else:
                chunks.append((group, [parameter]))
                size = own
        return chunks

    def _bytes_of(self, parameter: torch.Tensor) -> int:
        state = _state_of(self._optimizer)
        if parameter in state.kept:
            return 0
        if not state.has(parameter):  # about what Adam will have
            return 2 * aligned(parameter.numel() * parameter.element_size())
        return state.entries(parameter).moved_bytes


class Link:
    """Buffers on the device, and the streams that fill and empty them."""

    def __init__(self, like: torch.Tensor, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        # One piece, so that a trace knows of both where a step needs one only.
        both = torch.empty(sum(sizes), dtype=torch.uint8, device=like.device)
        self._buffers = list(both.split(sizes)) if sizes else []
        self._real = like.is_cuda and not is_fake(like)
        if self._real:
            self._in, self._out = (torch.cuda.Stream(like.device) for _ in range(2))
            self._in.wait_stream(torch.cuda.current_stream())
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
        written = self._out.record_event()
        self._in.wait_event(written)

        def wait() -> None:
            written.synchronize()
            self._ready.clear()

        return wait

    def finish(self) -> Callable[[], None] | None:
        """The next computation may use the buffers' memory: it waits for the last copy.

        Returns what waits for it on the host.
        """
        self._ready.clear()
        self._known.clear()
        self._buffers.clear()
        if not self._real:
            return None
        torch.cuda.current_stream().wait_stream(self._out)
        torch.cuda.current_stream().wait_stream(self._in)
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


def buffer_sizes(each: Sequence[int]) -> tuple[int, ...]:
    """Bytes of the buffers for tensors whose state takes so much: one holds any, one most."""
    moved = sorted(nbytes for nbytes in each if nbytes)
    if not moved:
        return ()
    large = min(max(moved[-1], _CHUNK_BYTES), sum(moved))
    most = moved[int(_MOST * (len(moved) - 1))]
    return large, min(max(most, _CHUNK_BYTES), large)


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


def _state_of(optimizer: Optimizer) -> OffloadedState:
    state = optimizer.state
    assert isinstance(state, OffloadedState)
    return state
