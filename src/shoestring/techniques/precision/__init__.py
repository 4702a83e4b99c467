"""Low precision: 16 bits for everything but BatchNorm (the report, Section 3.2)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import InputError, NoEffectWarning
from ...trace.batches import map_tensors
from ...trace.graph import Trace
from ..base import Setup, WholeBatch
from ..batch_norm import lean_batch_norm
from .check import check_model, check_optimizer, named_failures
from .convert import lower_model
from .rounding import Noise
from .scaling import LossScale
from .state import PrecisionState
from .update import Update

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Precision(WholeBatch):
    """Store weights, gradients, optimizer state and activations in `kind`; no master copy.

    BatchNorm's parameters, their gradients and momentum stay in FP32, and so do its statistics.
    `rounding` is how a new weight becomes 16 bits: "nearest" (FP16's default, the report's) or
    "stochastic" (BF16's). The loss scale of FP16 starts at `initial_scale`, halves when a gradient
    overflows, and doubles after `growth_interval` updates without one.
    """

    kind: str
    rounding: str | None = None
    initial_scale: float = 2.0**15
    growth_interval: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _TYPES:
            raise InputError(f"unknown precision {self.kind!r}", hint="one of " + ", ".join(_TYPES))
        if self.rounding not in (None, "nearest", "stochastic"):
            raise InputError(
                f"unknown rounding {self.rounding!r}", hint="'nearest' or 'stochastic'"
            )
        if not self.initial_scale > 0 or self.initial_scale == float("inf"):
            raise InputError(
                f"a loss scale cannot be {self.initial_scale:g}", hint="a power of two, 32768"
            )
        if self.growth_interval < 1:
            raise InputError(
                f"the loss scale cannot grow every {self.growth_interval} updates",
                hint="a whole number from 1",
            )

    def predict(self, trace: Trace) -> Trace:
        """Floating-point values and parameters change their type; `fp32` changes nothing."""
        if self.kind == "fp32":
            return trace
        target = _TYPES[self.kind]
        return replace(
            trace,
            values=tuple(
                replace(v, dtype=target) if v.dtype.is_floating_point else v for v in trace.values
            ),
            parameters=tuple(
                replace(p, dtype=target) if p.dtype.is_floating_point and not p.normalization else p
                for p in trace.parameters
            ),
        )

    def check(self, setup: Setup) -> None:
        """The device must have the type, and the optimizer must work on one tensor at a time."""
        if self.kind == "fp32":
            return
        if setup.wrapper is not None:
            raise InputError(
                f"{self.kind} updates in its own way and would leave out the step of "
                f"{type(setup.wrapper).__name__}",
                hint=f"give the {type(setup.optimizer).__name__} it holds",
            )
        check_model(setup.model, _TYPES[self.kind])
        check_optimizer(setup.model, setup.optimizer)

    def apply(self, setup: Setup) -> None:
        """Convert model, batch and optimizer state; replace the update's arithmetic."""
        if self.kind == "fp32":
            return
        target = _TYPES[self.kind]
        device = next(setup.model.parameters()).device
        noise = Noise(device, self.seed)
        scale = None
        if target is torch.float16:
            scale = LossScale(device, self.initial_scale, self.growth_interval)
        lowered = lower_model(setup, target)
        if not lowered:
            warnings.warn(
                f"{self.kind}: the model has no parameter outside BatchNorm",
                NoEffectWarning,
                stacklevel=2,
            )
        rounding = self.rounding or ("nearest" if target is torch.float16 else "stochastic")
        update = Update(setup.optimizer, scale, noise, stochastic=rounding == "stochastic")
        setup.undo.append(update.convert_state())
        setup.update = update
        setup.state["precision"] = PrecisionState(scale, noise)
        lean_batch_norm(setup)
        _run_in(target, setup, scale)


def _run_in(target: torch.dtype, setup: Setup, scale: LossScale | None) -> None:
    """Cast each part of the batch; scale the loss for the backward pass only."""
    plain_run, plain_backward = setup.run, setup.backward

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(target) if tensor.is_floating_point() else tensor

    def run(batch: Any) -> torch.Tensor:
        with named_failures(target):
            value = plain_run(map_tensors(cast, batch))
        if scale is not None and isinstance(value, torch.Tensor):
            scale.loss_is(value.dtype)
        # Weights and scale multiply an FP32 number; the loss itself is 16 bits if its maker says.
        return value.float() if isinstance(value, torch.Tensor) else value

    def backward(value: torch.Tensor) -> None:
        with named_failures(target):
            plain_backward(value if scale is None else value * scale.scale)

    setup.run, setup.backward = run, backward
