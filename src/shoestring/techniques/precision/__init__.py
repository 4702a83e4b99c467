"""Low precision: 16 bits for everything but BatchNorm (the report, Section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...errors import InputError
from ...trace.graph import Trace
from ..base import WholeBatch

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Precision(WholeBatch):
    """Store weights, gradients, optimizer state and activations in `kind`; no master copy.

    BatchNorm's parameters, their gradients and momentum stay in FP32, and so do its statistics.
    """

    kind: str

    def __post_init__(self) -> None:
        if self.kind not in _TYPES:
            raise InputError(f"unknown precision {self.kind!r}", hint="one of " + ", ".join(_TYPES))

    def predict(self, trace: Trace) -> Trace:
        """Floating-point values and parameters change their type; `fp32` changes nothing."""
        if self.kind == "fp32":
            return trace
        target = _TYPES[self.kind]
        return replace(
            trace,
            precision=self.kind,
            values=tuple(
                replace(v, dtype=target) if v.dtype.is_floating_point else v for v in trace.values
            ),
            parameters=tuple(
                replace(p, dtype=target) if p.dtype.is_floating_point and not p.normalization else p
                for p in trace.parameters
            ),
        )
