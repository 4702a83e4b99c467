"""How close planned training is to plain training: what a technique claims, and of what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

WHAT = ("loss", "gradients", "buffers", "random stream", "optimizer state", "parameters")
"""The results of a training step that are compared."""
VALUES = tuple(what for what in WHAT if what != "random stream")
MOVED = ("optimizer state", "parameters")


class Level(IntEnum):
    """How close planned training is to plain training, as claimed or as found.

    Examples:
        >>> ss.Level.EQUAL < ss.Level.NEAR, ss.Level.ROUNDING.kind
        (True, 'lossless')
    """

    NONE = 0
    EQUAL = 1
    ROUNDING = 2
    NEAR = 3
    LOSSY = 4
    UNPROVEN = 5
    """Not compared, with a reason; never ok unless it was accepted by name."""

    @property
    def kind(self) -> str:
        """In one word, for plans: lossless, near-lossless or lossy."""
        if self <= Level.ROUNDING:
            return LOSSLESS
        return NEAR_LOSSLESS if self is Level.NEAR else LOSSY


LOSSLESS, NEAR_LOSSLESS, LOSSY = "lossless", "near-lossless", "lossy"


@dataclass(frozen=True)
class Circumstances:
    """Facts that decide how close a technique is."""

    device: str
    batch_norm: bool = False
    """The model has statistics that depend on the examples that run together."""
    drawn: bool = False
    """A plain step draws random numbers."""
    split: bool = True
    """A batch is larger than a part that runs at once."""
    linear: bool = True
    """The update is linear in the gradient, as SGD's is: rounding stays rounding."""


@dataclass(frozen=True)
class Claim:
    """The closest level a technique can reach, and why."""

    level: Level
    why: str
    of: tuple[str, ...] = VALUES
    bound: float = 0.0
    """Of NEAR, where the technique states one: relative, of parameters relative to their move."""


Claims = dict[str, tuple[Level, str]]
"""Result → how close, and why not closer."""


def weakest(claims: Iterable[Claim]) -> Claims:
    """For each thing the weakest claim that was made of it, with the reasons of all that weak."""
    made: Claims = dict.fromkeys(WHAT, (Level.EQUAL, ""))
    for claim in claims:
        for what in claim.of:
            level, why = made[what]
            if claim.level > level:
                made[what] = claim.level, claim.why
            elif claim.level == level and claim.why not in why:
                made[what] = level, f"{why}; {claim.why}" if why else claim.why
    return made
