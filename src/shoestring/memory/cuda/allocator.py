"""A simulation of PyTorch's CUDA caching allocator, as its documentation describes it.

What `torch.cuda.max_memory_allocated` reports is the sum of *blocks*, not of requests: a request is
rounded up to 512 bytes, and a cached block that is a little larger is handed out whole. So a step's
peak depends on the blocks that earlier steps left behind, and is found by replaying them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

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
