"""Gradients that never exist together: each goes as soon as its parameter is updated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from ...errors import InputError
from ...trace.fakes import hooks_its_step
from ...trace.graph import Phase, Trace
from ..base import Flag, Setup, Technique
from ..claims import MOVED, Circumstances, Claim, Level
from ..offers import Context, Offer, Update, Updates
from ..registry import register
from .folding import can_fold
from .release import Release

__all__ = ["GradientRelease"]

_CALL = 12
"""Kernels that start in the time of one call of an optimizer's step, on the host."""
_LAST = 0.95
"""Of the forward pass, where the last layers begin, whose gradients meet all activations."""
_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


@register
@dataclass(frozen=True)
class GradientRelease(Technique):
    """Update each parameter in the backward pass, as soon as its gradient is final, and free it.

    Args:
        wanted: False changes nothing.
        fold: With microbatches, True adds the gradients of SGD with momentum (not Nesterov's) to
            the momentum itself; False sums them until the last microbatch, as for other
            optimizers. "all" also adds them to Adam's moments, to the second one as squares of
            the parts.

    Examples:
        >>> step = ss.apply([ss.GradientRelease()], model, optimizer, loss=loss)
    """

    name: ClassVar[str] = "gradient_release"
    same_state: ClassVar[bool] = True
    order: ClassVar[int] = 45
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            "release", "wanted", bool, "Update each parameter in the backward pass.", False,
            explained=("update in the backward pass", True),
        ),
    )  # fmt: skip
    revisable: ClassVar[bool] = True
    updates_in_backward: ClassVar[bool] = True

    wanted: bool = True
    fold: bool | Literal["all"] = True

    def __post_init__(self) -> None:
        if self.fold not in (True, False, "all"):
            raise InputError(f"cannot fold {self.fold!r}", hint="True, False or 'all'")

    @property
    def is_neutral(self) -> bool:
        """As a flag that is off."""
        return not self.wanted

    def short(self) -> str:
        """Its name."""
        folded = ", folded" * (self.fold == "all")
        return "released gradients" + folded if self.wanted else "kept gradients"

    def describe(self) -> tuple[str, str]:
        """The text for plans and tables."""
        return self.short(), "each update runs in the backward pass, and its gradient goes"

    def refuses(self, other: Technique) -> str | None:
        """A loss scale is judged by all gradients before any update."""
        if self.wanted and other.scales_loss:
            return f"{self.name} updates before {other.name} knows whether a gradient overflowed"
        return None

    @classmethod
    def offers(cls, context: Context) -> Iterable[Offer]:
        """Where there is more than one gradient."""
        if hooks_its_step(context.optimizer):
            return
        if sum(p.has_gradient for p in context.trace.parameters) > 1:
            yield Offer(cls(), "each gradient goes as soon as its parameter is updated")
            if can_fold(context.optimizer, "all") and not can_fold(context.optimizer, True):
                why = "gradients of microbatches go, too, into Adam's moments"
                yield Offer(cls(fold="all"), why, lossiness=0.1)

    def claims(self, at: Circumstances) -> Iterable[Claim]:
        """The same update, earlier; parts are added in another order."""
        if at.split and self.wanted and self.fold == "all":
            why = "Adam's second moment adds squares of parts, not the square of their sum"
            yield Claim(Level.LOSSY, why, (*MOVED, "loss", "buffers"))
        elif at.split and self.wanted:
            yield Claim(Level.ROUNDING, "gradients are added to the momentum part by part", MOVED)

    def folds_parts(self, optimizer: torch.optim.Optimizer) -> bool:
        """As far as the optimizer tells."""
        return can_fold(optimizer, self.fold)

    def estimate_update(self, updates: Updates) -> Update | None:
        """One tensor at a time."""
        if not self.wanted or not updates.trained:
            return None
        whole = updates.without(self)
        share = max(updates.trained.values()) / sum(updates.trained.values())
        passing = whole.passing_bytes
        if updates.context.device == "cuda":  # an optimizer takes all tensors together there
            passing = int(passing * share)
        alone = len(updates.trained)
        return replace(
            whole,
            gradient_bytes=int(whole.gradient_bytes * share),
            passing_bytes=passing,
            early_bytes=_early_bytes(updates.context.trace),
            work=replace(whole.work, launches=max(whole.work.launches, alone)),
            host_launches=whole.host_launches + _CALL * alone,
        )

    def predict(self, trace: Trace) -> Trace:
        """Only the largest gradient is counted."""
        if not self.wanted:
            return trace
        trained = [p for p in trace.parameters if p.has_gradient]
        largest = max(trained, key=lambda p: p.numel * p.dtype.itemsize, default=None)
        return replace(
            trace,
            parameters=tuple(
                p if p is largest else replace(p, has_gradient=False) for p in trace.parameters
            ),
        )

    def check_ranks(self, setup: Setup, kind: str) -> None:
        """Ranks add whole gradients, not parts of them."""
        if self.wanted and can_fold(setup.optimizer, self.fold):
            raise InputError(
                "ranks add up gradients of the whole batch, and folded ones are gone before",
                hint="GradientRelease(fold=False)",
            )

    def check(self, setup: Setup) -> None:
        """Only optimizers that take each parameter by itself, and whose step is theirs."""
        if not self.wanted:
            return
        name = type(setup.optimizer).__name__
        if type(setup.optimizer) not in _OPTIMIZERS:
            raise InputError(
                f"the updates of {name} are not known to be independent",
                hint="SGD, Adam or AdamW can release gradients",
            )
        setup.check_step("released gradients")

    def apply(self, setup: Setup) -> None:
        """Hooks on the parameters."""
        if not self.wanted:
            return
        if setup.adds_apart:
            raise InputError(
                "compensated accumulation keeps gradients until the end of the batch",
                hint="accumulate='parameter'",
            )

        def undo() -> None:
            setup.updates_in_backward, setup.gradients_gone, setup.clips = False, "", False

        setup.undo.append(undo)
        Release(setup, fold=self.fold)
        setup.updates_in_backward = setup.clips = True
        setup.gradients_gone = f"{self.name} updates each parameter in the backward pass"


def _early_bytes(trace: Trace) -> int:
    """Of gradients that are there with all activations: the largest of the last layers', and those
    with a part from either end of the model, of which the first waits for the last."""
    forward = [op for op in trace.ops if op.phase is Phase.FORWARD]
    read: dict[int, list[int]] = {}
    for number, op in enumerate(forward):
        for _, spec in op.inputs:
            read.setdefault(trace.values[spec.value].storage, []).append(number)
    waiting, last = 0, 0
    for p in trace.parameters:
        if p.has_gradient and (at := read.get(p.storage)):
            own = p.numel * p.dtype.itemsize
            if at[-1] - at[0] > len(forward) / 2:
                waiting += own
            elif at[0] >= _LAST * len(forward):
                last = max(last, own)
    return waiting + last
