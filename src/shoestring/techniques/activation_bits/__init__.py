"""Saved activations in few bits: rounded at random, group by group, until backward reads them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...errors import InputError, NoEffectWarning
from ...kernels.rounding import Noise
from ..base import Flag, Setup, Technique
from ..claims import Circumstances, Claim, Level
from ..offers import Context, Offer
from ..registry import register
from .saving import saving_in_bits

__all__ = ["ActivationBits"]

_LOSSINESS = {8: 0.05, 4: 0.3, 2: 1.0}


@register
@dataclass(frozen=True)
class ActivationBits(Technique):
    """Store what autograd saves for backward in 8, 4 or 2 bits.

    The forward pass is the plain one. Gradients are those of rounded activations, right on average.

    Args:
        bits: 8, 4 or 2.
        smallest: Tensors of fewer elements are stored as they are.
        seed: Seed of the random rounding.

    Examples:
        >>> step = ss.apply([ss.ActivationBits(8)], model, optimizer, loss=loss)
    """

    name: ClassVar[str] = "activation_bits"
    order: ClassVar[int] = 35
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            "activation_bits", "bits", int, "Of activations saved for backward: 8, 4 or 2.",
            label="activation bits",
        ),
    )  # fmt: skip
    same_state: ClassVar[bool] = True
    revisable: ClassVar[bool] = True
    changes_update: ClassVar[bool] = False
    changes_passes: ClassVar[bool] = True
    rounds_saved: ClassVar[bool] = True

    bits: Literal[8, 4, 2] = 8
    smallest: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits not in (8, 4, 2) or isinstance(self.bits, bool):
            raise InputError(f"no activations in {self.bits!r} bits", hint="8, 4 or 2")
        if type(self.smallest) is not int or self.smallest < 1:
            raise InputError(
                f"smallest {self.smallest!r} is not a whole number from 1",
                hint="tensors of fewer elements are saved as they are",
            )

    @property
    def inside_blocks(self) -> bool:
        """Always."""
        return True

    def short(self) -> str:
        """The bits."""
        return f"{self.bits}-bit activations"

    def describe(self) -> tuple[str, str]:
        """The text for plans and tables."""
        return self.short(), f"saved activations rounded at random to {self.bits} bits"

    @classmethod
    def offers(cls, context: Context) -> Iterable[Offer]:
        """All three; a pass that saves nothing large is not changed by them."""
        if context.accounting != "device":
            return
        for bits in (8, 4, 2):
            why = f"what backward needs is kept in {bits} bits"
            yield Offer(cls(bits), why, lossiness=_LOSSINESS[bits])

    def claims(self, at: Circumstances) -> Iterable[Claim]:
        """Another statistic: gradients are right on average only."""
        yield Claim(Level.LOSSY, f"saved activations are rounded to {self.bits} bits")

    def apply(self, setup: Setup) -> None:
        """Hooks around the forward pass."""
        held = setup.state.get(self.name)
        if not isinstance(held, _ActivationNoise):  # else it goes on, after a revision
            device = next(setup.model.parameters()).device
            held = _ActivationNoise(Noise(device, self.seed))
            setup.state[self.name] = held
        first = True

        def told(rounded: int) -> None:
            nonlocal first
            if first and not rounded:
                warnings.warn(
                    f"{self.short()}: nothing of {self.smallest} elements is saved by a layer that "
                    "can read rounded numbers",
                    NoEffectWarning,
                    stacklevel=3,
                )
            first = False

        setup.run = saving_in_bits(
            setup.run, setup.model, self.bits, self.smallest, held.noise, told
        )


@dataclass(frozen=True)
class _ActivationNoise:
    """State between steps: the position in the random stream."""

    noise: Noise

    def state_dict(self) -> dict[str, Any]:
        return self.noise.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.noise.load_state_dict(state)
