"""Sparsity: weights, gradients and optimizer state at the nonzeros only (Section 3.1)."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

from ..errors import InputError, NoEffectWarning
from ..trace.graph import Trace
from .base import WholeBatch


@dataclass(frozen=True)
class Sparsity(WholeBatch):
    """Keep `density` of the elements of every sparsifiable tensor; 1.0 changes nothing.

    Values of weight, gradient and optimizer state share one index: ceil(log2(columns)) bits a
    nonzero and row pointers, the report's compressed sparse rows.
    """

    density: float

    def __post_init__(self) -> None:
        if not (isinstance(self.density, (int, float)) and math.isfinite(self.density)):
            raise InputError(f"density {self.density!r} is not a number", hint="a number in (0, 1]")
        if not 0 < self.density <= 1:
            raise InputError(
                f"density {self.density:g} lies outside (0, 1]",
                hint="0.3 keeps 30% of the elements",
            )

    def predict(self, trace: Trace) -> Trace:
        """Sparsifiable parameters get this density."""
        if self.density < 1 and not any(p.sparsifiable for p in trace.parameters):
            warnings.warn(
                f"density {self.density:g}: the model has no tensor to sparsify",
                NoEffectWarning,
                stacklevel=2,
            )
        return replace(
            trace,
            parameters=tuple(
                replace(p, density=self.density) if p.sparsifiable else p for p in trace.parameters
            ),
        )
