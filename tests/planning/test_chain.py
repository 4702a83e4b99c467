"""The planned schedule is the best: by trying all, and for long chains by what must hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import pytest

from plan_optimality import random_instance
from shoestring.memory.items import Item
from shoestring.memory.work import Work
from shoestring.techniques.checkpointing.solve import front, solve
from shoestring.techniques.checkpointing.stages import Chain, Option, Stage, evaluate, plain
from work import calls


@lru_cache
def sequences(count: int) -> tuple[tuple[Item, ...], ...]:
    """All schedules of so many blocks: leaves and regions, regions of regions."""
    return (*several(count), *((item,) for item in single(count)))


def single(count: int) -> tuple[Item, ...]:
    """All items; a region that holds one region only is that region."""
    return ("keep", "cheap", ("keep",), ("cheap",)) if count == 1 else several(count)


@lru_cache
def several(count: int) -> tuple[tuple[Item, ...], ...]:
    return tuple(
        (first, *rest)
        for size in range(1, count)
        for first in single(size)
        for rest in sequences(count - size)
    )


def allowed(chain: Chain, items: tuple[Item, ...]) -> bool:
    """Blocks that do not join the next are the last of every region they are in."""

    def spans(items: tuple[Item, ...], start: int) -> Iterator[tuple[int, int]]:
        for item in items:
            size = 1 if isinstance(item, str) else sum(1 for _ in flat(item))
            if not isinstance(item, str):
                yield start, start + size
                yield from spans(item, start)
            start += size

    return all(all(b.joins for b in chain.blocks[a : z - 1]) for a, z in spans(items, 0))


def flat(items: tuple[Item, ...]) -> Iterator[str]:
    for item in items:
        if isinstance(item, str):
            yield item
        else:
            yield from flat(item)


@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_is_better_at_any_budget(seed: int) -> None:
    chain = random_instance(seed, most_blocks=4).chain
    tried = [
        evaluate(chain, items)
        for items in sequences(len(chain.blocks))
        if allowed(chain, items)
    ]  # fmt: skip
    peaks = sorted({schedule.peak_bytes for schedule in tried})
    for budget in peaks[:: max(1, len(peaks) // 12)]:
        best = min(schedule.cost for schedule in tried if schedule.peak_bytes <= budget)
        found = solve(chain, budget)
        assert found is not None and found.peak_bytes <= budget
        assert found.cost == pytest.approx(best, rel=1e-6)
    assert solve(chain, peaks[0] - 1) is None
    assert front(chain)[0].peak_bytes == peaks[0]


def long_chain(blocks: int, seed: int = 1) -> Chain:
    """Stages of many random chains, one after the other."""
    stages = [s for k in range(blocks) for s in random_instance(2 * k + seed).chain.blocks]
    ends = random_instance(0).chain
    return Chain(ends.head, tuple(stages[:blocks]), ends.tail, 1000)


def test_twice_as_many_blocks_are_twice_the_work() -> None:
    work = {}
    for blocks in (50, 100):
        chain, found = long_chain(blocks), []
        kept = plain(chain)
        fronts = calls(lambda chain=chain, found=found: found.append(front(chain)))
        half = kept.peak_bytes // 2
        solves = calls(lambda c=chain, f=found, half=half: f.append(solve(c, half)))
        points, best = found
        assert best is not None and best.peak_bytes <= half
        assert points[0].peak_bytes < kept.peak_bytes / 4
        work[blocks] = fronts, solves
    for few, many in zip(work[50], work[100], strict=True):
        assert many < 2.5 * few
    assert work[100][0] < 4e6 and work[100][1] < 4e5  # 1.6 s and 0.3 s on 2 cores


def test_four_equal_blocks() -> None:
    """The example of `solve.py`."""

    def work(flops: int) -> Work:
        return Work(flops=flops)

    def stage(name: str, kept: int, in_backward: int, flops: int) -> Stage:
        all_of_it = kept + in_backward
        option = Option(kept, kept, all_of_it, all_of_it, work(flops), work(flops), work(2 * flops))
        sizes = {"held_bytes": 1, "pass_bytes": 2, "gradient_bytes": 1} if kept else {}
        return Stage(name, {"keep": option}, **sizes)

    blocks = tuple(stage(str(i), 4, 2, 1) for i in range(4))
    points = front(Chain(stage("head", 0, 0, 0), blocks, stage("tail", 0, 0, 0)))
    one = ("keep",)
    assert [(p.peak_bytes, p.cost, p.items) for p in points] == [
        (7, 18, (((one, "keep"), "keep"), "keep")),
        (8, 16, (one, (one, "keep"), "keep")),
        (9, 15, (one, one, one, "keep")),
        (11, 14, (("keep", "keep"), "keep", "keep")),
        (15, 13, (one, "keep", "keep", "keep")),
        (18, 12, ("keep",) * 4),
    ]


def test_a_front_falls_in_cost_as_memory_grows() -> None:
    chain = long_chain(30)
    points = front(chain)
    assert len(points) > 50
    for less, more in pairwise(points):
        assert less.peak_bytes < more.peak_bytes and less.cost > more.cost
    assert points[-1].items == ("keep",) * 30
    for point in points[::20]:
        found = solve(chain, point.peak_bytes)
        assert found is not None and found.cost <= point.cost * 1.002


@pytest.mark.parametrize("seed", range(4))
def test_a_tail_that_needs_less_than_is_kept_hides_no_schedule(seed: int) -> None:
    chain = random_instance(seed, most_blocks=4).chain
    option = chain.tail.options["keep"]
    option = replace(option, kept_bytes=1, forward_bytes=-20, backward_bytes=-25)
    light = replace(chain, tail=replace(chain.tail, options={"keep": option}))
    assert len(front(light)) > 1
    for schedule in front(chain):
        found = solve(light, schedule.peak_bytes)
        assert found is not None and found.peak_bytes <= schedule.peak_bytes


def test_slots_do_not_hide_small_blocks() -> None:
    """Many blocks, each much smaller than a slot beside one that is large."""
    ends = random_instance(0).chain
    block = random_instance(1).chain.blocks[0]
    chain = Chain(ends.head, (block,) * 80, ends.tail, fixed_bytes=0)
    kept = plain(chain)
    for share in (0.9, 0.5, 0.2):
        found = solve(chain, int(kept.peak_bytes * share))
        assert found is not None and found.peak_bytes <= kept.peak_bytes * share
        assert found.peak_bytes > kept.peak_bytes * share * 0.93


def test_a_budget_below_what_is_resident_has_no_schedule() -> None:
    chain = random_instance(3).chain
    assert solve(chain, chain.fixed_bytes) is None
    assert solve(chain, 0) is None
