"""Which blocks to recompute, for any room: the planner's side of checkpointing.

A model with repeated blocks is a chain (`block_chain`), and `solve` finds the best schedule for it.
One without has a few named strategies to choose from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...errors import InputError, TraceError
from ...memory.device import device_timeline
from ...memory.items import Item, leaves, read
from ...memory.timeline import resident_bytes
from ...memory.work import Work, work_of_passes
from ...trace.graph import Role, Trace
from ..base import Technique
from ..offers import Conditions, Context, Scheduled
from ..plan import Plan, refusal
from .adapt import adapted
from .block_chain import estimate_chain
from .solve import front, solve
from .stages import Chain, Schedule, evaluate

_NAMED = ("no-bn", "every-2", "every-4", "every-8", "every-16", "every-32")
"""Ways to checkpoint a model without repeated blocks; the first recomputes no module."""
_COUNTED = ("no-bn", *(f"residual-{m}{star}" for m in (1, 2, 3, 4, 6, 8) for star in ("", "*")))
"""Strategies the fundamental accounting counts."""
_AROUND = (0.85, 1.15)
_SCHEDULES = 48
"""Of a chain's front, counted by the fundamental accounting."""
DEEPEST = 32
"""Regions within regions: recomputing each takes a dozen of Python's 1,000 frames, or more."""


@dataclass(frozen=True)
class _Way:
    """One named strategy on the whole minibatch; bytes are above what is resident."""

    technique: Technique | None
    activation_bytes: int
    gradient_bytes: int
    """At the peak."""
    work: Work


class BlockScheduler:
    """The schedules of one training step."""

    def __init__(
        self,
        context: Context,
        of: Callable[[Sequence[Item], tuple[str, ...]], Technique],
        named: Callable[[str], Technique],
    ) -> None:
        self._context, self._of, self._by_name = context, of, named
        self._chain: Chain | None = None
        self._wrapped_differs = False
        self.kept: Work | None = None
        found: list[Trace] = []
        try:
            self._chain = estimate_chain(
                context.trace_step, context.model, of, seen=found.append,
                plain=context.found.get("chain"),
            )  # fmt: skip
            context.found.setdefault("chain", self._chain)
            self._chain = _without_refused(self._chain, context.applied, of)
            inputs = tuple(stage.held_bytes for stage in self._chain.blocks)
            context.found.setdefault("region_inputs", inputs)
        except InputError:
            if not found:
                raise
        kept = found[0]
        # Blocks that are wrapped have BatchNorm by kernels of our own, which the step has not.
        if any(op.name.startswith("shoestring.bn_") for op in kept.ops):
            self.kept, self._wrapped_differs = work_of_passes(kept), True
        elif "trace" not in vars(context):
            context.trace = kept

    def least_bytes(self, at: Conditions) -> int:
        """Bytes that no schedule changes, and those of the largest block."""
        if self._chain is None:
            return at.floor_bytes
        chain = adapted(self._chain, at)
        alone = (
            min(min(o.backward_bytes, o.again_bytes) for o in stage.options.values())
            for stage in chain.stages
        )
        return max(chain.floor_bytes, chain.fixed_bytes + max(alone))

    def best(self, at: Conditions, room_bytes: int) -> Scheduled | None:
        """By the dynamic program over the chain, or of the named ways."""
        if self._chain is not None:
            schedule = solve(adapted(self._chain, at), room_bytes, at.cost)
            if schedule is None or _runs(schedule):
                return None if schedule is None else self._scheduled(at, schedule)
        found = [s for s in self.front(at) if s.peak_bytes <= room_bytes]
        return min(found, key=lambda s: at.cost(s.work), default=None)

    def around(self, at: Conditions, peak_bytes: int) -> list[Scheduled]:
        """The fastest for somewhat less and somewhat more memory."""
        if self._chain is None:
            return self.front(at)
        found = (self.best(at, int(peak_bytes * share)) for share in _AROUND)
        return [one for one in found if one is not None]

    def front(self, at: Conditions) -> list[Scheduled]:
        """Every schedule worth having, but those too deep to run."""
        if self._chain is None:
            return sorted((self._by_way(at, w) for w in self._ways), key=lambda s: s.peak_bytes)
        found = front(adapted(self._chain, at), at.cost)
        return [self._scheduled(at, s) for s in found if _runs(s)]

    def peak_bytes(self, at: Conditions, technique: Technique | None) -> int:
        """Of a schedule that it found before, or another one for the same blocks; else 0."""
        if self._chain is None:
            ways = [w for w in self._ways if w.technique == technique]
            return self._by_way(at, ways[0]).peak_bytes if ways else 0
        told = {} if technique is None else technique.to_dict()
        paths = tuple(stage.name for stage in self._chain.blocks)
        if technique is not None and tuple(told.get("blocks", ())) != paths:
            return 0
        items = read(told["schedule"]) if technique is not None else ("keep",) * len(paths)
        return evaluate(adapted(self._chain, at), items, at.cost).peak_bytes

    def ways(self) -> Iterable[Technique]:
        """The report's strategies, and schedules along the front of the model's chain."""
        yield from map(self._by_name, _COUNTED)
        if self._chain is None:
            return
        paths = tuple(stage.name for stage in self._chain.blocks)
        found = front(self._chain)
        for schedule in found[:: max(1, len(found) // _SCHEDULES)]:
            yield self._of(schedule.items, paths)
        joins = [stage.joins for stage in self._chain.blocks]
        for size in (1, 2, 3):
            for count in range(size, len(paths) + 1, max(size, len(paths) // 12)):
                rest: tuple[Item, ...] = ("cheap",) * (len(paths) - count)
                yield self._of((*_groups(joins[:count], size), *rest), paths)

    @cached_property
    def _plain(self) -> Work:
        """Of the passes as they are."""
        return work_of_passes(self._context.trace)

    def _scheduled(self, at: Conditions, schedule: Schedule) -> Scheduled:
        assert self._chain is not None
        paths = tuple(stage.name for stage in self._chain.blocks)
        differs = self._wrapped_differs and at.scales.width == 1  # 16 bits have the kernels anyway
        plain = all(item == "keep" for item in schedule.items) and not differs
        parts = at.scales.parts
        kept = self.kept or self._plain
        return Scheduled(
            None if plain else self._of(schedule.items, paths),
            schedule.peak_bytes,
            kept + schedule.again.times(parts, parts) + self._over_link(at, schedule),
        )

    def _over_link(self, at: Conditions, schedule: Schedule) -> Work:
        """Inputs of regions that go to the host and come back: each is read and written once."""
        if self._chain is None or at.scales.inputs_here is None:
            return Work()
        nbytes = count = 0
        for stage, item in zip(self._chain.blocks, schedule.items, strict=True):
            if not isinstance(item, str):
                nbytes, count = nbytes + stage.held_bytes, count + 1
        return Work(bytes_moved=2 * nbytes, launches=2 * count, link=nbytes)

    # -- models without blocks -----------------------------------------------------------------

    @cached_property
    def _ways(self) -> list[_Way]:
        ways = [self._way(None, self._context.trace)]
        for name in _NAMED:
            chosen = self._by_name(name)
            try:
                trace = self._context.trace_step(Plan([chosen]), optimizer=None)
                way = self._way(chosen, trace)
            except (InputError, TraceError):
                continue
            if all(way.activation_bytes < other.activation_bytes for other in ways):
                ways.append(way)
        return ways

    def _way(self, technique: Technique | None, trace: Trace) -> _Way:
        timeline = device_timeline(trace)
        peak = timeline.roles_at(timeline.peak_instant)
        gradients = peak[Role.GRADIENT]
        above = sum(peak.values()) - gradients - resident_bytes(timeline)
        return _Way(technique, above, gradients, work_of_passes(trace))

    def _by_way(self, at: Conditions, way: _Way) -> Scheduled:
        by = at.scales
        gradients = at.gradient_bytes if at.adds else int(way.gradient_bytes * at.gradients)
        peak = at.resident_bytes + gradients + int(way.activation_bytes * by.share * by.width)
        return Scheduled(way.technique, max(peak, at.floor_bytes), way.work)


def _without_refused(
    chain: Chain,
    applied: Sequence[Technique],
    of: Callable[[Sequence[Item], tuple[str, ...]], Technique],
) -> Chain:
    """The chain without the options that cannot be in a plan with these techniques."""

    def goes(option: str) -> bool:
        return refusal((*applied, of((option,) * len(chain.blocks), ()))) is None

    options = {name for stage in chain.blocks for name in stage.options}
    left = {name for name in options if name == "keep" or goes(name)}
    if left == options:
        return chain
    blocks = (
        replace(stage, options={n: o for n, o in stage.options.items() if n in left})
        for stage in chain.blocks
    )
    return replace(chain, blocks=tuple(blocks))


def _runs(schedule: Schedule) -> bool:
    def depth(item: Item) -> int:
        return 0 if isinstance(item, str) else 1 + max(map(depth, item))

    return max(map(depth, schedule.items)) <= DEEPEST


def _groups(joins: list[bool], size: int) -> list[Item]:
    """residual-M* of so many blocks: nested regions of M, fewer where blocks do not join."""
    made: list[Item] = []
    group: list[Item] = []
    for joined in joins:
        group.append(("cheap",))
        if len(group) == size or not joined:
            made.append(tuple(group) if len(group) > 1 else group[0])
            group = []
    return [*made, *group]


def summary(items: Sequence[Item]) -> str:
    """A schedule in words."""
    total = sum(map(leaves, items))
    counts = {
        "recomputes": sum(leaves(item) for item in items if not isinstance(item, str)),
        "recomputes cheap outputs in": items.count("cheap"),
        "recomputes cheap and wide outputs in": items.count("lean"),
    }
    parts = [f"{how} {count}" for how, count in counts.items() if count]
    if not parts:  # wrapped all the same
        return "recomputes nothing; BatchNorm in kernels of its own keeps its input alone"
    return f"{', '.join(parts)} of {total} blocks"
