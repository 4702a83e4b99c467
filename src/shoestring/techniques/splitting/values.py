"""Losses of a few examples, whole and in parts, and what was seen while they were computed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import InputError
from ...torch_private.dispatch import OperationMode
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
_BENDS = frozenset(
    "abs relu threshold clamp clamp_min clamp_max maximum minimum max min amax amin".split()
)
"""Functions that are linear on each side of a point."""


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
        self.bends = False
        """A function that is linear on each side of a point had a number or a list of them."""

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Look at the arguments of likelihoods."""
        made = func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads = self.reads or args[0].is_floating_point() or args[0].dtype is torch.bool
        if func._opname in _COMPARISONS and args[0].is_floating_point() and args[0].numel() > 1:
            self.compares = True
        self.bends = self.bends or (_bends(func, args) and args[0].dim() < 2)
        if isinstance(made, torch.Tensor) and not func.is_view and made.is_floating_point():
            self.kinds.add(made.dtype)
        if func._schema.name in ("aten::nll_loss_forward", "aten::nll_loss2d_forward"):
            target, weight, _, ignored = args[1:5]
            self.targets.append((target.detach().flatten().clone(), int(ignored)))
            self.weighted = self.weighted or weight is not None
        return made


def _bends(func: Any, args: tuple[Any, ...]) -> bool:
    return func._opname in _BENDS and args[0].is_floating_point()


class Bent(OperationMode):
    """Bends some of those functions at every point, and notes all that depend on parameters.

    `kl.mean().clamp(min=1)` is a mean, or a constant, until examples lie on both sides.
    """

    def __init__(self, chosen: Collection[int]) -> None:
        super().__init__()
        self._chosen = chosen
        self.shapes: list[tuple[int, ...] | None] = []
        """Of what they are given, in order; None where no parameter has a part in it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if not _bends(func, args) or not isinstance(made, torch.Tensor):
            return made
        given = [a for a in args[:2] if isinstance(a, torch.Tensor)]
        trained = any(a.requires_grad for a in given)
        self.shapes.append(tuple(given[0].shape) if trained else None)
        if len(self.shapes) - 1 not in self._chosen:
            return made
        return made + sum((a * a if a.shape == made.shape else (a * a).sum()) for a in given)


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
