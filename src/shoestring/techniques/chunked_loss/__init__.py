"""Head and loss in chunks: the logits of a model that ends in a cross-entropy never exist whole."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...errors import InputError, NoEffectWarning
from ...trace.graph import Op, Phase, Trace
from ..base import Flag, Setup, Technique
from ..claims import MOVED, Circumstances, Claim, Level
from ..offers import Context, Offer
from ..registry import register
from .heads import DeferredHeads, head_weights

__all__ = ["ChunkedLoss"]


@register
@dataclass(frozen=True)
class ChunkedLoss(Technique):
    """Compute the last projection and its cross-entropy some classes at a time.

    The step finds the head while it runs: a linear layer outside of the blocks whose output goes to
    `F.cross_entropy`, or to `log_softmax` and `F.nll_loss`, `gather` or a mean, through casts,
    shifts, views and factors. If anything else reads the logits, they are computed as usual.

    Args:
        columns: Classes at a time; by default twice the number of the projection's inputs, at least
            1,024.

    Examples:
        >>> step = ss.apply([ss.ChunkedLoss()], model, optimizer, loss=loss)
    """

    name: ClassVar[str] = "chunked_loss"
    same_state: ClassVar[bool] = True
    order: ClassVar[int] = 25
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            "loss_columns", "columns", int, "Classes whose logits exist at a time; 0: a default.",
            explained=("head and loss in chunks", 0),
        ),
    )  # fmt: skip
    changes_update: ClassVar[bool] = False
    changes_passes: ClassVar[bool] = True
    proof: ClassVar[Any] = "alone"

    columns: int | None = None

    def __post_init__(self) -> None:
        if self.columns == 0:  # as the command line asks for the default
            object.__setattr__(self, "columns", None)
        known = self.columns is None or (type(self.columns) is int and self.columns > 0)
        if not known:
            raise InputError(
                f"loss columns {self.columns!r} is not a whole number from 1",
                hint="8192 computes so many logits of each token at a time",
            )

    def short(self) -> str:
        """Its name, and the columns where they are not the default."""
        return "chunked loss" if self.columns is None else f"chunked loss {self.columns}"

    def describe(self) -> tuple[str, str]:
        """The text for plans and tables."""
        return self.short(), "logits never exist whole; one more product of the head"

    @classmethod
    def offers(cls, context: Context) -> Iterable[Offer]:
        """Where the logits are much of what the step holds."""
        if context.accounting == "device" and any(
            _is_much(op, context.trace) for op in _losses(context.trace)
        ):
            yield Offer(cls(), "logits in parts, recomputed in the backward pass")

    def claims(self, at: Circumstances) -> Iterable[Claim]:
        """Sums over the classes are added part by part."""
        why = "the loss is added up in parts of the classes"
        yield Claim(Level.ROUNDING, why, ("loss", "gradients", *MOVED))

    def predict(self, trace: Trace) -> Trace:
        """The report's accounting has no parts of an operation: nothing changes."""
        return trace

    def check(self, setup: Setup) -> None:
        """Whether the loss is a cross-entropy shows when it runs."""

    def apply(self, setup: Setup) -> None:
        """Defer the logits of every layer that can be the head."""
        if not head_weights(setup.model):
            warnings.warn(
                "chunked_loss: the model has no linear layer outside of its blocks",
                NoEffectWarning,
                stacklevel=2,
            )
            return
        setup.run = DeferredHeads(setup.model, setup.run, self.columns)


_LEAST = 0.02
"""Of all storages at their largest, what the logits must be to be worth it."""


def _losses(trace: Trace) -> list[Op]:
    """Log-softmaxes of the forward pass whose classes come from a product."""
    products = ("aten.mm", "aten.addmm", "aten.linear", "aten.bmm")
    widths = {
        op.outputs[0].shape[-1]
        for op in trace.ops
        if op.phase is Phase.FORWARD and op.name in products and op.outputs
    }
    return [
        op
        for op in trace.ops
        if op.phase is Phase.FORWARD
        and op.name == "aten._log_softmax"
        and op.outputs
        and widths & set(op.outputs[0].shape)
    ]


def _is_much(op: Op, trace: Trace) -> bool:
    largest = sum(s.nbytes for s in trace.storages if s.birth < 0)
    held = sum(s.nbytes for s in trace.storages if 0 <= s.birth <= op.index < s.death)
    logits = op.outputs[0].numel * torch.float32.itemsize
    return logits > _LEAST * (largest + held)
