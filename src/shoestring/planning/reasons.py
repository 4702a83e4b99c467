"""Why a plan is as it is, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ..techniques.claims import LOSSLESS, Circumstances
from ..techniques.plan import Plan
from ..units import format_seconds, format_size
from .result import Choice
from .search import Candidate, Estimates
from .settings import Setting


def choices(
    candidate: Candidate,
    estimates: Estimates,
    at: Circumstances,
    milder: Sequence[Setting],
    limit_bytes: int,
    lossless_seconds: float | None = None,
) -> tuple[Choice, ...]:
    """One for each technique of the plan, in the order they are applied.

    `lossless_seconds` are those of a lossless plan that was left for being slow.
    """
    setting = candidate.setting
    made: dict[str, Choice] = {}
    for offer in setting.offers:
        kind, name, why = offer.level(at).kind, offer.technique.name, offer.why
        if kind != LOSSLESS and lossless_seconds is not None:
            why = f"{why}; a lossless plan takes about {format_seconds(lossless_seconds)}"
        elif kind != LOSSLESS:
            why = f"{why}; {_needed(estimates, milder, setting, limit_bytes, at)}"
        made[name] = Choice(name, offer.shown or offer.technique.short(), kind, why)
    if candidate.scheduled is not None:
        name, (shown, why) = candidate.scheduled.name, candidate.scheduled.describe()
        level = max((c.level.kind for c in candidate.scheduled.claims(at)), default=LOSSLESS)
        made[name] = Choice(name, shown, level, why)
    return tuple(made[technique.name] for technique in Plan.of(candidate.plan).techniques)


def _needed(
    estimates: Estimates,
    milder: Sequence[Setting],
    setting: Setting,
    limit_bytes: int,
    at: Circumstances,
) -> str:
    """The least that less lossy plans need, where that is known to be too much."""
    less = (s for s in milder if s.rank(at) < setting.rank(at))
    lowest = min((estimates.least_bytes(s) for s in less), default=0)
    if lowest <= limit_bytes:
        return "nothing less lossy was found to fit"
    return f"less lossy plans need at least {format_size(lowest)}"
