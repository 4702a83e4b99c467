"""A simulation of PyTorch's CUDA caching allocator, as its documentation describes it.

`torch.cuda.max_memory_allocated` reports the sum of *blocks*, not of requests: a request is
rounded up to 512 bytes, and a cached block that is a little larger is handed out whole. So a step's
peak depends on the blocks that earlier steps left behind, and is found by replaying them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Protocol

MIB = 2**20
ROUNDING_BYTES = 512
"""Every block is a multiple of this."""
SMALL_REQUEST_BYTES = MIB
"""Up to here a request is served from the pool of small segments."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
"""Segment that requests under `OWN_SEGMENT_BYTES` share."""
OWN_SEGMENT_BYTES = 10 * MIB
SEGMENT_ROUNDING_BYTES = 2 * MIB


@dataclass(slots=True, eq=False)
class _CachedBlock:
    address: int
    nbytes: int
    small: bool
    previous: _CachedBlock | None = None
    following: _CachedBlock | None = None
    free: bool = False


def rounded(nbytes: int) -> int:
    """Bytes of the smallest block for a request."""
    return max(-(-nbytes // ROUNDING_BYTES) * ROUNDING_BYTES, ROUNDING_BYTES)


def segment_bytes(block_bytes: int) -> int:
    """Bytes asked of the driver when no cached block fits."""
    if block_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-block_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES


class Allocator(Protocol):
    """The allocator that a step is replayed through."""

    allocated_bytes: int
    peak_allocated_bytes: int

    def allocate(self, nbytes: int) -> int:
        """Serve a request; the handle is what `free` takes."""
        ...

    def free(self, handle: int) -> None:
        """Give a block back."""
        ...

    def block_bytes(self, handle: int) -> int:
        """Bytes of the block behind a handle."""
        ...

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        ...


class CachingAllocator:
    """Best fit over cached blocks, splitting what is too large and merging free neighbors."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self._blocks: dict[int, _CachedBlock] = {}
        self._next_handle = 0
        self._next_address = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._free_at: dict[int, _CachedBlock] = {}

    def allocate(self, nbytes: int) -> int:
        """Serve a request; the handle is what `free` takes. Nothing is allocated for zero bytes."""
        handle = self._next_handle
        self._next_handle += 1
        if nbytes <= 0:
            return handle
        size = rounded(nbytes)
        block = self._take(size)
        self._blocks[handle] = block
        self.allocated_bytes += block.nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return handle

    def free(self, handle: int) -> None:
        """Give a block back to the cache."""
        block = self._blocks.pop(handle, None)
        if block is None:
            return
        self.allocated_bytes -= block.nbytes
        if block.previous is not None and block.previous.free:
            block = self._merge(block.previous, block)
        if block.following is not None and block.following.free:
            self._forget(block.following)
            block = self._merge(block, block.following, forgotten=True)
        self._remember(block)

    def block_bytes(self, handle: int) -> int:
        """Bytes of the block behind a handle."""
        block = self._blocks.get(handle)
        return 0 if block is None else block.nbytes

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak_allocated_bytes = self.allocated_bytes

    def _take(self, size: int) -> _CachedBlock:
        small = size <= SMALL_REQUEST_BYTES
        cached = self._free[small]
        position = bisect_left(cached, (size, -1))
        if position < len(cached):
            block = self._free_at.pop(cached.pop(position)[1])
            block.free = False
        else:
            block = _CachedBlock(self._next_address, segment_bytes(size), small)
            self._next_address += block.nbytes
            self.reserved_bytes += block.nbytes
        remaining = block.nbytes - size
        if remaining >= ROUNDING_BYTES if small else remaining > SMALL_REQUEST_BYTES:
            rest = _CachedBlock(block.address + size, remaining, small, block, block.following)
            if block.following is not None:
                block.following.previous = rest
            block.following = rest
            block.nbytes = size
            self._remember(rest)
        return block

    def _remember(self, block: _CachedBlock) -> None:
        block.free = True
        insort(self._free[block.small], (block.nbytes, block.address))
        self._free_at[block.address] = block

    def _forget(self, block: _CachedBlock) -> None:
        cached = self._free[block.small]
        del cached[bisect_left(cached, (block.nbytes, block.address))]
        del self._free_at[block.address]

    def _merge(
        self, first: _CachedBlock, second: _CachedBlock, forgotten: bool = False
    ) -> _CachedBlock:
        if first.free and not forgotten:
            self._forget(first)
        first.free = False
        first.nbytes += second.nbytes
        first.following = second.following
        if second.following is not None:
            second.following.previous = first
        return first


class ExpandableAllocator:
    """The same with expandable segments: one range of addresses a pool, mapped page by page.

    Blocks are split down to `ROUNDING_BYTES`, so what is allocated is what was asked for. Reserved
    are the pages that are mapped: how far apart blocks lie decides that. Where a request would pass
    the limit, pages that hold nothing are given back first.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.peak_asked_bytes = 0
        """Reserved bytes once a request has its pages: a limit below this has an effect."""
        self._pools = {True: _Pages(SMALL_SEGMENT_BYTES), False: _Pages(LARGE_SEGMENT_BYTES)}
        self._held: dict[int, tuple[bool, int, int]] = {}
        self._next_handle = 0

    @property
    def reserved_bytes(self) -> int:
        """Of all pages that are mapped."""
        return sum(pool.mapped_bytes for pool in self._pools.values())

    def allocate(self, nbytes: int) -> int:
        """Serve a request; the handle is what `free` takes. Nothing is allocated for zero bytes."""
        handle = self._next_handle
        self._next_handle += 1
        if nbytes > 0:
            size = rounded(nbytes)
            small = size <= SMALL_REQUEST_BYTES
            self._held[handle] = small, self._take(self._pools[small], size), size
            self.allocated_bytes += size
            self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return handle

    def _take(self, pool: _Pages, size: int) -> int:
        found = pool.cached(size)
        if found is not None:
            return found
        asked = self.reserved_bytes + pool.to_map(size)
        self.peak_asked_bytes = max(self.peak_asked_bytes, asked)
        if self._limit_bytes is not None and asked > self._limit_bytes:
            self.empty_cache()
            found = pool.cached(size)
        found = pool.map(size) if found is None else found
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return found

    def free(self, handle: int) -> None:
        """Give a block back to its pool."""
        if handle in self._held:
            small, address, size = self._held.pop(handle)
            self.allocated_bytes -= size
            self._pools[small].give(address, size)

    def block_bytes(self, handle: int) -> int:
        """Bytes of the block behind a handle."""
        return self._held[handle][2] if handle in self._held else 0

    def reset_peak(self) -> None:
        """Forget the peak of what is allocated."""
        self.peak_allocated_bytes = self.allocated_bytes

    def empty_cache(self) -> None:
        """Give back every page that holds nothing."""
        for pool in self._pools.values():
            pool.unmap()


class _Spans:
    """Stretches of addresses that do not touch, by address."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.sizes: dict[int, int] = {}

    def add(self, start: int, size: int) -> tuple[int, int]:
        """Join with what lies beside it; the stretch that was made."""
        position = bisect_left(self.starts, start)
        if position < len(self.starts) and self.starts[position] == start + size:
            size += self.take(self.starts[position])
        if position and self.starts[position - 1] + self.sizes[self.starts[position - 1]] == start:
            start = self.starts[position - 1]
            size += self.take(start)
        insort(self.starts, start)
        self.sizes[start] = size
        return start, size

    def take(self, start: int) -> int:
        """Remove the stretch that begins there; its size."""
        del self.starts[bisect_left(self.starts, start)]
        return self.sizes.pop(start)

    def ending_at(self, end: int) -> int | None:
        """Where the stretch begins that ends there."""
        position = bisect_left(self.starts, end)
        if position and self.starts[position - 1] + self.sizes[self.starts[position - 1]] == end:
            return self.starts[position - 1]
        return None


class _FreeSpans(_Spans):
    """The same, found by size as well."""

    def __init__(self) -> None:
        super().__init__()
        self.by_size: list[tuple[int, int]] = []

    def add(self, start: int, size: int) -> tuple[int, int]:
        made = super().add(start, size)
        insort(self.by_size, (made[1], made[0]))
        return made

    def take(self, start: int) -> int:
        size = super().take(start)
        del self.by_size[bisect_left(self.by_size, (size, start))]
        return size


class _Pages:
    """Addresses from 0 on. Each is used, free, or not mapped; from `_end` on none is mapped."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._end = 0
        self._free, self._unmapped = _FreeSpans(), _Spans()
        self.mapped_bytes = 0

    def cached(self, size: int) -> int | None:
        """A block of what is free and mapped: the smallest that fits, rather not one that can
        still grow."""
        position = bisect_left(self._free.by_size, (size, -1))
        found = self._free.by_size[position : position + 2]
        if not found:
            return None
        grows = len(found) > 1 and self._room(found[1]) < self._room(found[0])
        return self._cut(found[1 if grows else 0][1], size)

    def _room(self, block: tuple[int, int]) -> float:
        size, start = block
        if start + size == self._end:
            return float("inf")
        return size + self._unmapped.sizes.get(start + size, 0)

    def _cut(self, start: int, size: int) -> int:
        there = self._free.take(start)
        if there > size:
            self._free.add(start + size, there - size)
        return start

    def _place(self, size: int) -> tuple[int, int]:
        """Where a request goes that fits no free block: (start, where mapping begins)."""
        for gap in self._unmapped.starts:
            start = self._free.ending_at(gap)
            start = gap if start is None else start
            end = start
            while end < start + size:  # free and unmapped stretches in turn
                if end == self._end:
                    return start, gap
                more = self._free.sizes.get(end) or self._unmapped.sizes.get(end)
                if more is None:
                    break
                end += more
            if end >= start + size:
                return start, gap
        start = self._free.ending_at(self._end)
        return (self._end if start is None else start), self._end

    def to_map(self, size: int) -> int:
        """Bytes that a request would map, at most."""
        start, first = self._place(size)
        return -(-(start + size - first) // self._page_bytes) * self._page_bytes

    def map(self, size: int) -> int:
        """Map pages for a request that fits no free block."""
        start, _ = self._place(size)
        stop = -(-(start + size) // self._page_bytes) * self._page_bytes
        for gap in [g for g in self._unmapped.starts if start <= g < start + size]:
            there = self._unmapped.take(gap)
            wanted = min(there, stop - gap)
            if there > wanted:
                self._unmapped.add(gap + wanted, there - wanted)
            self._free.add(gap, wanted)
            self.mapped_bytes += wanted
        if stop > self._end:
            self._free.add(self._end, stop - self._end)
            self.mapped_bytes += stop - self._end
            self._end = stop
        return self._cut(start, size)

    def give(self, start: int, size: int) -> None:
        """Free from now on."""
        self._free.add(start, size)

    def unmap(self) -> None:
        """Give back whole pages that are free."""
        for start in list(self._free.starts):
            size = self._free.sizes[start]
            first = -(-start // self._page_bytes) * self._page_bytes
            last = (start + size) // self._page_bytes * self._page_bytes
            if last <= first:
                continue
            self._free.take(start)
            if first > start:
                self._free.add(start, first - start)
            if start + size > last:
                self._free.add(last, start + size - last)
            self._unmapped.add(first, last - first)
            self.mapped_bytes -= last - first
