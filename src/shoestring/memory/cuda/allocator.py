"""A simulation of PyTorch's CUDA caching allocator, as its documentation describes it.

What `torch.cuda.max_memory_allocated` reports is the sum of *blocks*, not of requests: a request is
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
    """What a step is replayed through."""

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
    """Best fit over cached blocks, splitting what is too large and merging free neighbours."""

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

    Blocks are split down to `ROUNDING_BYTES`, so what is allocated is what was asked for. What is
    reserved is the pages that were ever mapped: how far free blocks lie apart decides that.
    """

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0
        self._pools = {True: _Pages(SMALL_SEGMENT_BYTES), False: _Pages(LARGE_SEGMENT_BYTES)}
        self._held: dict[int, tuple[bool, int, int]] = {}
        self._next_handle = 0

    @property
    def reserved_bytes(self) -> int:
        """Of all pages that are mapped; none is given back."""
        return sum(pool.mapped_bytes for pool in self._pools.values())

    def allocate(self, nbytes: int) -> int:
        """Serve a request; the handle is what `free` takes. Nothing is allocated for zero bytes."""
        handle = self._next_handle
        self._next_handle += 1
        if nbytes > 0:
            size = rounded(nbytes)
            small = size <= SMALL_REQUEST_BYTES
            self._held[handle] = small, self._pools[small].take(size), size
            self.allocated_bytes += size
            self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return handle

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
        """Forget the peak so far."""
        self.peak_allocated_bytes = self.allocated_bytes

    def empty_cache(self) -> None:
        """Give back every page that holds nothing."""
        for pool in self._pools.values():
            pool.unmap_free()


class _Pages:
    """Addresses from 0 on: used, free, or not mapped. Pages without a use can be unmapped."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._end = 0
        """Where what was never mapped begins."""
        self._by_size: list[tuple[int, int]] = []
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}
        self._unmapped: set[int] = set()
        """Pages below the end that were given back."""

    @property
    def mapped_bytes(self) -> int:
        return self._end - len(self._unmapped) * self._page_bytes

    def take(self, size: int) -> int:
        position = bisect_left(self._by_size, (size, -1))
        found = self._by_size[position : position + 2]
        if found:
            # The one before the end can still grow, so the next larger is rather taken.
            at_end = sum(found[0]) == self._end and not self._unmapped
            nbytes, address = found[1] if at_end and len(found) > 1 else found[0]
            self._remove(address, nbytes)
        else:
            address, nbytes = self._grow(size)
        if nbytes > size:
            self._add(address + size, nbytes - size)
        if self._unmapped:
            first, last = address // self._page_bytes, -(-(address + size) // self._page_bytes)
            self._unmapped.difference_update(range(first, last))
        return address

    def _grow(self, size: int) -> tuple[int, int]:
        address, there = self._end, 0
        if self._starts and self._starts[-1] + self._sizes[self._starts[-1]] == self._end:
            address = self._starts[-1]
            there = self._sizes[address]
            self._remove(address, there)
        pages = -(-(size - there) // self._page_bytes)
        self._end += pages * self._page_bytes
        return address, self._end - address

    def give(self, address: int, size: int) -> None:
        position = bisect_left(self._starts, address)
        if position < len(self._starts) and self._starts[position] == address + size:
            following = self._starts[position]
            size += self._sizes[following]
            self._remove(following, self._sizes[following])
        if position and sum(self._span(position - 1)) == address:
            address, before = self._span(position - 1)
            size += before
            self._remove(address, before)
        self._add(address, size)

    def _span(self, position: int) -> tuple[int, int]:
        start = self._starts[position]
        return start, self._sizes[start]

    def unmap_free(self) -> None:
        for start, size in self._sizes.items():
            first, last = -(-start // self._page_bytes), (start + size) // self._page_bytes
            self._unmapped.update(range(first, last))

    def _add(self, address: int, size: int) -> None:
        insort(self._by_size, (size, address))
        insort(self._starts, address)
        self._sizes[address] = size

    def _remove(self, address: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, address))]
        del self._starts[bisect_left(self._starts, address)]
        del self._sizes[address]
