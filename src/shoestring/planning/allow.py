"""The `allow` option: levels of closeness, and lossy techniques by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import InputError, did_you_mean
from ..techniques import registered
from ..techniques.claims import Circumstances, Level
from ..techniques.offers import Offer

_LEVELS = {"exact": Level.EQUAL, "lossless": Level.ROUNDING, "near": Level.NEAR}


@dataclass(frozen=True)
class Allowed:
    """How far from plain training a plan may be, and which techniques may be further."""

    level: Level = Level.NEAR
    names: frozenset[str] = frozenset()
    """Techniques that may do whatever they claim."""
    near_to_be_faster: bool = field(default=False, compare=False)
    """Near is asked for, and so not only a way out where nothing lossless fits."""

    @classmethod
    def of(cls, allow: str | Iterable[str] | None) -> Allowed:
        """Read names, or text with commas; nothing at all is lossless."""
        if allow is None:
            return cls()
        if not isinstance(allow, Iterable):
            raise InputError(f"cannot read `allow` {allow!r}", hint="such as 'lossless', or a list")
        given = allow.split(",") if isinstance(allow, str) else list(allow)
        names = {str(name).strip() for name in given if str(name).strip()}
        known = {kind.allow or kind.name for kind in registered().values()}
        unknown = sorted(names - known - _LEVELS.keys())
        if unknown:
            raise InputError(
                f"unknown `allow` option {unknown[0]!r}",
                hint=did_you_mean(unknown[0], [*_LEVELS, *sorted(known)]),
            )
        levels = [_LEVELS[name] for name in names if name in _LEVELS]
        level = min(levels, default=Level.NEAR if names else Level.ROUNDING)
        return cls(level, frozenset(names & known), level is Level.NEAR and "near" in names)

    def __str__(self) -> str:
        """The names to ask for it."""
        word = next(name for name, level in _LEVELS.items() if level is self.level)
        unsaid = bool(self.names) and self.level is Level.NEAR
        return ",".join([*([] if unsaid else [word]), *sorted(self.names)])

    def permits(self, offer: Offer, at: Circumstances) -> bool:
        """Whether a plan may use it."""
        named = offer.name in self.names
        return named or (not offer.asked and offer.level(at) <= self.level)

    def wider(self, offers: Sequence[Offer], at: Circumstances) -> list[Allowed]:
        """Options that could still be allowed, each with all before it, the least lossy first."""
        made: list[Allowed] = []
        now = self
        for offer in sorted(offers, key=lambda o: (o.level(at), o.lossiness)):
            if offer.asked or now.permits(offer, at):
                continue
            if offer.level(at) <= Level.NEAR:
                now = Allowed(offer.level(at), now.names)
            else:
                now = Allowed(now.level, now.names | {offer.name})
            made.append(now)
        return made
