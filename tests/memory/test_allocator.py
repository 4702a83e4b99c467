"""The simulated caching allocator against sequences worked out by hand, and its invariants."""

import itertools
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.memory.cuda.allocator import (
    MIB,
    CachingAllocator,
    ExpandableAllocator,
    rounded,
    segment_bytes,
)


@pytest.mark.parametrize(
    ("request_bytes", "block"),
    [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)],
)
def test_requests_are_rounded_up_to_512_bytes(request_bytes, block):
    assert rounded(request_bytes) == block
    allocator = CachingAllocator()
    handle = allocator.allocate(request_bytes)
    assert allocator.block_bytes(handle) == allocator.allocated_bytes == block


def test_segments_by_size():
    assert segment_bytes(512) == segment_bytes(MIB) == 2 * MIB
    assert segment_bytes(MIB + 512) == segment_bytes(10 * MIB - 512) == 20 * MIB
    assert segment_bytes(10 * MIB) == 10 * MIB
    assert segment_bytes(11 * MIB) == 12 * MIB


def test_small_requests_share_a_segment_until_it_is_full():
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(MIB // 2)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(1)
    assert allocator.reserved_bytes == 4 * MIB


def test_a_large_block_is_handed_out_whole_when_a_mebibyte_or_less_would_remain():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB))
    whole = allocator.allocate(11 * MIB)
    assert allocator.block_bytes(whole) == 12 * MIB
    assert allocator.allocated_bytes == 12 * MIB
    allocator.free(whole)
    split = allocator.allocate(11 * MIB - 512)
    assert allocator.block_bytes(split) == 11 * MIB - 512
    assert allocator.reserved_bytes == 12 * MIB


def test_best_fit_takes_the_smallest_block_that_is_large_enough():
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(14 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.block_bytes(allocator.allocate(13 * MIB)) == 14 * MIB
    assert allocator.reserved_bytes == 54 * MIB


def test_free_neighbors_merge_and_serve_a_larger_request():
    allocator = CachingAllocator()
    parts = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved_bytes == 20 * MIB
    for handle in (parts[0], parts[2], parts[1]):
        allocator.free(handle)
    assert allocator.block_bytes(allocator.allocate(15 * MIB)) == 15 * MIB
    assert allocator.reserved_bytes == 20 * MIB


def test_small_and_large_requests_do_not_share_segments():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(5 * MIB))
    allocator.allocate(MIB)
    assert allocator.reserved_bytes == 22 * MIB


def test_nothing_is_allocated_for_nothing():
    allocator = CachingAllocator()
    handle = allocator.allocate(0)
    assert allocator.reserved_bytes == allocator.block_bytes(handle) == 0
    allocator.free(handle)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40 * MIB), st.integers(0, 10)), max_size=60))
def test_blocks_cover_requests_and_all_comes_back(steps):
    allocator = CachingAllocator()
    live: list[tuple[int, int]] = []
    for nbytes, victim in steps:
        live.append((allocator.allocate(nbytes), nbytes))
        if victim < len(live):
            allocator.free(live.pop(victim)[0])
        requested = sum(size for _, size in live)
        blocks = sum(allocator.block_bytes(handle) for handle, _ in live)
        assert requested <= blocks == allocator.allocated_bytes <= allocator.reserved_bytes
        assert blocks <= requested + len(live) * MIB + 512 * len(live)
    for handle, _ in live:
        allocator.free(handle)
    assert allocator.allocated_bytes == 0
    reserved = allocator.reserved_bytes
    sizes = [size for pool in allocator._free.values() for size, _ in pool]
    assert sum(sizes) == reserved


def lines_of_a_request(live_blocks: int) -> float:
    """Lines of Python that the allocator runs for one request and one free, on average."""
    allocator, live, lines, requests = CachingAllocator(), [], 0, 500

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    for step in range(live_blocks + requests):
        if step == live_blocks:
            sys.settrace(count)
        handle = allocator.allocate((step * 7919) % (8 * MIB) + 1)
        if step >= live_blocks:
            allocator.free(live[(step * 31) % live_blocks])
            live[(step * 31) % live_blocks] = handle
        else:
            live.append(handle)
    sys.settrace(None)
    return lines / requests


def test_a_request_costs_the_same_however_many_blocks_are_live():
    """So that a long step is replayed quickly; `settrace` sees the allocator's own lines."""
    before = sys.gettrace()
    try:
        few, many = lines_of_a_request(50), lines_of_a_request(5000)
    finally:
        sys.settrace(before)
    assert 5 < many < 1.5 * few + 10


# -- expandable segments ---------------------------------------------------------------------------


def test_expandable_blocks_are_as_large_as_what_was_asked_for():
    allocator = ExpandableAllocator()
    allocator.free(allocator.allocate(12 * MIB))
    assert allocator.block_bytes(allocator.allocate(11 * MIB)) == 11 * MIB
    assert allocator.reserved_bytes == 20 * MIB


def test_a_free_block_at_the_end_grows_instead_of_a_new_segment():
    allocator = ExpandableAllocator()
    first = allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.free(first)
    allocator.allocate(50 * MIB)
    assert allocator.reserved_bytes == 60 * MIB, "the old kind would hold 30 and 50"


def test_a_hole_that_is_too_small_costs_pages_until_they_are_given_back():
    allocator = ExpandableAllocator()
    held = [allocator.allocate(20 * MIB) for _ in range(4)]
    allocator.free(held[0])
    allocator.free(held[2])
    allocator.allocate(40 * MIB)
    assert allocator.reserved_bytes == 120 * MIB
    allocator.empty_cache()
    assert allocator.reserved_bytes == allocator.allocated_bytes == 80 * MIB


def test_under_a_limit_idle_pages_go_before_more_are_taken():
    allocator = ExpandableAllocator(limit_bytes=100 * MIB)
    held = [allocator.allocate(20 * MIB) for _ in range(4)]
    allocator.free(held[0])
    allocator.free(held[2])
    allocator.allocate(40 * MIB)
    assert allocator.peak_reserved_bytes == 80 * MIB
    allocator.allocate(60 * MIB)  # more than there is: it says how much more
    assert allocator.peak_reserved_bytes == 140 * MIB


@given(
    st.lists(st.tuples(st.integers(1, 80 * MIB), st.integers(0, 9)), max_size=60),
    st.none() | st.integers(MIB, 400 * MIB),
)
@settings(max_examples=60, deadline=None)
def test_expandable_blocks_never_overlap_and_are_all_accounted_for(requests, limit):
    allocator = ExpandableAllocator(limit)
    held: list[int] = []
    for nbytes, which in requests:
        if held and which < 4:
            allocator.free(held.pop(which % len(held)))
        elif which == 9:
            allocator.empty_cache()
        else:
            held.append(allocator.allocate(nbytes))
        spans = sorted((small, at, at + size) for small, at, size in allocator._held.values())
        for (pool, _, end), (other, start, _) in itertools.pairwise(spans):
            assert pool != other or end <= start
        assert sum(map(allocator.block_bytes, held)) == allocator.allocated_bytes
        assert allocator.allocated_bytes <= allocator.reserved_bytes
    for handle in held:
        allocator.free(handle)
    allocator.empty_cache()
    assert allocator.reserved_bytes == allocator.allocated_bytes == 0
