"""Low precision: 16 bits for everything but BatchNorm (the report, Section 3.2)."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch

from ...errors import InputError, NoEffectWarning
from ...kernels.rounding import Noise
from ...trace.batches import map_tensors
from ...trace.graph import Trace
from ..base import Flag, Setup, Technique
from ..batch_norm import lean_batch_norm
from ..claims import Circumstances, Claim, Level
from ..offers import Context, Offer, Scales, Update, Updates
from ..registry import register
from .check import check_hooks, check_model, check_optimizer, named_failures
from .convert import lower_model
from .estimate import estimate_update
from .loading import guard
from .moments import ScaledMoments
from .scaling import LossScale
from .state import PrecisionState
from .trial import runs_in
from .update import NarrowUpdate

Kind = Literal["fp32", "fp16", "bf16"]
_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@register
@dataclass(frozen=True)
class Precision(Technique):
    """Store weights, gradients, optimizer state and activations in 16 bits, without an FP32 copy.

    BatchNorm's parameters, their gradients and momentum stay in FP32, and so do its statistics.

    Args:
        kind: "fp16" or "bf16"; "fp32" changes nothing.
        rounding: How a new weight becomes 16 bits: "nearest" (FP16's default, the report's) or
            "stochastic" (BF16's).
        initial_scale: First loss scale of FP16; it halves when a gradient overflows.
        growth_interval: Updates without an overflow after which the loss scale doubles.
        seed: Seed of stochastic rounding.

    Examples:
        >>> step = ss.apply([ss.Precision("bf16")], model, optimizer, loss=loss)
    """

    name: ClassVar[str] = "precision"
    order: ClassVar[int] = 20
    replaces_parameters: ClassVar[bool] = True
    updates_on_device: ClassVar[bool] = True
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag("precision", "kind", str, "fp32, fp16 or bf16.", neutral="fp32"),
    )
    addable: ClassVar[bool] = True
    updates_apart: ClassVar[bool] = True

    kind: Kind
    rounding: Literal["nearest", "stochastic"] | None = None
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

    @property
    def is_neutral(self) -> bool:
        """FP32 is what a model has."""
        return self.kind == "fp32"

    @property
    def input_dtype(self) -> torch.dtype:
        """Its type."""
        return _TYPES[self.kind]

    @property
    def scales_loss(self) -> bool:
        """FP16's range needs it."""
        return self.kind == "fp16"

    def short(self) -> str:
        """The type."""
        return self.kind

    @classmethod
    def offers(cls, context: Context) -> Iterable[Offer]:
        """The faster of the 16-bit types that the step runs in, where most numbers are wider."""
        sizes = [(p.dtype.itemsize, p.numel) for p in context.trace.parameters]
        wide = sum(n * size for size, n in sizes if size > 2)
        if wide <= sum(n * size for size, n in sizes) / 2:
            return
        for kind in dict.fromkeys((context.narrow, "bf16", "fp16")):
            if runs_in(context, _TYPES[kind]):
                scales = Scales(width=0.5, number_type=kind)
                yield Offer(cls(cast(Kind, kind)), "16-bit rounding", scales, LOSSINESS)
                return

    def estimate_update(self, updates: Updates) -> Update | None:
        """By rule for a large model: there are too many blocks to trace them all."""
        return None if self.is_neutral else estimate_update(self, updates)

    def claims(self, at: Circumstances) -> Iterable[Claim]:
        """16 bits round."""
        if not self.is_neutral:
            yield Claim(Level.NEAR, f"{self.kind} rounds")

    def on_ranks(self, setup: Setup, kind: str) -> None:
        """Ranks with other rows draw other numbers of bits, and go on at the same place."""
        state = setup.state.get(self.name)
        if kind == "fsdp" and isinstance(state, PrecisionState):
            state.noise.skip()
            setup.after_update.append(state.noise.skip)

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
        setup.check_step(f"{self.kind} updates in its own way and")
        check_model(setup.model, _TYPES[self.kind])
        check_optimizer(setup.model, setup.optimizer)
        if self.scales_loss:
            check_hooks(setup.model)

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
        update = NarrowUpdate(setup.optimizer, scale, noise, stochastic=rounding == "stochastic")
        setup.undo.append(update.state.convert())
        weakref.finalize(setup, guard, setup.optimizer).atexit = False
        setup.update = update
        setup.state[self.name] = PrecisionState(scale, noise)
        setup.loss_scale, setup.update_on_device = scale, True
        setup.rates_on_device = _rates_on_device(setup.optimizer, target, rounding)
        setup.meanings.append(ScaledMoments(update.elements))
        lean_batch_norm(setup)
        _run_in(target, setup, scale)


LOSSINESS = 0.01
"""Of 16 bits: less than any lossy setting of another technique."""


def _rates_on_device(
    optimizer: torch.optim.Optimizer, target: torch.dtype, rounding: str
) -> Callable[[], bool]:
    """Adam's and AdamW's update takes rates as tensors; SGD's where it is PyTorch's fused one."""
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return lambda: True
    fused = type(optimizer) is torch.optim.SGD and target is torch.float16 and rounding == "nearest"
    return lambda: fused and not any(group["dampening"] for group in optimizer.param_groups)


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
