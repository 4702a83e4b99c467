"""Budget → the plan of least loss, and of those of least time, whose predicted peak fits.

Settings are tried from the least lossy on. Among equally lossy ones the order is best first: each
stands in the queue with the least time it could take, then with the time of its best schedule, and
what comes out of the queue with a schedule is predicted by its own step. Where that is more than
the limit, a schedule is sought that takes so much less.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

from ..errors import BudgetError
from ..memory.prediction import Prediction
from ..memory.work import Work
from ..techniques.base import Technique
from ..techniques.claims import Circumstances, Level
from ..techniques.offers import Scales
from ..techniques.plan import Plan
from ..units import format_size
from .margin import Margin
from .result import FrontPoint
from .settings import Setting

TRIES = 6
"""Schedules of one setting that are predicted at most."""


FASTER = 0.85
"""Of a lossless plan's time, what a near one must do with to take its place where that is allowed;
and of the lossless one's, how little the plain step must take."""
_TRIES_FOR_GRAPH = 3
_TIGHTER = 25
"""Of the limit, the part a schedule must need less if it leaves a technique nothing to do."""
_ABOUT = 1.05
"""A step that is predicted to take so much more than estimated is as fast as it was thought."""

_BETWEEN = (0.25, 0.5, 0.75)
"""Where faster schedules are sought between one that does not fit and the one that was found."""
_WORTH = 0.97
"""Of the time of a plan that fits: others are predicted only if they are estimated to need less."""

_PATIENCE = 12
"""Predictions that do not fit before candidates are put aside."""
_UNLIKELY = 1.05
"""Of the limit: a candidate that needs so much, with what estimates of the same passes left out, is
put aside: predicted only where nothing else fits."""
_ALIKE, _SURELY = 3, 1.005
"""Predictions of the same passes after which the same is said of a candidate that needs so much of
the limit: if what estimates left out differed by less than that."""
_LIKELIEST = 8
"""Of those that were put aside, how many are predicted in the end, if `_PATIENCE` was used up."""

_SMALLEST = 3
"""Settings that can be applied and are estimated to need least, of which the smallest is sought."""


@dataclass(frozen=True)
class Candidate:
    """A plan with what is estimated for it."""

    setting: Setting
    scheduled: Technique | None
    """The scheduler's result for the bytes it was given."""
    peak_bytes: int
    seconds: float
    work: Work
    """Of the passes."""

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.setting.plan(self.scheduled)


class Estimates(Protocol):
    """Estimates for a model, before anything is predicted exactly."""

    def least_seconds(self, setting: Setting) -> float:
        """No plan with this setting takes less."""
        ...

    def least_bytes(self, setting: Setting) -> int:
        """No plan with this setting needs less."""
        ...

    def best(self, setting: Setting, room_bytes: int) -> Candidate | None:
        """The fastest that is estimated to fit."""
        ...

    def tighter(self, candidate: Candidate, missing_bytes: int) -> Candidate | None:
        """The fastest that is estimated to need so much less, by the same setting."""
        ...

    def least(self, setting: Setting, hardly: float = ...) -> Candidate | None:
        """The one of least memory, or a simpler one that takes hardly more."""
        ...

    def front(self, setting: Setting) -> list[Candidate]:
        """From the least memory to the least time."""
        ...

    def around(self, candidate: Candidate) -> list[Candidate]:
        """Some for less and for more memory, by the same setting."""
        ...

    def idle(self, candidate: Candidate) -> bool:
        """Whether a technique of its setting finds nothing to do with its schedule."""
        ...

    def bytes_by(self, setting: Setting, candidate: Candidate) -> int:
        """Estimated for a candidate's schedule by another setting; 0 if that has other blocks."""
        ...

    def predict(self, candidate: Candidate) -> Prediction | None:
        """The final word; None where the plan cannot be applied to the model."""
        ...


@dataclass(frozen=True)
class Found:
    """The candidate that was chosen and what is predicted for it."""

    candidate: Candidate
    predicted: Prediction
    lossless_seconds: float | None = None
    """Of a lossless one that is estimated to fit, and was left for taking far longer."""

    @property
    def seconds(self) -> float:
        """Of a step, as predicted."""
        assert self.predicted.seconds is not None
        return self.predicted.seconds


def search(
    estimates: Estimates,
    settings: Sequence[Setting],
    limit_bytes: int,
    at: Circumstances,
    near_seconds: float = math.inf,
) -> Found | None:
    """The least lossy setting that fits, with the best schedule that was found for it.

    If a lossless one takes more than `near_seconds`, it gives way to a near one that takes `FASTER`
    of its time, or less; one with an offer that comes last gives way to any.
    """
    groups = [(rank[0], list(alike)) for rank, alike in groupby(settings, key=lambda s: s.rank(at))]
    if near_seconds < math.inf:
        lossless = [s for s in settings if s.rank(at)[0] <= Level.ROUNDING and not s.last]
        seconds = _estimated(estimates, lossless, limit_bytes)
        if seconds is None or seconds > near_seconds:
            below = math.inf if seconds is None else FASTER * seconds
            for level, alike in groups:
                if level is Level.NEAR:
                    near = _fastest(estimates, alike, limit_bytes, below)
                    if near is not None:
                        return replace(near, lossless_seconds=seconds)
    for _, alike in groups:
        found = _fastest(estimates, alike, limit_bytes)
        if found is not None:
            return _simpler(estimates, found, alike, limit_bytes)
    return None


def _estimated(estimates: Estimates, settings: Sequence[Setting], limit_bytes: int) -> float | None:
    """Seconds of the fastest that is estimated to fit."""
    best: float | None = None
    for setting in sorted(settings, key=estimates.least_seconds):
        if best is not None and estimates.least_seconds(setting) >= best:
            break
        if estimates.least_bytes(setting) <= limit_bytes:
            found = estimates.best(setting, limit_bytes)
            if found is not None and (best is None or found.seconds < best):
                best = found.seconds
    return best


def _simpler(
    estimates: Estimates, found: Found, settings: Sequence[Setting], limit_bytes: int
) -> Found:
    """The same schedule with fewer techniques, if that fits, too, and takes no longer.

    Each setting is searched for itself, so one with more techniques may come to a schedule first.
    """
    own = found.candidate.setting
    fewer = [
        s for s in settings
        if s.scales == own.scales and {id(o) for o in s.offers} < {id(o) for o in own.offers}
        and estimates.least_seconds(s) < found.seconds and estimates.least_bytes(s) <= limit_bytes
    ]  # fmt: skip
    unforeseen = found.predicted.needed_bytes - found.candidate.peak_bytes
    for setting in sorted(fewer, key=lambda s: len(s.offers))[:1]:
        if estimates.bytes_by(setting, found.candidate) + unforeseen > _UNLIKELY * limit_bytes:
            continue
        candidate = replace(found.candidate, setting=setting)
        predicted = estimates.predict(candidate)
        if predicted is not None and predicted.needed_bytes <= limit_bytes:
            simpler = Found(candidate, predicted)
            if simpler.seconds <= found.seconds:
                return simpler
    return found


def _fastest(
    estimates: Estimates,
    settings: Sequence[Setting],
    limit_bytes: int,
    below_seconds: float = math.inf,
) -> Found | None:
    """Of equally lossy ones, best first.

    Scratch memory of kernels, for one, is in predictions alone. After `_PATIENCE` predictions that
    do not fit, or `_ALIKE` whose estimates left out as much, the next estimate is taken to leave
    out as much as others of the same passes did, at least. Else each of hundreds of settings is
    predicted `TRIES` times before a budget is refused.
    """
    left_out: dict[Scales, list[int]] = {}
    failed = 0
    unlikely: list[tuple[int, Candidate]] = []
    queue: list[tuple[float, int, Setting, Candidate | None, Candidate | None, int, int]] = []
    for number, setting in enumerate(settings):
        least = estimates.least_seconds(setting)
        heapq.heappush(queue, (least, number, setting, None, None, 0, TRIES))
    kept: Found | None = None
    skipped: dict[int, tuple[Candidate, int]] = {}
    while queue:
        least, number, setting, candidate, last, missing, tries = heapq.heappop(queue)
        if least >= (below_seconds if kept is None else kept.seconds):
            break
        if candidate is None:
            if last is None and estimates.least_bytes(setting) <= limit_bytes:
                candidate = estimates.best(setting, limit_bytes)
            elif last is not None and tries:
                candidate = estimates.tighter(last, missing)
            if candidate is not None:
                found = (candidate.seconds, number, setting, candidate, None, 0, tries)
                heapq.heappush(queue, found)
            continue
        if estimates.idle(candidate):  # as the same plan without it, which is tried, too
            missing = limit_bytes // _TIGHTER
            again = (candidate.seconds, number, setting, None, candidate, missing, tries - 1)
            heapq.heappush(queue, again)
            continue
        seen = left_out.get(setting.scales, [])
        foreseen = candidate.peak_bytes + min(seen, default=0)
        alike = len(seen) >= _ALIKE and max(seen) - min(seen) <= (_SURELY - 1) * limit_bytes
        unlikely_from = _SURELY if alike else _UNLIKELY if failed >= _PATIENCE else math.inf
        if foreseen > unlikely_from * limit_bytes:
            unlikely.append((foreseen, candidate))
            missing = foreseen - limit_bytes
            again = (candidate.seconds, number, setting, None, candidate, missing, tries - 1)
            heapq.heappush(queue, again)
            continue
        predicted = estimates.predict(candidate)
        if predicted is None:
            continue
        more = max(predicted.needed_bytes - candidate.peak_bytes, 0)
        left_out.setdefault(setting.scales, []).append(more)
        over = predicted.needed_bytes - limit_bytes
        if over <= 0:
            found_now = Found(candidate, predicted)
            if number in skipped:
                first, less = skipped.pop(number)
                found_now = _between(estimates, first, less, found_now, limit_bytes)
                candidate = found_now.candidate
            if found_now.seconds <= _ABOUT * candidate.seconds:
                return found_now if found_now.seconds < below_seconds else None
            # Slower than estimated: it runs eagerly, a CUDA graph does not fit.
            if found_now.seconds < (below_seconds if kept is None else kept.seconds):
                kept = found_now
            over = predicted.graph_bytes - limit_bytes
            tries = min(tries, _TRIES_FOR_GRAPH)
        failed += 1
        missing = max(over, limit_bytes // 1000)
        if kept is None:
            first, less = skipped.get(number, (candidate, 0))
            skipped[number] = first, less + missing
        again = (candidate.seconds, number, setting, None, candidate, missing, tries - 1)
        heapq.heappush(queue, again)
    if kept is not None:
        return kept
    tries = _LIKELIEST + max(_PATIENCE - failed, 0)
    return _likeliest(estimates, unlikely, limit_bytes, below_seconds, tries)


def _likeliest(
    estimates: Estimates,
    unlikely: list[tuple[int, Candidate]],
    limit_bytes: int,
    below_seconds: float,
    tries: int,
) -> Found | None:
    """One that fits after all, among those that need least by what their estimates left out."""
    for _, candidate in sorted(unlikely, key=lambda one: one[0])[:tries]:
        predicted = estimates.predict(candidate)
        if predicted is not None and predicted.needed_bytes <= limit_bytes:
            found = Found(candidate, predicted)
            if found.seconds < below_seconds:
                return found
    return None


def _between(
    estimates: Estimates, first: Candidate, less_bytes: int, found: Found, limit_bytes: int
) -> Found:
    """A faster one that fits, between the first that did not and the one that was found.

    Reserved bytes do not follow the peak: a schedule that needs more may leave smaller gaps.
    """
    for share in _BETWEEN:
        candidate = estimates.tighter(first, int(share * less_bytes))
        if candidate is None or candidate.seconds > _WORTH * found.seconds:
            break  # the next are slower still
        predicted = estimates.predict(candidate)
        if predicted is not None and predicted.needed_bytes <= limit_bytes:
            made = Found(candidate, predicted)
            return made if made.seconds < found.seconds else found
    return found


def smallest(estimates: Estimates, settings: Sequence[Setting]) -> Found | None:
    """The plan of least predicted memory that was found.

    Each setting stands in the queue with the bytes it needs at least, then with those estimated for
    its smallest schedule; the first `_SMALLEST` that come out with a schedule are predicted.
    """

    def milder(setting: Setting) -> tuple[float, float]:
        return setting.scales.share, -sum(offer.lossiness for offer in setting.offers)

    best: Found | None = None
    tried = 0
    queue: list[tuple[int, tuple[float, float], int, Setting, Candidate | None]] = []
    for number, setting in enumerate(settings):
        queue.append((estimates.least_bytes(setting), milder(setting), number, setting, None))
    heapq.heapify(queue)
    while queue and tried < _SMALLEST:
        needed, _, number, setting, candidate = heapq.heappop(queue)
        known = None if best is None else best.predicted.needed_bytes
        if known is not None and needed >= known:
            break
        if candidate is None:
            least = estimates.least(setting)
            if least is not None:
                about = max(least.peak_bytes, needed)
                heapq.heappush(queue, (about, milder(setting), number, setting, least))
            continue
        predicted = estimates.predict(candidate)
        tried += predicted is not None
        if predicted is not None and (known is None or predicted.needed_bytes < known):
            best = Found(candidate, predicted)
    return best


def budget_error(
    budget_bytes: int,
    margin: Margin,
    least: Found | None,
    hints: Sequence[tuple[str, int]],
    *,
    splits: bool = True,
    why: str = "",
) -> BudgetError:
    """Nothing fits: the smallest that was found, and what to allow to get lower.

    Where the batch does not split there were no microbatches among what was tried.
    """
    ways = [f"allow {name!r} (about {_at_least(size)})" for name, size in hints]
    hint = "; or ".join(ways) or "a smaller model or batch, or an optimizer with less state"
    if not splits:
        hint += "; microbatches need a batch whose tensors share their first dimension"
    if why:
        hint += f"; microbatches are left out: {why}"
    if least is None:
        return BudgetError(f"no plan fits {format_size(budget_bytes)}", hint=hint)
    needed = margin.budget_for(least.predicted.needed_bytes)
    return BudgetError(
        f"no plan fits {format_size(budget_bytes)}; the smallest found is {_at_least(needed)} "
        f"({least.candidate.plan.short()})",
        hint=hint,
        smallest_bytes=needed,
    )


def _at_least(nbytes: int) -> str:
    """The size rounded up to three digits, so that a user can ask for it."""
    unit = 10 ** max(len(str(nbytes)) - 3, 0)
    return format_size(-(-nbytes // unit) * unit, digits=2)


def pareto(points: Sequence[FrontPoint]) -> tuple[FrontPoint, ...]:
    """Those beside which no other needs both less memory and less time."""
    chosen: list[FrontPoint] = []
    for point in sorted(points, key=lambda p: (p.peak_bytes, p.seconds)):
        if not chosen or point.seconds < chosen[-1].seconds:
            chosen.append(point)
    return tuple(chosen)
