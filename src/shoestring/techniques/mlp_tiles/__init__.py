"""MLPs in tiles: what is between their layers exists for some positions at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ...errors import InputError, NoEffectWarning
from ...trace.graph import Phase, Trace
from ..base import Flag, Setup, Technique
from ..claims import MOVED, Circumstances, Claim, Level
from ..offers import Context, Offer
from ..registry import register
from .find import hooked, positionwise
from .function import tiled

__all__ = ["TiledMLP"]


@register
@dataclass(frozen=True)
class TiledMLP(Technique):
    """Run modules that treat every position alone on `rows` positions at a time.

    They are found by what they compute: a gated or plain MLP, with LoRA or without, of any library.
    Backward runs each tile again. Inputs of fewer than two tiles run whole.

    Args:
        rows: Positions of all examples that an MLP runs on at a time; by default 2,048.

    Examples:
        >>> plan = ss.Plan([ss.TiledMLP(), ss.Checkpointing("residual-1")])
    """

    name: ClassVar[str] = "mlp_tiles"
    same_state: ClassVar[bool] = True
    order: ClassVar[int] = 24
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag("mlp_rows", "rows", int, "Positions that an MLP runs on at a time; 0: a default."),
    )
    changes_update: ClassVar[bool] = False
    changes_passes: ClassVar[bool] = True
    proof: ClassVar[Any] = "alone"
    extrapolates: ClassVar[bool] = False

    rows: int | None = None

    def __post_init__(self) -> None:
        if self.rows == 0:  # as the command line asks for the default
            object.__setattr__(self, "rows", None)
        if not (self.rows is None or (type(self.rows) is int and self.rows > 0)):
            raise InputError(
                f"MLP rows {self.rows!r} is not a whole number from 1",
                hint="2048 computes an MLP for so many positions at a time",
            )

    @property
    def inside_blocks(self) -> bool:
        """Always."""
        return True

    def short(self) -> str:
        """Its name, and the rows where they are not the default."""
        return "MLPs in tiles" if self.rows is None else f"MLPs in tiles of {self.rows}"

    def describe(self) -> tuple[str, str]:
        """The text for plans and tables."""
        return self.short(), "an MLP's inside exists for some positions; recomputed in backward"

    @classmethod
    def offers(cls, context: Context) -> Iterable[Offer]:
        """Where products have many more rows than a tile, and become wider than what they read."""
        if context.accounting == "device" and _longest(context.trace) >= _MANY * ROWS:
            yield Offer(cls(), "MLPs for some positions at a time, computed again in backward")

    def claims(self, at: Circumstances) -> Iterable[Claim]:
        """Products of fewer rows may round otherwise; gradients of weights are added up."""
        why = "MLPs are computed in parts, and their weights' gradients added up"
        yield Claim(Level.ROUNDING, why, ("loss", "gradients", *MOVED))

    def predict(self, trace: Trace) -> Trace:
        """The report's accounting has no parts of an operation: nothing changes."""
        return trace

    def apply(self, setup: Setup) -> None:
        """Another `forward` for each module that is found."""
        found = list(positionwise(setup.model))
        if not found:
            warnings.warn(
                "mlp_tiles: no module of the model treats every position alone, with two layers "
                "and a wider inside",
                NoEffectWarning,
                stacklevel=2,
            )
        for _, module in found:
            setup.undo.append(_replace(module, self.rows or ROWS))


ROWS = 2048
"""By default: as many keep a GPU's products efficient."""
_MANY = 4
"""Tiles from which on the planner tries it."""


def _replace(module: nn.Module, rows: int) -> Callable[[], None]:
    plain, parts = module.forward, list(module.modules())
    own = module.__dict__.get("forward")

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        long = isinstance(x, torch.Tensor) and x.dim() > 1 and x.numel() >= 2 * rows * x.shape[-1]
        if not long or args or kwargs or hooked(parts):
            made: torch.Tensor = plain(x, *args, **kwargs)
            return made
        return tiled(plain, module, x, rows)

    module.forward = forward

    def undo() -> None:
        if own is None:
            del module.forward
        else:
            module.forward = own

    return undo


def _longest(trace: Trace) -> int:
    """Most rows of a product that becomes wider than what it reads."""
    rows = [0]
    for op in trace.ops:
        if op.phase is Phase.FORWARD and op.name in ("aten.mm", "aten.addmm") and op.outputs:
            read = [spec.shape for _, spec in op.inputs if len(spec.shape) == 2]
            made = op.outputs[0].shape
            if any(s[0] == made[0] and s[-1] < made[-1] for s in read):
                rows.append(int(made[0]))
    return max(rows)
