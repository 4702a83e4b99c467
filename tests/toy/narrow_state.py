"""A technique that somebody else wrote: SGD's momentum in 16 bits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from shoestring.errors import InputError
from shoestring.techniques.base import Flag, Setup, Technique
from shoestring.techniques.claims import MOVED, Circumstances, Claim, Level
from shoestring.techniques.offers import Context, Offer
from shoestring.trace.graph import Trace

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class NarrowState(Technique):
    """Store the momentum of SGD in `kind`."""

    name: ClassVar[str] = "narrow_state"
    order: ClassVar[int] = 25
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag("state_type", "kind", str, "Of SGD's momentum: fp32 or bf16.", neutral="fp32"),
    )

    kind: str

    def __post_init__(self) -> None:
        if self.kind not in TYPES:
            raise InputError(f"unknown state type {self.kind!r}", hint="fp32 or bf16")

    @property
    def is_neutral(self) -> bool:
        return self.kind == "fp32"

    def short(self) -> str:
        return f"state {self.kind}"

    def predict(self, trace: Trace) -> Trace:
        kind = TYPES[self.kind]
        changed = tuple(replace(p, state_dtype=kind) for p in trace.parameters)
        return replace(trace, parameters=changed)

    def check(self, setup: Setup) -> None:
        if type(setup.optimizer) is not torch.optim.SGD:
            raise InputError(f"{type(setup.optimizer).__name__} has no narrow state", hint="SGD")

    def apply(self, setup: Setup) -> None:
        if not self.is_neutral:
            setup.update = lambda: _update(setup.optimizer, TYPES[self.kind])

    @classmethod
    def offers(cls, context: Context) -> Iterable[Offer]:
        yield Offer(cls("bf16"), "momentum rounds to 16 bits")

    def claims(self, at: Circumstances) -> Iterable[Claim]:
        if not self.is_neutral:
            yield Claim(Level.NEAR, "momentum rounds to 16 bits", ("loss", *MOVED))


@torch.no_grad()
def _update(optimizer: torch.optim.Optimizer, kind: torch.dtype) -> None:
    for before in optimizer._optimizer_step_pre_hooks.values():
        before(optimizer, (), {})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            gradient, state = parameter.grad, optimizer.state[parameter]
            gradient.add_(parameter, alpha=group["weight_decay"])
            if "momentum_buffer" in state:
                held = state["momentum_buffer"]
                held.mul_(group["momentum"]).add_(gradient)
            else:
                held = state["momentum_buffer"] = gradient.to(kind)
            if group["nesterov"]:
                gradient.add_(held, alpha=group["momentum"])
                parameter.add_(gradient, alpha=-group["lr"])
            else:
                parameter.add_(held, alpha=-group["lr"])
