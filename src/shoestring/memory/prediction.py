"""Prediction: what one training step is predicted to take. Nothing of it was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Prediction:
    """What one step is predicted to take, by which accounting and which costs."""

    peak_bytes: int
    accounting: str
    device: str
    seconds: float | None = None
    flops: int | None = None
    """Forward, backward and what is recomputed."""
    costs: str | None = None
    """Where the seconds come from."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "peak_bytes": self.peak_bytes,
            "step_seconds": self.seconds,
            "flops": self.flops,
            "accounting": self.accounting,
            "device": self.device,
            "costs": self.costs,
        }
