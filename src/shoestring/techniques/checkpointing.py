"""Checkpointing: run parts of the forward pass again instead of keeping them (Section 3.4)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..errors import InputError
from ..memory.schedule import STRATEGIES
from ..trace.graph import Trace
from .base import WholeBatch


@dataclass(frozen=True)
class Checkpointing(WholeBatch):
    """One of the report's strategies: none, no-bn, every-M, residual-M, residual-M*."""

    strategy: str

    def __post_init__(self) -> None:
        pattern = r"none|no-bn|every-[1-9]\d*|residual-[1-9]\d*\*?"
        if not isinstance(self.strategy, str) or not re.fullmatch(pattern, self.strategy):
            raise InputError(
                f"unknown checkpointing strategy {self.strategy!r}", hint=f"one of {STRATEGIES}"
            )

    def predict(self, trace: Trace) -> Trace:
        """The schedule of the backward pass changes; sizes do not."""
        return replace(trace, checkpoint=self.strategy)
