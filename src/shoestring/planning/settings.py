"""The settings of a plan beside its schedule: one offer, or none, of each technique."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

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
    ladders: list[list[Offer | None]] = []
    for ladder in offers:
        some = [offer for offer in ladder if allowed.permits(offer, at)]
        ladders.append([*some] if any(o.dominates for o in some) else [None, *some])
    found = [Setting(_without_idle(chosen)) for chosen in product(*ladders)]
    together = [s for s in found if refusal(s.techniques) is None and not s.refused]
    return sorted(together, key=lambda s: s.rank(at))


def _without_idle(chosen: Iterable[Offer | None]) -> tuple[Offer, ...]:
    """Without an update that another technique's takes the place of."""
    made = [offer for offer in chosen if offer is not None]
    replaced = any(o.technique.updates_on_device and not o.dominates for o in made)
    return tuple(
        o for o in made if not (replaced and o.dominates and o.technique.updates_on_device)
    )
