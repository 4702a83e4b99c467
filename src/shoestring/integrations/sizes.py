"""Bytes that CUDA's allocator reserves for a configuration, by plan, batch and length.

A model of many equal layers is traced with two and with four of them. The bytes of each phase of
a step, forward, backward and update, grow by the same amount with every layer; so do its seconds.
Live bytes are linear in examples, and nearly so in tokens, so that a few sizes predict the largest.
Free bytes between live blocks do not grow so evenly: the plans that are named are traced with all
layers.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from ..memory.device import device_timeline
from ..memory.items import leaves, part, read, write
from ..memory.reserved import Reserved, reserved
from ..planning.margin import Margin
from ..planning.planner import MARGIN, Planner
from ..planning.ranks import SharedStep
from ..planning.search import Candidate
from ..planning.settings import Setting
from ..step.trace_step import trace_plan
from ..techniques.plan import Plan
from ..trace.graph import Trace
from ..trace.passes import peak_only
from .configurations import Configured, loss_of

FEW, MORE = 2, 4
"""Layers that are traced in place of all."""
IN_FLIGHT = (4, 6)
"""Under `fsdp`, which has three of them in flight at once."""
_PHASES = ("forward", "backward", "optimizer")
_MOST_SETTINGS, _MOST_TRACED = 80, 4
"""Settings beside schedules that are estimated, and those of them that are traced."""
_MOST_POINTS = 12
"""Schedules between the plain step and the smallest."""
_LEAST = 3
"""Plans of least memory that are compared on a large batch."""
_MOST_LENGTHS, _MOST_SIZE = 3, 10**9
"""Sizes traced beyond the first ones, where memory grows faster than by a line."""


@dataclass(frozen=True)
class Point:
    """A plan with what is estimated for it."""

    plan: Plan
    eager_bytes: float
    captured_bytes: float
    eager_slower: float
    captured_slower: float
    """Time to that of the plain step, as a CUDA graph."""


@dataclass(frozen=True)
class Chosen:
    """A plan for some room, as it runs."""

    plan: Plan
    needed_bytes: int
    slower: float


@dataclass(frozen=True)
class _Line:
    """Bytes by the number of layers: allocated in each phase, and what is reserved beside that."""

    at_few: dict[str, float]
    each: dict[str, float]
    beside: Reserved

    def allocated(self, more_layers: float) -> float:
        return max(self.at_few[p] + more_layers * self.each[p] for p in _PHASES)

    def eager(self, more_layers: float) -> float:
        return self.allocated(more_layers) + self.beside.eager_bytes


class Sizes:
    """Plans for one configuration, from the plain step to the smallest."""

    def __init__(
        self,
        model: Configured,
        optimizer: str,
        allow: str | None = "lossless",
        ranks: SharedStep | None = None,
    ) -> None:
        self.ranks = ranks or SharedStep(1, "ddp")
        """Each has a part of the batch: sizes are those of a rank."""
        if model.batch < self.ranks.count:
            model = model.sized(batch=self.ranks.count)
        self.model = model.sized(batch=-(-model.batch // self.ranks.count))
        self.optimizer, self._allow = optimizer, allow
        depth = model.depth
        few, more = IN_FLIGHT if self.ranks.sharding == "fsdp" else (FEW, MORE)
        self._layers: tuple[int, ...] = (few, more) if depth and depth > more + 1 else ()
        self._more, self._apart = (depth or 0) - few if self._layers else 0, more - few
        self._known: dict[tuple[str, bool], int] = {}
        self._lines: dict[tuple[str, int, int], _Line] = {}
        self._by_size: dict[str, dict[int, float]] = {}

    # -- for some room -------------------------------------------------------------------------

    def choose(self, room_bytes: float) -> Chosen | None:
        """The fastest plan whose own step fits, traced with all layers."""
        ways = [(p.captured_slower, p.captured_bytes, True, p) for p in self.front]
        if self.ranks.count > 1:  # collectives are not captured
            ways = []
        ways += [(p.eager_slower, p.eager_bytes, False, p) for p in self.front]
        for slower, nbytes, captured, point in sorted(ways, key=lambda way: way[:3]):
            if nbytes > room_bytes:
                continue
            needed = self.exactly(point.plan, captured=captured)
            if needed <= room_bytes:
                return Chosen(point.plan, needed, slower)
        return None

    @cached_property
    def least(self) -> Chosen:
        """The plan that needs least, as it was found."""
        some = sorted(self.front, key=lambda p: p.eager_bytes)[:_LEAST]
        point = min(some, key=lambda p: self.exactly(p.plan))
        return Chosen(point.plan, self.exactly(point.plan), point.eager_slower)

    @cached_property
    def plain_bytes(self) -> int:
        """Of the step without a plan."""
        return self.exactly(Plan())

    @cached_property
    def margin(self) -> Margin:
        """Of all layers."""
        known = [planner.margin.known_bytes for planner in self._planners]
        each = (known[-1] - known[0]) / self._apart if self._layers else 0.0
        whole = known[0] + self._more * each
        if self.ranks.sharding == "fsdp":
            whole /= self.ranks.count
        return Margin(MARGIN["cuda"], int(whole))

    # -- sizes of a batch ----------------------------------------------------------------------

    def largest(self, name: str, room_bytes: float, most_bytes: float) -> int:
        """The most examples ("batch"), or tokens of one example, that fit at once; 0 for none.

        `most_bytes` is the most room that is asked for: sizes are traced up to what it holds.
        """
        known = self._by_size.setdefault(name, {})
        if not known:
            model = self.model
            first = {*(model.lengths if name == "tokens" else model.batches)}
            if name == "tokens" and model.batch == 1:  # where all layers were traced
                first.add(model.tokens)
            known.update({size: self._sized(name, size) for size in sorted(first)})
            for _ in range(_MOST_LENGTHS):
                far = min(_at(known, most_bytes), self._most_of(name))
                if far <= max(known):
                    break
                expected, known[far] = _expected(known, far), self._sized(name, far)
                if known[far] <= 1.02 * expected:
                    break
        return _at(known, room_bytes)

    def _most_of(self, name: str) -> int:
        return (self.model.longest or _MOST_SIZE) if name == "tokens" else _MOST_SIZE

    def _sized(self, name: str, size: int) -> float:
        """Bytes all layers reserve for so many examples, or for one of so many tokens."""
        batch, tokens = (size, self.model.tokens) if name == "batch" else (1, size)
        return self._line(self._whole, batch, tokens).eager(self._more) + self._beside

    @cached_property
    def _beside(self) -> float:
        """Bytes of all layers less the extrapolation from a few, at the requested size."""
        return self._off(self._whole)

    def _off(self, plan: Plan) -> float:
        """The same of another plan: a share of few layers' tensors is not that of all layers'."""
        line = self._line(plan, self.model.batch, self.model.tokens)
        return self.exactly(self._for_all(plan)) - line.eager(self._more)

    @cached_property
    def _whole(self) -> Plan:
        """The plan of least memory that runs a large batch at once; of the traced layers."""
        alone = [p for p in self.front if p.plan.at_once is None]
        alone.sort(key=lambda p: p.eager_bytes)
        large = (1, self.model.lengths[-1])
        if not self.model.has_context:
            large = (self.model.batches[-1], self.model.tokens)
        few = [self._for_traced(p.plan) for p in alone[:_LEAST]]
        return min(
            few, key=lambda plan: self._line(plan, *large).eager(self._more) + self._off(plan)
        )

    def _for_traced(self, plan: Plan) -> Plan:
        return _repeated(plan, self._layers[-1]) if self._layers else plan

    # -- plans ---------------------------------------------------------------------------------

    @cached_property
    def front(self) -> list[Point]:
        """From the plain step to the smallest, for all layers."""
        last = self._planners[-1]
        mildest = self._settings[0]
        fronts = [_spread(_schedules(planner, mildest), _MOST_POINTS) for planner in self._planners]
        plain = [self._point(Plan(), 1.0, self._plain_captured())]
        kept = Candidate(mildest, None, 0, 0.0, last.estimates.passes)
        ends = [kept, *fronts[-1][-1:]]
        points = [self._as_point(candidate, fronts) for candidate in ends]
        if len(points) == 2 and points[1].eager_bytes < points[0].eager_bytes:
            high, low = fronts[-1][0].peak_bytes, fronts[-1][-1].peak_bytes
            for candidate in fronts[-1][:-1]:
                # Between the two ends by their estimates: a maximum of sums lies below its chord.
                share = (candidate.peak_bytes - low) / max(high - low, 1)
                points.append(self._between(points[1], points[0], share, candidate, fronts))
        return [*plain, *points, *self._with_offers(fronts)]

    def _between(
        self, low: Point, high: Point, share: float, candidate: Candidate, fronts: Any
    ) -> Point:
        eager, captured = self._slower(candidate, fronts)
        return Point(
            self._for_all(candidate.plan, spread=True),
            low.eager_bytes + share * (high.eager_bytes - low.eager_bytes),
            low.captured_bytes + share * (high.captured_bytes - low.captured_bytes),
            eager,
            captured,
        )

    def _as_point(self, candidate: Candidate, fronts: list[list[Candidate]]) -> Point:
        return self._point(candidate.plan, *self._slower(candidate, fronts))

    def _point(self, plan: Plan, eager: float, captured: float) -> Point:
        line = self._line(plan, self.model.batch, self.model.tokens)
        live = line.allocated(self._more)
        return Point(
            self._for_all(plan),
            live + line.beside.eager_bytes,
            live + line.beside.captured_bytes,
            eager,
            captured,
        )

    def _with_offers(self, fronts: list[list[Candidate]]) -> list[Point]:
        """Of every other lossless setting, microbatches and the like, what is worth having."""
        last = self._planners[-1]
        some = self._settings[1:]
        known: list[Candidate] = []
        between = {id(offer) for ladder in last._offers for offer in ladder[:-1]}
        some.sort(key=lambda s: sum(id(offer) in between for offer in s.offers))  # ends first
        for setting in [s for s in some if s.offers][:_MOST_SETTINGS]:
            if found := last.estimates.front(setting):
                least = min(found, key=lambda c: c.peak_bytes)
                fewest = last.estimates.least(setting)
                known.append(
                    least if fewest is None else replace(fewest, peak_bytes=least.peak_bytes)
                )
                known.append(min(found, key=lambda c: c.seconds))
        best: list[Candidate] = []
        for candidate in sorted(known, key=lambda c: (c.seconds, c.peak_bytes)):
            if not best or candidate.peak_bytes < best[-1].peak_bytes:
                best.append(candidate)
        chosen = _spread(best, _MOST_TRACED)
        whole = [c for c in best if c.plan.at_once is None]  # the longest context is this one's
        chosen += [c for c in whole[-1:] if c not in chosen]
        return [self._as_point(candidate, fronts) for candidate in chosen]

    @cached_property
    def _settings(self) -> list[Setting]:
        """Candidates to try, the least lossy first."""
        last = self._planners[-1]
        every = last._settings(last.allowed)
        every = [s for s in every if all(t.extrapolates for t in s.techniques)]
        if self.ranks.count == 1:
            return every
        model, optimizer = last.context.model, last.context.optimizer
        if (why := self.ranks.refuses(Plan(), model, optimizer)) is not None:
            raise why
        return [s for s in every if self.ranks.refuses(s.plan(), model, optimizer) is None]

    # -- seconds -------------------------------------------------------------------------------

    def _slower(self, candidate: Candidate, fronts: list[list[Candidate]]) -> tuple[float, float]:
        """Time to that of the plain step: eager, and as a CUDA graph where it becomes one."""
        blocks = _blocks(candidate.plan)
        same = _stretched(candidate.plan, blocks).to_dict()
        found: list[tuple[float, float]] = []
        for front in fronts[:-1]:  # fewer layers may have no such schedule
            near = (c for c in front if _stretched(c.plan, blocks).to_dict() == same)
            found += [_both(self._planners[0], c) for c in near][:1]
        found.append(_both(self._planners[-1], candidate))
        base = [_both(planner, None)[0] for planner in self._planners]
        if len(found) < len(base):
            return found[0][0] / base[-1], found[0][1] / base[-1]
        eager, captured = (self._over_all([f[way] for f in found]) for way in (0, 1))
        return eager / self._over_all(base), captured / self._over_all(base)

    def _plain_captured(self) -> float:
        both = [_both(planner, None) for planner in self._planners]
        return self._over_all([b[1] for b in both]) / self._over_all([b[0] for b in both])

    def _over_all(self, seconds: list[float]) -> float:
        if not self._layers:
            return seconds[0]
        return seconds[0] + (seconds[1] - seconds[0]) / self._apart * self._more

    # -- traces --------------------------------------------------------------------------------

    def exactly(self, plan: Plan, *, captured: bool = False) -> int:
        """Bytes that a step of all layers reserves, eager or as a CUDA graph."""
        key = (str(plan.to_dict()), captured)
        if key not in self._known:
            taken = reserved(self._traced(plan, *self._all_layers, captured=captured))
            self._known[key] = taken.captured_bytes if captured else taken.eager_bytes
        return self._known[key]

    @cached_property
    def _all_layers(self) -> tuple[Any, Any]:
        return self.model.build()

    def _traced(self, plan: Plan, model: Any, data: Any, *, captured: bool = False) -> Trace:
        with peak_only():
            trace = trace_plan(
                plan, model, data, loss=loss_of, optimizer=self.optimizer, device="cuda",
                captured=captured, trained=self._trained(model),
            )  # fmt: skip
        return self.ranks.of_one(trace, plan, model, data)

    def _trained(self, model: Any) -> set[str]:
        """Parameters that get a gradient, where few layers tell that all do that can; else none.

        They save a run of the passes for state that a step finds there.
        """
        named = [
            {name for name, p in each.named_parameters() if p.requires_grad}
            for each in (*self._built, model)
        ]
        known = (set(p.estimates.trained) for p in self._planners)  # type: ignore[union-attr]
        alike = all(some == every for some, every in zip(known, named[:-1], strict=True))
        return named[-1] if alike else set()

    def _line(self, plan: Plan, batch: int, tokens: int) -> _Line:
        # A plan may come as it was found, or written for the traced layers.
        key = (str(self._for_traced(plan).to_dict()), batch, tokens)
        if key not in self._lines:
            self._lines[key] = self._traced_line(plan, batch, tokens)
        return self._lines[key]

    def _traced_line(self, plan: Plan, batch: int, tokens: int) -> _Line:
        sized = self.model.sized(batch=batch, tokens=tokens)
        data = (sized.with_layers(1) if self._layers else sized).build()[1]
        found = []
        for model, layers in zip(self._built, self._layers or (None,), strict=True):
            scaled = plan if layers is None else _repeated(plan, layers)
            found.append(self._traced(scaled, model, data))
        phases = [_by_phase(trace) for trace in found]
        live, taken = int(max(phases[-1].values())), reserved(found[-1])
        beside = Reserved(taken.eager_bytes - live, taken.captured_bytes - live)
        if len(found) == 1:
            return _Line(phases[0], dict.fromkeys(_PHASES, 0.0), beside)
        each = {p: (phases[1][p] - phases[0][p]) / self._apart for p in _PHASES}
        return _Line(phases[0], each, beside)

    def _for_all(self, plan: Plan, *, spread: bool = False) -> Plan:
        """The plan of the traced layers, for all of them."""
        if not self._layers:
            return plan
        return (_stretched if spread else _repeated)(plan, self._more + self._layers[0])

    @cached_property
    def _built(self) -> list[Any]:
        """Models of few and of more layers, or the whole one alone."""
        if not self._layers:
            return [self.model.build()[0]]
        return [self.model.with_layers(n).build()[0] for n in self._layers]

    @cached_property
    def _planners(self) -> list[Planner]:
        _, batch = self.model.build() if not self._layers else self.model.with_layers(1).build()
        return [
            Planner(
                m, batch, loss=loss_of, optimizer=self.optimizer, allow=self._allow, device="cuda"
            )
            for m in self._built
        ]


def _schedules(planner: Planner, setting: Setting) -> list[Candidate]:
    """From the most memory to the least, by activations alone: ranks share the rest."""
    estimates: Any = planner.estimates
    scheduler = estimates._passes(setting).scheduler
    if scheduler is None:
        return []
    found = scheduler.front(estimates._conditions(setting).of_activations)
    front = [estimates._candidate(setting, one) for one in found]
    return sorted((c for c in front if c.scheduled is not None), key=lambda c: -c.peak_bytes)


def _spread(candidates: list[Candidate], most: int) -> list[Candidate]:
    """Some of them, both ends among them."""
    apart = max(len(candidates) - 1, 1) / most
    kept = sorted({round(n * apart) for n in range(most + 1)})
    return [candidates[n] for n in kept if n < len(candidates)]


def _both(planner: Planner, candidate: Candidate | None) -> tuple[float, float]:
    """Seconds of an eager step and of a captured one, where it can be; None for the plain step."""
    estimates: Any = planner.estimates
    setting = Setting() if candidate is None else candidate.setting
    work = estimates.passes if candidate is None else candidate.work
    eager = estimates._seconds(setting, work, False)
    if not estimates._capturable(setting):
        return eager, eager
    return eager, estimates._seconds(setting, work, True)


def _expected(known: dict[int, float], size: int) -> float:
    """Bytes of a size, on the line through its neighbors."""
    sizes = sorted(known)
    place = min(max(bisect(sizes, size), 1), len(sizes) - 1)
    low, high = sizes[place - 1], sizes[place]
    return known[low] + (known[high] - known[low]) * (size - low) / (high - low)


def _at(known: dict[int, float], room: float) -> int:
    """The largest size that fits, on lines between those that are known; 0 for none."""
    sizes = sorted(known)
    known = dict(zip(sizes, accumulate((known[size] for size in sizes), max), strict=True))
    over = next((n for n, size in enumerate(sizes) if known[size] > room), len(sizes) - 1)
    low, high = sizes[max(over, 1) - 1], sizes[max(over, 1)]
    each = (known[high] - known[low]) / (high - low)
    if each <= 0:
        return high if known[high] <= room else 0
    return max(math.floor(low + (room - known[low]) / each), 0)


def _by_phase(trace: Trace) -> dict[str, float]:
    timeline = device_timeline(trace)
    totals = timeline.totals
    found = dict.fromkeys(_PHASES, 0.0)
    for (_, phase, _), total in zip(timeline.labels, totals, strict=True):
        name = str(phase).lower()
        key = next((p for p in _PHASES if p.startswith(name[:4])), "backward")
        found[key] = max(found[key], float(total))
    return found


def _blocks(plan: Plan) -> int:
    """For how many blocks its schedule is; 0 where it has none."""
    held = (settings.get("schedule") for settings in plan.to_dict().values())
    return next((sum(leaves(item) for item in read(texts)) for texts in held if texts), 0)


def _stretched(plan: Plan, blocks: int) -> Plan:
    """A plan by block for another number of blocks: each block as the one at its place."""
    return _placed(plan, blocks, lambda n, known: n * known // blocks)


def _repeated(plan: Plan, blocks: int) -> Plan:
    """The same where the ends stay what they are: the last block is never recomputed, say."""

    def place(n: int, known: int) -> int:
        if n == 0 or n == blocks - 1 or known < 3:
            return 0 if n == 0 else known - 1 if n == blocks - 1 else 0
        return 1 + (n - 1) * (known - 2) // (blocks - 2)

    return _placed(plan, blocks, place)


def _placed(plan: Plan, blocks: int, place: Callable[[int, int], int]) -> Plan:
    changed: dict[str, Any] = {}
    for name, settings in plan.to_dict().items():
        if "schedule" in settings and blocks:
            items = read(settings["schedule"])
            known = sum(leaves(item) for item in items)
            at = [place(n, known) for n in range(blocks)]
            settings = {k: v for k, v in settings.items() if k != "blocks"}
            settings["schedule"] = list(write([part(items, n, n + 1)[0] for n in at]))
        changed[name] = settings
    return Plan.from_dict(changed)
