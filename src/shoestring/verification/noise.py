"""How much of a difference is rounding: measured on the very step that is compared."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InputError
from ..techniques.distance import RoundingNoise
from ..techniques.emulated import BITS, Rounded, rounded_
from .sides import Plain, Trained


def trained_in_bits(
    side: Plain, kind: str, data: list[Any], seed: int | None = None, scale: float = 1.0
) -> Trained | None:
    """Plain steps with every result rounded, weights and optimizer state included."""
    for parameter in side.model.parameters():
        rounded_(parameter.detach(), BITS[kind])
    try:
        with Rounded(kind, seed, scale):
            made = side.train(data)
    except InputError:
        return None
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in made.all().values())
    return made if finite else None


def noises(exact: Trained, rounded: Trained) -> dict[str, RoundingNoise]:
    """For each thing that is compared."""
    rows, others = exact.rows(), rounded.rows()
    return {what: RoundingNoise.between(rows[what], others[what]) for what in rows}
