"""Random depth: a step whose course hangs on single random numbers is traced for its worst draw.

    if torch.rand([]) < self.layerdrop: continue       skips a layer for low numbers
    if random.random() < self.survival: x = layer(x)   runs one for low numbers

How much memory such a step takes is another question every time. A budget must hold for all of
them, so such a step is traced with all numbers low and all numbers high, and the trace that needs
most is taken. Tensors of random numbers decide nothing and stay as they are.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

LOW, HIGH = 0.0, 1.0 - 2.0**-20
"""What a draw from [0, 1) can be at most, in FP32 as well."""
Found = TypeVar("Found")
_pinned: ContextVar[float | None] = ContextVar("pinned", default=None)
_FUNCTIONS = (
    *((random, name) for name in ("random", "uniform")),
    *((np.random, name) for name in ("rand", "random", "random_sample", "uniform")),
)


class _Drawn:
    """Whether a single number was drawn since it was last asked."""

    any = False


_aten = torch.ops.aten
_DRAWS = (_aten.rand.default, _aten.bernoulli.default, _aten.bernoulli_.float,
          _aten.bernoulli_.Tensor, _aten.bernoulli.p, _aten.uniform_.default)  # fmt: skip


def is_single_draw(func: Any, out: Any) -> bool:
    """Whether an operation drew one number between 0 and 1, or one truth value."""
    if func not in _DRAWS or not isinstance(out, torch.Tensor) or out.numel() != 1:
        return False
    return out.is_floating_point()


def pinned(real: torch.Tensor) -> torch.Tensor:
    """A number that was drawn, or the extreme that is asked for now."""
    _Drawn.any = True
    at = _pinned.get()
    return real if at is None else real.fill_(at)


def is_pinned() -> bool:
    """Whether an extreme is asked for now."""
    return _pinned.get() is not None


def extreme() -> float | None:
    """The one that is asked for now."""
    return _pinned.get()


_worst: weakref.WeakKeyDictionary[nn.Module, float | None] = weakref.WeakKeyDictionary()
"""Models that were traced, and the draw at which they need most; None if they draw nothing."""


def at_worst(model: nn.Module, trace: Callable[[], Found], need: Callable[[Found], int]) -> Found:
    """A trace of the model at its worst draw, which is found on the first call."""
    if is_pinned():
        return trace()
    if model not in _worst:
        watched = _Watched()
        with watched:
            first = trace()
        if not watched.drawn:
            _worst[model] = None
            return first
        _worst[model] = max((LOW, HIGH), key=lambda extreme: need(_at(extreme, trace)))
    extreme = _worst[model]
    return trace() if extreme is None else _at(extreme, trace)


def has_random_depth(model: nn.Module) -> bool:
    """Whether a trace of the model met single numbers that are drawn."""
    return _worst.get(model) is not None


def _at(extreme: float, trace: Callable[[], Found]) -> Found:
    with at_extreme(extreme):
        return trace()


class _Watched:
    """Notices draws of single numbers, by PyTorch, Python and NumPy."""

    drawn = False

    def __enter__(self) -> _Watched:
        self._outer, _Drawn.any = _Drawn.any, False
        self._plain = [(module, name, getattr(module, name)) for module, name in _FUNCTIONS]
        for module, name, plain in self._plain:
            setattr(module, name, self._noting(plain))
        return self

    def __exit__(self, *error: Any) -> None:
        for module, name, plain in self._plain:
            setattr(module, name, plain)
        self.drawn = self.drawn or _Drawn.any
        _Drawn.any = self._outer or _Drawn.any

    def _noting(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def drawing(*args: Any, **kwargs: Any) -> Any:
            made = plain(*args, **kwargs)
            self.drawn = self.drawn or isinstance(made, float)
            return made

        return drawing


@contextmanager
def at_extreme(extreme: float) -> Iterator[None]:
    """Inside, single numbers are the lowest or the highest there are; streams move as ever."""
    token = _pinned.set(extreme)
    plain = [(module, name, getattr(module, name)) for module, name in _FUNCTIONS]

    def drawing(draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            made = draw(*args, **kwargs)
            if not isinstance(made, float):
                return made
            low = float(args[0]) if args else float(kwargs.get("low", kwargs.get("a", 0.0)))
            high = float(args[1]) if len(args) > 1 else float(kwargs.get("high", 1.0))
            return low + (high - low) * extreme

        return drawn

    for module, name, draw in plain:
        setattr(module, name, drawing(draw))
    try:
        yield
    finally:
        for module, name, draw in plain:
            setattr(module, name, draw)
        _pinned.reset(token)
