"""What CUDA's allocator takes from the card: more than is ever allocated at once.

Freed blocks lie between others, and a request that fits into none of them takes new pages. So a
step is replayed through the simulated allocator with expandable segments, as a step under a budget
runs: as the first step, which makes the optimizer's state, once more, and then as it is captured as
a CUDA graph, whose memory is a pool of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..trace.graph import Phase, Role, Trace
from .cuda.allocator import ExpandableAllocator
from .cuda.cudnn import ConvolutionTable
from .device import Replay


@dataclass(frozen=True)
class Reserved:
    """Bytes reserved at most, by the way the step runs."""

    eager_bytes: int
    captured_bytes: int
    """From the capture on, with an evaluation of the same batch between two steps."""


def reserved(trace: Trace, state: Sequence[int] = (), passing_bytes: int = 0) -> Reserved:
    """For the passes of a step, an update that keeps tensors of these sizes and needs some more."""
    main = ExpandableAllocator()
    replay = Replay(trace, ConvolutionTable.shipped(), main)

    def update() -> None:
        main.free(main.allocate(passing_bytes))

    def first_update() -> None:
        for nbytes in state:
            main.allocate(nbytes)
        update()

    replay.step(replay.workspaces, replay.state, first_update)
    replay.step((), [], update)
    eager = main.reserved_bytes
    replay.drop_workspaces()
    inputs = [s.nbytes for s in trace.storages if s.role is Role.INPUT and s.birth < 0]
    for nbytes in inputs:  # a graph has a copy of the batch
        main.allocate(nbytes)
    main.empty_cache()
    resident = main.reserved_bytes
    own = ExpandableAllocator()
    captured = Replay(trace, ConvolutionTable.shipped(), own)
    outside = own.reserved_bytes  # parameters and the like are not in the graph's pool

    def captured_update() -> None:
        own.free(own.allocate(passing_bytes))

    captured.step(captured.workspaces, [], captured_update)
    pool = own.reserved_bytes - outside
    return Reserved(eager, resident + pool + evaluation_bytes(trace))


def evaluation_bytes(trace: Trace) -> int:
    """Peak of the forward pass alone, without gradients, above what is resident."""
    forward = [op for op in trace.ops if op.phase is Phase.FORWARD]
    last: dict[int, int] = {}
    for op in forward:
        for _, spec in op.inputs:
            last[trace.values[spec.value].storage] = op.index
    born: dict[int, int] = {}
    dying: dict[int, int] = {}
    for storage in trace.storages:
        if 0 <= storage.birth < len(forward):
            born[storage.birth] = born.get(storage.birth, 0) + storage.nbytes
            end = last.get(storage.index, storage.birth)
            dying[end] = dying.get(end, 0) + storage.nbytes
    there = peak = 0
    for op in forward:
        there += born.get(op.index, 0)
        peak = max(peak, there)
        there -= dying.get(op.index, 0)
    return peak
