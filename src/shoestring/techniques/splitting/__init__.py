"""How a loss splits into the losses of the parts of its batch."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import LossUnits


@dataclass(frozen=True)
class SplitFound:
    """The result of a test on a few real examples, whole and in parts."""

    units: LossUnits
    """By which the parts weigh."""
    splits: bool | None
    """None where it could not be tested, and is assumed."""
    why: str
