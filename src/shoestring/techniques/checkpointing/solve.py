"""The best schedule for a chain of blocks at every amount of memory, by dynamic programming.

After Beaumont et al., "Optimal checkpointing for heterogeneous chains" (2019): the table runs over
(part of the chain, memory). Added here are several kinds of leaves, parameter gradients that add
up while backward goes, and that running a region again stops at the last tensor backward reads.
Memory is cut into slots, and what is found is then evaluated exactly, so that rounding never makes
a schedule pass its budget.

Example, four equal blocks: each keeps 4 bytes, of them 1 for its output; its forward pass costs 1
and holds 2 if it keeps nothing, its backward pass costs 2 and holds 2 more than was kept:

    bytes  cost   schedule
    18     12     keep, keep, keep, keep               4 · 4 kept, 2 in the last backward pass
    15     13     [keep], keep, keep, keep             block 1 keeps its output alone, runs twice
    11     14     [keep, keep], keep, keep
     9     15     [keep], [keep], [keep], keep
     8     16     [keep], [[keep], keep], keep         a region inside of a region
     7     18     [[[keep], keep], keep], keep

`solve` reads one line of this, the last that fits; `front` all of them. The table is filled from
parts of one stage to the whole chain: a part begins with a leaf (the rest has less memory) or with
a region (its forward pass now, the rest, and then the region as a part of its own).

The chain, its stages and the evaluation of schedules are in `stages.py`; `block_chain.py` makes
the chain of a model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ...memory.items import LEAVES, Item, leaves
from ...memory.work import Cost
from .stages import Chain, Schedule, evaluate, flops_only, plain


def solve(chain: Chain, budget_bytes: int, cost: Cost = flops_only) -> Schedule | None:
    """The schedule of least cost whose peak is within the budget; None if there is none."""
    kept = plain(chain, cost)
    if kept.peak_bytes <= budget_bytes:
        return kept
    if budget_bytes <= max(chain.fixed_bytes, chain.floor_bytes - 1):
        return None
    for found in _Table(chain, cost, budget_bytes).schedules():
        if found.peak_bytes <= budget_bytes:
            return _tidied(chain, found, budget_bytes, cost)
    return None


def front(chain: Chain, cost: Cost = flops_only) -> list[Schedule]:
    """All schedules worth having, from the least memory to the least cost."""
    kept = plain(chain, cost)
    found, room = [kept], kept.peak_bytes - chain.fixed_bytes
    while room > 0:  # smaller tables have smaller slots, for the end where little memory is left
        some = list(_Table(chain, cost, chain.fixed_bytes + room).schedules(_POINTS))
        if not some:
            break
        found += some
        room = int(room * _NEXT_ROOM)
    chosen: list[Schedule] = []
    for schedule in sorted(found, key=lambda s: (s.peak_bytes, s.cost)):
        if not chosen or schedule.cost < chosen[-1].cost:
            chosen.append(schedule)
    return [_tidied(chain, schedule, schedule.peak_bytes, cost) for schedule in chosen]


def _tidied(chain: Chain, schedule: Schedule, budget_bytes: int, cost: Cost) -> Schedule:
    """Among blocks that are alike, regions first and kept ones last, if that fits: easier to read.

    Their order does not matter to the cost, and seldom to the peak.
    """
    items: list[Item] = []
    run: list[Item] = []
    at = 0
    for item in schedule.items:
        block, at = chain.blocks[at], at + leaves(item)
        run.append(item)
        inside = chain.blocks[at - leaves(item) : min(at + 1, len(chain.blocks))]
        if at == len(chain.blocks) or any(replace(b, name=block.name) != block for b in inside):
            items += sorted(run, key=_untidiness)
            run = []
    tidy = evaluate(chain, tuple(items), cost)
    fits = tidy.peak_bytes <= budget_bytes and tidy.cost <= schedule.cost * _SAME
    return tidy if fits else schedule


def _untidiness(item: Item) -> tuple[int, str]:
    return -LEAVES.index(item) if isinstance(item, str) else -len(LEAVES), str(item)


_ADDITIONS = 1.5e8
"""Limit on the work to fill a table: about half a second."""
_TABLE_BYTES = 3e8
_SLOTS = range(256, 10_000)
_POINTS = 60
"""Schedules read back from each table of a front."""
_NEXT_ROOM = 0.35
_SAME = 1 + 2e-6
"""Costs closer than this are equal: the tables hold single precision."""
_SPARE = 1.02
"""Memory tabled beyond the budget: rounding may count a schedule as larger than it is."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """An option of a stage in slots and cost."""

    name: str
    kept: int
    forward: int
    backward: int
    again: int
    cost: float
    again_cost: float


class _Table:
    """Least cost of every part of the chain at every amount of memory.

    `best[s, t, x]` is the least cost of stages s…t, forward and backward, when x slots are left for
    them and for the parameter gradients of the stages after t; these are counted so that x is the
    same for both halves of a cut. Unless t is the end of the chain, the part ends a region: it runs
    while the gradient of its output waits, and its last stage runs only as far as backward reads.
    """

    def __init__(self, chain: Chain, cost: Cost, budget_bytes: int) -> None:
        self.chain, self.cost, self.stages = chain, cost, chain.stages
        self.end = len(self.stages) - 1
        count = len(self.stages)
        slots = int(min(_ADDITIONS / (count**3 / 6), _TABLE_BYTES / (count**2 * 8), _SLOTS.stop))
        slots = max(slots, _SLOTS.start)
        self.slot_bytes = (budget_bytes - chain.fixed_bytes) / slots
        self.size = int(slots * _SPARE) + 2
        self._round()
        self._fill()

    def _round(self) -> None:
        """Bytes to slots: of what adds up, the sums are rounded, so that errors do not add up."""

        def slots(nbytes: int) -> int:
            return round(nbytes / self.slot_bytes)

        def steps(sizes: list[int]) -> list[int]:
            sums = np.cumsum([0, *sizes])
            return np.diff(np.round(sums / self.slot_bytes)).astype(int).tolist()

        stages, cost = self.stages, self.cost
        self.held = steps([stage.held_bytes for stage in stages])
        self.freed = [slots(stage.freed_bytes) for stage in stages]
        self.later = [slots(nbytes) for nbytes in self.chain.later_gradient_bytes]
        self.waiting = [
            slots(nbytes + (0 if t == self.end else stage.gradient_bytes))
            for t, (nbytes, stage) in enumerate(
                zip(self.chain.later_gradient_bytes[1:], stages, strict=True)
            )
        ]
        self.passing = np.array([slots(stage.pass_bytes) for stage in stages])
        # The stage that follows the longest region from here; itself where none may start.
        self.reach = list(range(len(stages)))
        for i in range(self.end - 1, 0, -1):
            self.reach[i] = self.reach[i + 1] if stages[i].joins and i + 1 < self.end else i + 1
        self.pass_cost = [cost(stage.options["keep"].forward) for stage in stages]
        self.leaves: list[list[_Leaf]] = [[] for _ in stages]
        for name in LEAVES:
            options = [s.options.get(name, s.options["keep"]) for s in stages]
            kept = steps([option.kept_bytes for option in options])
            for i, option in enumerate(options):
                if name == "keep" or (name in stages[i].options and 0 < i < self.end):
                    back = cost(option.backward)
                    self.leaves[i].append(
                        _Leaf(
                            name,
                            kept[i],
                            slots(option.forward_bytes),
                            slots(option.backward_bytes),
                            slots(option.again_bytes),
                            back + cost(option.forward),
                            back + cost(option.again),
                        )
                    )

    def _fill(self) -> None:
        count, size = len(self.stages), self.size
        self.best = np.full((count, count, size), np.inf, dtype=np.float32)
        # after[t, u]: stages u…t, beside what a region that ends before u holds
        self.after = np.full((count, count, size), np.inf, dtype=np.float32)
        enough = np.full((count, count), size)  # the least memory with which a part can run
        held = np.array(self.held)
        for t in range(count):
            for s in range(t, -1, -1):
                if t < self.end and s < t and self.reach[s] <= t:
                    break  # no region holds both
                row = self.best[s, t]
                for leaf in self.leaves[s]:
                    need, price, kept = self._of(leaf, s, t)
                    if s == t:
                        np.minimum(row[need:], price, out=row[need:])
                    elif max(need, kept) < size:
                        rest = self.best[s + 1, t, max(need - kept, 0) : size - kept]
                        tail = row[max(need, kept) :]
                        np.minimum(tail, rest + price, out=tail)
                last = min(t, self.reach[s])
                if s < last:
                    costs, needs = self._passes(s, t, last)
                    both = self.after[t, s + 1 : last + 1] + self._regions(s, last)
                    both += costs[:, None]
                    least = np.maximum(
                        enough[s, s:last], enough[s + 1 : last + 1, t] + held[s:last]
                    )
                    for line in np.flatnonzero(needs > least):
                        both[line, : needs[line]] = np.inf
                    np.minimum(row, both.min(axis=0), out=row)
                if np.isfinite(row[-1]):
                    enough[s, t] = int(np.isfinite(row).argmax())
                if s > 0 and self.held[s - 1] < size:
                    self.after[t, s, self.held[s - 1] :] = row[: size - self.held[s - 1]]

    def _of(self, leaf: _Leaf, s: int, t: int) -> tuple[int, float, int]:
        """Slots a leaf at s needs when the part ends at t, its cost, and the slots it keeps.

        At least those it keeps, and none at least: a stage may free what was kept before it.
        """
        if s == t < self.end:
            return max(leaf.again + self.later[s + 1], 0), leaf.again_cost, 0
        need = max(leaf.forward + self.waiting[t], leaf.backward + self.later[s + 1], leaf.kept)
        return need, leaf.cost, leaf.kept

    def _regions(self, s: int, last: int) -> np.ndarray:
        """Least cost of the regions s…u-1, for u = s+1…last: those of several hold their input."""
        inside, freed = self.best[s, s:last], min(self.freed[s], self.size)
        if not freed:
            return inside
        made = np.full_like(inside, np.inf)
        made[0] = inside[0]
        made[1:, freed:] = inside[1:, : self.size - freed]
        return made

    def _passes(self, s: int, t: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Cost and slots of running s…u-1 without keeping anything, for u = s+1…last."""
        inside = np.array([0, *self.held[s : last - 1]])
        peaks = np.maximum.accumulate(inside + self.passing[s:last])
        return np.cumsum(self.pass_cost[s:last], dtype=np.float32), peaks + self.waiting[t]

    def schedules(self, most: int = sys.maxsize) -> Iterator[Schedule]:
        """One for each amount of memory at which the cost falls, the cheapest first."""
        whole = self.best[0, self.end]
        before = np.concatenate(([np.inf], whole[:-1]))
        steps = np.flatnonzero(whole < before)[::-1]
        if len(steps) > most:
            steps = steps[np.linspace(0, len(steps) - 1, most).astype(int)]
        for x in steps.tolist():
            items = self._items(0, self.end, x)
            yield evaluate(self.chain, items[1:-1], self.cost)

    def _items(self, s: int, t: int, x: int) -> tuple[Item, ...]:
        """The choices behind `best[s, t, x]`; of equals the one that holds less comes first.

        That makes long runs of the same: cheap blocks first, then those that are kept.
        """
        items: list[Item] = []
        while s <= t:
            choices: list[tuple[float, str | int, int]] = []  # cost, leaf or end, slots held after
            last = min(t, self.reach[s])
            if s < last:
                costs, needs = self._passes(s, t, last)
                totals = self.after[t, s + 1 : last + 1, x] + self._regions(s, last)[:, x] + costs
                totals[needs > x] = np.inf
                choices += [(c, s + 1 + i, self.held[s + i]) for i, c in enumerate(totals.tolist())]
            for leaf in reversed(self.leaves[s]):
                need, price, held = self._of(leaf, s, t)
                if x >= max(need, held):
                    rest = float(self.best[s + 1, t, x - held]) if s < t else 0.0
                    choices.append((price + rest, leaf.name, held))
            enough = min(cost for cost, _, _ in choices) * _SAME
            _, chosen, held = next(choice for choice in choices if choice[0] <= enough)
            if isinstance(chosen, str):
                items.append(chosen)
                s += 1
            else:
                items.append(self._items(s, chosen - 1, x - self.freed[s] * (chosen - 1 > s)))
                s = chosen
            x -= held
        return tuple(items)
