"""Optimizer state in few bits: moments as blocks of codes, updated in one pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from ...errors import InputError, NoEffectWarning
from ...kernels import expected
from ...kernels.rounding import Noise
from ...memory.work import Work
from ...trace.graph import Trace
from ..base import Flag, Setup, Technique
from ..claims import MOVED, Circumstances, Claim, Level
from ..offers import Context, Offer, Update, Updates
from ..registry import register
from .loading import CodedState
from .storage import CodedMoments, MomentCodes
from .update import QuantizedUpdate

__all__ = ["OptimizerState"]

_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_BOUND = 0.1
"""Of 8 bits after a few updates: codes are up to 0.8% off, and an update divides two of them."""
_LOSS_BOUND = 0.02
_LOSSINESS = {8: 0.02, 4: 0.2}


@register
@dataclass(frozen=True)
class OptimizerState(Technique):
    """Keep the moments of SGD, Adam or AdamW in 8 or 4 bits, one scale a block.

    16-bit weights are rounded at random.

    Args:
        bits: 8 or 4.
        smallest: Tensors of fewer elements keep FP32 moments.
        seed: Seed of the random rounding.

    Examples:
        >>> step = ss.apply([ss.OptimizerState(8)], model, optimizer, loss=loss)
    """

    name: ClassVar[str] = "optimizer_state"
    order: ClassVar[int] = 22
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            "state_bits", "bits", int, "Bits of each moment: 8 or 4.", label="state bits",
            explained=("8-bit optimizer state", 8),
        ),
    )  # fmt: skip
    updates_apart: ClassVar[bool] = True
    updates_on_device: ClassVar[bool] = True
    leaves_passes: ClassVar[bool] = True
    state_first: ClassVar[bool] = True

    bits: Literal[8, 4] = 8
    smallest: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits not in (8, 4) or isinstance(self.bits, bool):
            raise InputError(f"no optimizer state in {self.bits!r} bits", hint="8 or 4")
        if type(self.smallest) is not int or self.smallest < 1:
            raise InputError(
                f"smallest {self.smallest!r} is not a whole number from 1",
                hint="tensors of fewer elements keep FP32 moments",
            )

    def short(self) -> str:
        """The bits."""
        return f"{self.bits}-bit state"

    def describe(self) -> tuple[str, str]:
        """The text for plans and tables."""
        return self.short(), f"moments rounded at random to {self.bits} bits"

    def refuses(self, other: Technique) -> str | None:
        """Codes mean something only beside those of their block."""
        if other.moves_elements and not other.is_neutral:
            return f"{self.name} cannot follow elements that {other.name} moves"
        return None

    @classmethod
    def offers(cls, context: Context) -> Iterable[Offer]:
        """Both, where there are moments large enough."""
        largest = max((p.numel for p in context.trace.parameters if p.has_gradient), default=0)
        if largest < cls.smallest or not _has_moments(context.optimizer):
            return
        for bits in (8, 4):
            why = f"the optimizer's moments in {bits} bits"
            yield Offer(cls(bits), why, lossiness=_LOSSINESS[bits])

    def claims(self, at: Circumstances) -> Iterable[Claim]:
        """8 bits are near, with a bound; 4 bits are lossy. The first gradients are equal."""
        level = Level.NEAR if self.bits == 8 else Level.LOSSY
        why = f"the optimizer's moments are in {self.bits} bits"
        yield Claim(level, why, MOVED, bound=_BOUND)
        yield Claim(level, why, ("loss", "buffers"), bound=_LOSS_BOUND)

    def estimate_update(self, updates: Updates) -> Update | None:
        """Kernels by rule: they take nothing beside."""
        if updates.context.device != "cuda" or not expected():
            return None
        wide = updates.without(self)
        trained = [p for p in updates.context.trace.parameters if p.has_gradient]
        count = 1 if isinstance(updates.context.optimizer, torch.optim.SGD) else 2
        state = count * sum(self._codes.nbytes(p.numel) for p in trained)
        gradients = wide.gradient_bytes
        moved = 3 * gradients + 2 * state
        work = Work(30 * sum(p.numel for p in trained), moved, len(trained))
        return replace(wide, state_bytes=state, passing_bytes=0, work=work)

    def predict(self, trace: Trace) -> Trace:
        """Elements of this width; scales are a 64th of it and left out."""
        kind = torch.uint8
        return replace(
            trace,
            parameters=tuple(
                replace(
                    p,
                    state_dtype=kind,
                    state_elements=tuple(
                        -(-n * self.bits // 8) if n == p.numel else n for n in p.state_elements
                    ),
                )
                if self._codes.quantizes(p.numel)
                else p
                for p in trace.parameters
            ),
        )

    def check(self, setup: Setup) -> None:
        """Only optimizers whose arithmetic is known."""
        optimizer = setup.optimizer
        name = type(optimizer).__name__
        if type(optimizer) not in _OPTIMIZERS:
            raise InputError(
                f"{name} cannot keep its state in {self.bits} bits", hint="SGD, Adam or AdamW can"
            )
        setup.check_step(f"{self.bits}-bit state updates in its own way and")
        for group in optimizer.param_groups:
            for setting in ("amsgrad", "dampening", "differentiable"):
                if group.get(setting):
                    raise InputError(
                        f"{name} with {setting} cannot keep its state in {self.bits} bits",
                        hint=f"leave out {setting}",
                    )
            if any(not p.is_floating_point() or p.is_complex() for p in group["params"]):
                raise InputError("complex parameters have no moments in few bits")

    def apply(self, setup: Setup) -> None:
        """Store the moments in codes; replace the update."""
        optimizer = setup.optimizer
        held = [p for group in optimizer.param_groups for p in group["params"]]
        large = any(self._codes.quantizes(p.numel()) for p in held if p.requires_grad)
        if not large or not _has_moments(optimizer):
            why = "has no moments" if large else f"holds no tensor of {self.smallest} elements"
            warnings.warn(f"{self.short()}: the optimizer {why}", NoEffectWarning, stacklevel=2)
            return
        noise = Noise(held[0].device, self.seed)
        update = QuantizedUpdate(optimizer, self._codes, setup.loss_scale, noise)
        meanings = list(setup.meanings)

        def meant(parameter: torch.Tensor, key: str, value: Any) -> Any:
            for meaning in meanings if isinstance(value, torch.Tensor) else ():
                value = meaning.state(parameter, key, value, optimizer.state[parameter])
            return value

        setup.undo.append(CodedState(optimizer, self._codes).convert_state(meant))
        setup.run = update.beginning(setup.run)
        setup.update, setup.update_on_device = update, True
        setup.rates_on_device = lambda: True
        setup.state[self.name] = _StateBits(self.bits, noise)
        setup.meanings.append(CodedMoments(self._codes))

    @property
    def _codes(self) -> MomentCodes:
        return MomentCodes(self.bits, self.smallest)


@dataclass(frozen=True)
class _StateBits:
    """State between steps, beside the moments: the position in the random stream."""

    bits: int
    noise: Noise

    def state_dict(self) -> dict[str, Any]:
        return {"bits": self.bits, **self.noise.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.noise.load_state_dict(state)

    def check_state(self, state: dict[str, Any]) -> None:
        """InputError for another width, before anything changes."""
        bits = state["techniques"][OptimizerState.name]["bits"]
        if bits != self.bits:
            raise InputError(
                f"the state was saved in {bits} bits, and this step keeps it in {self.bits}",
                hint=f"apply OptimizerState({bits})",
            )


def _has_moments(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("momentum", 1) for group in optimizer.param_groups)
