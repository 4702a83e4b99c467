"""The state that low precision keeps from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...kernels.rounding import Noise
from .scaling import LossScale


@dataclass(frozen=True)
class PrecisionState:
    """The loss scale, where there is one, and the random stream of the rounding."""

    scale: LossScale | None
    noise: Noise

    def state_dict(self) -> dict[str, Any]:
        """Scale, counters and random stream."""
        own = {} if self.scale is None else self.scale.state_dict()
        return {**own, **self.noise.state_dict()}

    def counts(self) -> dict[str, int]:
        """For a run's records; waits for the device."""
        return {} if self.scale is None else {"skipped_updates": int(self.scale.skipped_steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        if self.scale is not None:
            self.scale.load_state_dict(state)
        self.noise.load_state_dict(state)
