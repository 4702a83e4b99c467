"""Losses of a few examples, whole and in parts, and what was seen while they were computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...errors import InputError
from .candidates import Targets
from .draws import Drawn
from .units import Units, weights

TOLERANCES = {
    torch.float64: 1e-7,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
}
"""Of the loss, relative, by the least precise type it is computed in."""
_COMPARISONS = ("gt", "ge", "lt", "le")


class Watched(Drawn):
    """Records draws, types, and the targets of likelihoods with what they ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: Targets = []
        self.kinds: set[torch.dtype] = set()
        self.weighted = False
        self.reads = False
        """Python saw a number or a truth value, which may decide what runs."""
        self.compares = False
        """Numbers were compared, which may decide what counts."""

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Look at the arguments of likelihoods."""
        made = func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads = self.reads or args[0].is_floating_point() or args[0].dtype is torch.bool
        if func._opname in _COMPARISONS and args[0].is_floating_point() and args[0].numel() > 1:
            self.compares = True
        if isinstance(made, torch.Tensor) and not func.is_view and made.is_floating_point():
            self.kinds.add(made.dtype)
        if func._schema.name in ("aten::nll_loss_forward", "aten::nll_loss2d_forward"):
            target, weight, _, ignored = args[1:5]
            self.targets.append((target.detach().flatten().clone(), int(ignored)))
            self.weighted = self.weighted or weight is not None
        return made


class Failed(Exception):
    """The loss did not run; its message is the reason."""

    def __init__(self, message: str, *, unclear: bool = False) -> None:
        super().__init__(message)
        self.unclear = unclear
        """It says nothing of the loss: there was not enough memory, or nothing to compare."""


@dataclass(frozen=True)
class Values:
    """Losses of a few examples, whole and in parts."""

    whole: float
    cuts: list[tuple[list[Any], list[float]]]
    """Parts and their losses, for each way to cut."""
    tolerance: float

    def split_by(self, units: str | Units) -> bool:
        """Whether the parts add up to the whole."""
        return all(self._adds_up(units, parts, each) for parts, each in self.cuts)

    def _adds_up(self, units: str | Units, parts: list[Any], each: list[float]) -> bool:
        try:
            shares = [float(w) for w in weights(units, parts)]
        except (InputError, IndexError, RuntimeError):
            return False
        terms = [w * v for w, v in zip(shares, each, strict=True) if w]  # no unit: 0/0
        scale = max(abs(self.whole), *(abs(t) for t in terms), 1e-30)
        return abs(sum(terms) - self.whole) <= self.tolerance * scale
