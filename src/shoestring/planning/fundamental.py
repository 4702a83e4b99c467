"""Estimates of plans by the `fundamental` accounting: the report's, of an ideal executor.

Each way to schedule the step (`Scheduler.ways`) is counted once on the whole minibatch for each
setting of the other techniques, or between two of them by a line. `predict` counts what runs at
once as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import InputError, UnknownOperationWarning
from ..memory.fundamental import parameter_bytes
from ..memory.model import MemoryProfile, memory_profile
from ..memory.picture import repeated, thinned
from ..memory.prediction import Prediction
from ..memory.work import Work
from ..techniques import registered
from ..techniques.base import Technique
from ..techniques.offers import Context
from ..trace.graph import Trace
from .cost import IDEAL
from .search import Candidate
from .settings import Setting


@dataclass(frozen=True)
class _Counted:
    """One way to schedule the whole minibatch, with some settings of other techniques."""

    activation_bytes: float
    flops: float
    launches: float

    def toward(self, other: _Counted, share: float) -> _Counted:
        """On the line to another."""
        return _Counted(
            self.activation_bytes + (other.activation_bytes - self.activation_bytes) * share,
            self.flops + (other.flops - self.flops) * share,
            self.launches + (other.launches - self.launches) * share,
        )


Techniques = tuple[Technique, ...]


class FundamentalEstimates:
    """Candidates for one training step."""

    def __init__(self, context: Context, trace_of: Callable[[Any], Trace]) -> None:
        self.context, self._trace_of = context, trace_of
        self.room_bytes: int | None = None
        self.passes = Work()
        self._traces: dict[Techniques, Trace] = {}
        self._residents: dict[Techniques, int] = {}
        self._counts: dict[tuple[Technique | None, Techniques], _Counted] = {}
        context.trace = self._trace(Setting())

    def _trace(self, setting: Setting) -> Trace:
        """Of what runs at once."""
        batch = self.context.batch
        plain = Technique.prepare
        preparing = tuple(t for t in setting.techniques if type(t).prepare is not plain)
        if preparing not in self._traces:
            for technique in preparing:
                batch = technique.prepare(batch)
            self._traces[preparing] = self._trace_of(batch)
        return self._traces[preparing]

    @cached_property
    def plain(self) -> Prediction:
        """The step without a plan."""
        return self.predict(Candidate(Setting(), None, 0, 0.0, Work()))

    @cached_property
    def _ways(self) -> list[Technique | None]:
        """Those beside which none needs both less memory and less time, by the plain step."""
        counted: list[tuple[_Counted, Technique | None]] = []
        found = (kind.scheduler(self.context) for kind in registered().values())
        scheduler = next((s for s in found if s is not None), None)
        for way in (None, *(() if scheduler is None else scheduler.ways())):
            try:
                counted.append((self._count(way, ()), way))
            except InputError:  # a strategy by blocks, for a model that has none
                continue
        counted.sort(key=lambda pair: (pair[0].activation_bytes, pair[0].flops))
        kept: list[tuple[_Counted, Technique | None]] = []
        for count, way in counted:
            if not kept or count.flops < kept[-1][0].flops:
                kept.append((count, way))
        return [way for _, way in kept]

    def _count(self, way: Technique | None, techniques: Techniques) -> _Counted:
        key = way, techniques
        if key not in self._counts:
            self._counts[key] = self._made_count(way, techniques)
        return self._counts[key]

    def _made_count(self, way: Technique | None, techniques: Techniques) -> _Counted:
        for technique in techniques:
            if ends := technique.between():
                first, second = (
                    self._count(way, tuple(end if t is technique else t for t in techniques))
                    for end in ends[:2]
                )
                return first.toward(second, ends[2])
        made = _profile(self._trace(Setting()), (*techniques, *([] if way is None else [way])))
        return _Counted(made.activation_bytes, _flops(made), len(made.timeline.labels))

    # -- estimates -----------------------------------------------------------------------------

    def _resident(self, techniques: Techniques) -> int:
        if techniques not in self._residents:
            trace = self._trace(Setting())
            for technique in techniques:
                trace = technique.predict(trace)
            held = parameter_bytes(trace)
            self._residents[techniques] = (
                held.model_bytes + held.gradient_bytes + held.optimizer_state_bytes
            )
        return self._residents[techniques]

    def front(self, setting: Setting) -> list[Candidate]:
        """From the least memory to the least time."""
        others = tuple(t for t in setting.techniques if t.changes_update)
        by = setting.scales
        made = []
        for way in self._ways:
            counted = self._count(way, others)
            work = Work(counted.flops, 0, counted.launches * by.parts)
            peak = self._resident(others) + int(counted.activation_bytes * by.share)
            made.append(Candidate(setting, way, peak, IDEAL.seconds(work), work))
        return made

    def tighter(self, candidate: Candidate, missing_bytes: int) -> Candidate | None:
        """The fastest that needs so much less, by the same setting."""
        return self.best(candidate.setting, candidate.peak_bytes - missing_bytes)

    def least(self, setting: Setting, hardly: float = 0.0) -> Candidate | None:
        """The one of least memory."""
        return next(iter(self.front(setting)), None)

    def around(self, candidate: Candidate) -> list[Candidate]:
        """All ways by the same setting."""
        return self.front(candidate.setting)

    def least_seconds(self, setting: Setting) -> float:
        """Of the ways there are."""
        return min(c.seconds for c in self.front(setting))

    def least_bytes(self, setting: Setting) -> int:
        """Of the ways there are."""
        return min(c.peak_bytes for c in self.front(setting))

    def likely_room(self, limit_bytes: int) -> int:
        """All of it: estimates are exact."""
        return limit_bytes

    def best(self, setting: Setting, room_bytes: int) -> Candidate | None:
        """The fastest that fits."""
        found = [c for c in self.front(setting) if c.peak_bytes <= room_bytes]
        return min(found, key=lambda c: c.seconds, default=None)

    def idle(self, candidate: Candidate) -> bool:
        """Nothing is known of what a schedule leaves to others."""
        return False

    def predict(self, candidate: Candidate) -> Prediction:
        """Counted on what runs at once."""
        parts = candidate.setting.scales.parts
        made = _profile(self._trace(candidate.setting), candidate.plan.techniques)
        flops = _flops(made) * parts
        work = Work(flops, 0, len(made.timeline.labels) * parts)
        seconds = IDEAL.seconds(work)
        return Prediction(
            made.peak_bytes, "fundamental", "any", seconds, flops, IDEAL.source,
            curve=thinned(repeated(made.timeline.totals, parts)),
        )  # fmt: skip


def _profile(trace: Trace, techniques: Techniques) -> MemoryProfile:
    for technique in sorted(techniques, key=lambda t: t.order):
        trace = technique.predict(trace)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnknownOperationWarning)
        return memory_profile(trace)


def _flops(made: MemoryProfile) -> int:
    return made.forward_flops + made.backward_flops + made.recompute_flops
