"""The settings of a plan beside its schedule: one offer, or none, of each technique."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..techniques.base import Technique
from ..techniques.claims import Circumstances, Level
from ..techniques.offers import Offer, Scales
from ..techniques.plan import Plan, refusal
from .allow import Allowed


@dataclass(frozen=True)
class Setting:
    """A choice among the techniques' offers; empty for the plain step."""

    offers: tuple[Offer, ...] = ()

    @cached_property
    def techniques(self) -> tuple[Technique, ...]:
        """Of all offers."""
        return tuple(offer.technique for offer in self.offers)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the techniques, whatever their settings."""
        return tuple(technique.name for technique in self.techniques)

    @cached_property
    def scales(self) -> Scales:
        """Their combined effect on the passes."""
        return math.prod((offer.scales for offer in self.offers), start=Scales())

    def level(self, at: Circumstances) -> Level:
        """The weakest claim of any."""
        return max((offer.level(at) for offer in self.offers), default=Level.EQUAL)

    def rank(self, at: Circumstances) -> tuple[Level, bool, float]:
        """Less is closer to plain training; all that is lossless ranks alike, last ones last."""
        lossiness = sum(offer.lossiness for offer in self.offers)
        return max(self.level(at), Level.ROUNDING), self.last, lossiness

    @cached_property
    def last(self) -> bool:
        """With an offer for where nothing as lossless fits."""
        return any(offer.last for offer in self.offers)

    def plan(self, scheduled: Technique | None = None) -> Plan:
        """The plan with this setting, and a schedule."""
        return Plan((*self.techniques, *(() if scheduled is None else (scheduled,))))

    @property
    def refused(self) -> bool:
        """Whether an offer is not for the company of another."""
        idle = self.scales.parts == 1 and any(offer.of_parts for offer in self.offers)
        return idle or any(o.refuses(t) for o in self.offers for t in self.techniques)

    def but(self, kept: Iterable[Offer]) -> Setting:
        """With these offers alone."""
        return Setting(tuple(kept))


def settings(
    offers: Sequence[Sequence[Offer]], allowed: Allowed, at: Circumstances
) -> list[Setting]:
    """Every combination that is allowed, the closest to plain training first."""
    pairs: dict[tuple[int, int], bool] = {}

    def fit(one: Offer, other: Offer) -> bool:
        key = id(one), id(other)
        if key not in pairs:
            may_go = _is_idle_beside_others(one) or _is_idle_beside_others(other)
            pairs[key] = may_go or not _refused(one, other)
        return pairs[key]

    chosen: list[tuple[Offer, ...]] = [()]
    for ladder in offers:  # most combinations end early: one offer is not for another's company
        some: list[Offer | None] = [o for o in ladder if allowed.permits(o, at)]
        if not any(o is not None and o.dominates for o in some):
            some.insert(0, None)
        chosen = [
            c if offer is None else (*c, offer)
            for c in chosen
            for offer in some
            if offer is None or all(fit(offer, o) for o in c)
        ]
    found = [Setting(_without_idle(c)) for c in chosen]
    together = [s for s in found if refusal(s.techniques) is None and not s.refused]
    return sorted(together, key=lambda s: s.rank(at))


def _refused(one: Offer, other: Offer) -> bool:
    techniques = one.technique, other.technique
    return refusal(techniques) is not None or any(
        offer.refuses(technique) for offer in (one, other) for technique in techniques
    )


def _is_idle_beside_others(offer: Offer) -> bool:
    return offer.dominates and offer.technique.updates_on_device


def _without_idle(chosen: tuple[Offer, ...]) -> tuple[Offer, ...]:
    """Without an update that another technique's takes the place of."""
    replaced = any(o.technique.updates_on_device and not o.dominates for o in chosen)
    return tuple(o for o in chosen if not (replaced and _is_idle_beside_others(o)))
