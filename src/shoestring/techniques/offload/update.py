"""Updates with state on the host.

Beside the CPU the state lies in mapped files, and the update runs on them as on memory. Beside a
GPU it is streamed through a few buffers, chunk after chunk, by streams of their own:

    in        chunk 1   chunk 2   chunk 3   …
    compute             update 1  update 2  …
    out                           chunk 1   chunk 2  …

Where each update is called for by the backward pass, the next chunk is that of the last step, and
the buffers stay: the first chunk of a step comes in under its forward pass, and the last one goes
out under the next.

In a step that is captured as a CUDA graph the streams leave from that of the capture and join it at
its end: copies are part of the graph, and the last one goes out before the next step begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from ..apart import Chunk, hooks_once, run_alone, with_gradient
from ..base import Setup
from .link import Link, buffer_sizes, chunk_bytes
from .state import OffloadedEntries, OffloadedState, aligned

Work = list[tuple[dict[str, Any], torch.Tensor]]
"""Parameters with their groups."""


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
                for group, parameter in work:  # all: some of what they make may stay here
                    run_alone(self._optimizer, (group, [parameter]), self._update)
        else:
            self._update()
        _state_of(self._optimizer).warn()


class StreamedUpdate:
    """The update of one chunk after the other, state streamed in ahead and out behind."""

    def __init__(self, setup: Setup) -> None:
        self._optimizer, self._update = setup.optimizer, setup.update
        self._setup = weakref.ref(setup)
        groups = self._optimizer.param_groups
        self._chunk = chunk_bytes(p for group in groups for p in group["params"])
        self._link: Link | None = None
        self._after: dict[int, Chunk] = {}
        """Number of a chunk's first parameter → the chunk that followed in the last step."""
        self._last: int | None = None
        self._first: Chunk | None = None
        self._counted = 0
        self._capturing = False
        self._in_graphs: list[Link] = []
        """Their buffers stay: graphs copy into them."""
        self._replayed = False
        """The last step was a graph's, whose copies no stream of ours knows of."""

    def wait(self) -> None:
        """Before a graph: all copies of steps before are waited for."""
        if self._link is not None:
            self._link.wait()
            if self._first is not None:  # its size as it will be: a graph begins to copy into it
                self._linked(self._first[1][0])
        self._replayed = True

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Around a step that is captured."""
        self._capturing, self._last = True, None
        state = _state_of(self._optimizer)
        state.pending = None
        try:
            if self._link is not None:
                self._link.follow()
                if self._first is not None:
                    self._link.fetch(id(self._first[1][0]), self._hosted(self._first))
            yield
            if self._link is not None:
                self._link.wait()
                self._in_graphs.append(self._link)
        except BaseException:
            if self._link is not None:
                with suppress(RuntimeError):  # else the capture would end with another error
                    self._link.wait()
            self._link = None  # its streams were left within the capture
            raise
        finally:
            if self._link is not None:
                self._link.forget()
            self._capturing, self._last, state.pending = False, None, None

    def __call__(self) -> None:
        """Update all parameters that have a gradient now."""
        self._replayed = self._replayed and self._capturing
        kept = _state_of(self._optimizer).kept
        work = list(with_gradient(self._optimizer))
        chunks = self._chunks([one for one in work if one[1] not in kept])
        here = [one for one in work if one[1] in kept]
        if not work:
            return
        try:
            with hooks_once(self._optimizer):
                self._update_all(chunks, here)
        except BaseException:
            if not self._capturing:
                self.finish()  # whoever reads the state waits for the chunks that were updated
            raise
        setup = self._setup()
        if setup is None or not setup.updates_in_backward:
            self.finish()
        _state_of(self._optimizer).warn()

    def _update_all(self, chunks: list[Chunk], here: Work) -> None:
        if chunks and here:  # the first comes in under the update of what stays
            self._fetch(chunks[0])
        for _, alike in groupby(here, key=lambda one: id(one[0])):
            self._run_here(list(alike))
        for index, chunk in enumerate(chunks):
            following = chunks[index + 1] if index + 1 < len(chunks) else None
            self._run(chunk, following)

    def finish(self) -> None:
        """After a step: buffers go when what lies in them is on the host, or wait for the next."""
        link, state = self._link, _state_of(self._optimizer)
        if self._replayed and not self._capturing:
            if link is not None:
                link.follow()
            state.pending = torch.cuda.current_stream().record_event().synchronize
            return
        if link is None:
            return
        setup = self._setup()
        if setup is None or not setup.updates_in_backward:
            state.pending = link.finish()
            self._link, self._last = None, None
            return
        state.pending = link.rest()
        self._last, first = None, self._first
        if first is not None and self._counted == len(state):  # else the link has no room for it
            link.fetch(id(first[1][0]), self._hosted(first))

    def _run_here(self, work: Work) -> None:
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
        ahead = following or self._guessed(key)
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
                state.pack(parameter, link.written)

    def _guessed(self, key: int) -> Chunk | None:
        """The chunk that came next in the last step, where the backward pass calls for updates."""
        setup = self._setup()
        return self._after.get(key) if setup is not None and setup.updates_in_backward else None

    def _linked(self, like: torch.Tensor) -> Link:
        """Buffers for what state there is; larger ones when there is more."""
        if self._link is None or self._counted != len(_state_of(self._optimizer)):
            state = _state_of(self._optimizer)
            self._counted = len(state)
            sizes = buffer_sizes([self._bytes_of(p) for p in state], self._chunk)
            if self._link is not None and self._link.sizes != sizes:
                if self._link not in self._in_graphs:
                    self._link.finish()
                self._link = None
            self._link = self._link or Link(like, sizes)
        return self._link

    def _hosted(self, chunk: Chunk) -> dict[int, OffloadedEntries]:
        state = _state_of(self._optimizer)
        return {id(p): state.entries(p) for p in chunk[1] if state.has(p)}

    def _chunks(self, work: Work) -> list[Chunk]:
        chunks: list[Chunk] = []
        size = 0
        for group, parameter in work:
            own = self._bytes_of(parameter)
            if chunks and chunks[-1][0] is group and size + own <= self._chunk:
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


def _state_of(optimizer: Optimizer) -> OffloadedState:
    state = optimizer.state
    assert isinstance(state, OffloadedState)
    return state
