"""The lives of blocks, from what PyTorch's CUDA allocator wrote down of itself.

Its history has addresses and requested bytes; what counts in `torch.cuda.max_memory_allocated` are
whole blocks, which are larger where a cached one was handed out uncut. Starting from a snapshot,
the history is followed with the allocator's rule for cutting.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..cuda.allocator import ROUNDING_BYTES, SMALL_REQUEST_BYTES, SMALL_SEGMENT_BYTES, rounded


@dataclass(slots=True)
class AllocatedBlock:
    """One allocation; `born` and `died` count the allocations of the history before them."""

    address: int
    requested_bytes: int
    nbytes: int
    born: int
    """-1: before the history."""
    frames: list[Any]
    """The Python stack, the innermost frame first."""
    died: int | None = None


@dataclass(slots=True)
class _HeapSegment:
    """Memory from the driver in consecutive blocks: address → (bytes, free)."""

    small: bool
    blocks: dict[int, tuple[int, bool]] = field(default_factory=dict)

    def take(self, address: int, requested_bytes: int) -> int:
        """Bytes of the block handed out: it is cut only where enough would be left."""
        wanted = rounded(requested_bytes)
        nbytes = self.blocks[address][0]
        rest = nbytes - wanted
        if rest >= ROUNDING_BYTES if self.small else rest > SMALL_REQUEST_BYTES:
            self.blocks[address + wanted] = (rest, True)
            nbytes = wanted
        self.blocks[address] = (nbytes, False)
        return nbytes

    def give(self, address: int) -> None:
        """Free a block and join it with its free neighbors."""
        nbytes = self.blocks.pop(address)[0]
        after = address + nbytes
        if self.blocks.get(after, (0, False))[1]:
            nbytes += self.blocks.pop(after)[0]
        for before, (size, free) in self.blocks.items():
            if free and before + size == address:
                address, nbytes = before, nbytes + size
                break
        self.blocks[address] = (nbytes, True)


class _Heap:
    """All segments by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._segments: dict[int, _HeapSegment] = {}

    def add(self, address: int, segment: _HeapSegment) -> None:
        self._segments[address] = segment
        self._starts = sorted(self._segments)

    def drop(self, address: int) -> None:
        self._segments.pop(address, None)
        self._starts = sorted(self._segments)

    def of(self, address: int) -> _HeapSegment:
        return self._segments[self._starts[bisect_right(self._starts, address) - 1]]


def blocks_at_peak(
    segments: Iterable[dict[str, Any]], history: Iterable[dict[str, Any]]
) -> tuple[int, int, list[AllocatedBlock]]:
    """Peak bytes, the number of the allocation that reached it, and the blocks live then.

    `segments` and `history` are what `cuda_memory.snapshot` calls segments, from before, and a
    device's trace, from after. A block's death is known also if it came after the peak.
    """
    heap = _Heap()
    live: dict[int, AllocatedBlock] = {}
    for segment in segments:
        held = _HeapSegment(segment["segment_type"] == "small")
        for block in segment["blocks"]:
            used = block["state"] == "active_allocated"
            held.blocks[block["address"]] = (block["size"], block["state"] == "inactive")
            if used:
                live[block["address"]] = AllocatedBlock(
                    block["address"], block["requested_size"], block["size"], -1, []
                )
        heap.add(segment["address"], held)
    total = peak_bytes = sum(block.nbytes for block in live.values())
    at_peak, count, reached = list(live.values()), 0, -1
    for event in history:
        action, address = event["action"], event.get("addr", 0)
        if action == "segment_alloc":
            size = event["size"]
            heap.add(address, _HeapSegment(size == SMALL_SEGMENT_BYTES, {address: (size, True)}))
        elif action == "segment_free":
            heap.drop(address)
        elif action == "alloc":
            nbytes = heap.of(address).take(address, event["size"])
            frames = event.get("frames", [])
            live[address] = AllocatedBlock(address, event["size"], nbytes, count, frames)
            total += nbytes
            if total > peak_bytes:
                peak_bytes, reached, at_peak = total, count, list(live.values())
            count += 1
        elif action == "free_requested":
            block = live.pop(address)
            block.died = count
            total -= block.nbytes
        elif action == "free_completed":
            heap.of(address).give(address)
    return peak_bytes, reached, at_peak
