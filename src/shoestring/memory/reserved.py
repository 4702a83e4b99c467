"""Bytes that CUDA's allocator reserves: more than is ever allocated at once.

Freed blocks lie between others, and a request that fits into none of them takes new pages. So a
step is replayed through the simulated allocator with expandable segments, as a step under a budget
runs: the first step, which makes the optimizer's state, a second one, and then captured as
a CUDA graph, whose memory is a pool of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..trace.graph import Role, Trace
from .cuda.allocator import ExpandableAllocator
from .cuda.cudnn import ConvolutionTable
from .device import Events, Replay


@dataclass(frozen=True)
class Reserved:
    """Bytes reserved at most, by the way the step runs."""

    eager_bytes: int
    captured_bytes: int
    """From the capture on; the two eager steps before it are held to this. 0 if not asked for."""


def reserved(
    trace: Trace,
    *,
    state_first: bool = False,
    rest: float = 0.0,
    limit_bytes: int | None = None,
    capturable: bool = True,
) -> Reserved:
    """For a whole step, its update included.

    `state_first`: the optimizer's state is made before the first pass. `rest`: the share of a part
    that the last, smaller one of a minibatch is. `limit_bytes`: what steps are held to that run
    before the capture. `capturable`: whether there is one at all.
    """
    events = Events(trace, ConvolutionTable.shipped())
    first = _Eager(trace, state_first, rest, None, events)
    main = first.steps()
    eager_bytes = main.peak_reserved_bytes
    if not capturable:
        return Reserved(eager_bytes, 0)
    if limit_bytes is not None and main.peak_asked_bytes > limit_bytes:
        first = _Eager(trace, state_first, rest, limit_bytes, events)
        main = first.steps()
    first.replay.drop_workspaces()
    for storage in trace.storages:
        if storage.role is Role.INPUT and storage.birth < 0:  # a graph has a copy of the batch
            main.allocate(storage.nbytes)
    main.empty_cache()
    own = ExpandableAllocator()
    captured = Replay(trace, ConvolutionTable.shipped(), own, events)
    outside = own.reserved_bytes  # parameters and the like are not in the graph's pool
    captured.step(captured.workspaces, [], update=not rest)
    if rest:
        captured.step((), [], share=rest)
    pool = main.reserved_bytes + own.reserved_bytes - outside
    return Reserved(eager_bytes, max(pool, main.peak_reserved_bytes))


class _Eager:
    """The first two steps."""

    def __init__(
        self,
        trace: Trace,
        state_first: bool,
        rest: float,
        limit_bytes: int | None,
        events: Events,
    ) -> None:
        self._allocator = ExpandableAllocator(limit_bytes)
        self.replay = Replay(trace, ConvolutionTable.shipped(), self._allocator, events)
        self._rest = rest
        self._state = self.replay.state
        if state_first:
            self.replay.keep(self._state)
            self._state = []

    def steps(self) -> ExpandableAllocator:
        """Run both."""
        replay = self.replay
        for number in range(2):
            kept, state = (replay.workspaces, self._state) if number == 0 else ((), [])
            if self._rest:
                replay.step(kept, [], update=False)
                replay.step((), state, share=self._rest)
            else:
                replay.step(kept, state)
        return self._allocator
