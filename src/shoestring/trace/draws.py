"""Random depth: a step in which single random numbers decide what runs is traced at its worst.

    if torch.rand([]) < self.layerdrop: continue       skips a layer for low numbers
    if random.random() < self.survival: x = layer(x)   runs one for low numbers
    for layer in self.layers[: random.randint(1, 8)]   runs more for high ones

Such a step takes another amount of memory every time, and a budget must hold for all draws. So the
step is traced with all numbers low and with all numbers high, and the larger trace is used. Tensors
of random numbers decide nothing and stay as they are.
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

from ..errors import ShoestringError

LOW, HIGH = 0.0, 1.0 - 2.0**-20
"""The largest draw from [0, 1), in FP32 as well."""
Found = TypeVar("Found")
_pinned: ContextVar[float | None] = ContextVar("pinned", default=None)


def _fraction(made: Any, at: float, low: Any = 0.0, high: Any = 1.0, **named: Any) -> Any:
    low, high = float(named.get("a", low)), float(named.get("b", high))
    return low + (high - low) * at if isinstance(made, float) else made


def _number(made: Any, at: float, *args: Any, **named: Any) -> Any:
    return _end(range(*args, *named.values()), at) if isinstance(made, int) else made


def _number_to(made: Any, at: float, a: int, b: int) -> Any:
    return a if at == LOW else b


def _choice(made: Any, at: float, among: Any, *args: Any, **named: Any) -> Any:
    if isinstance(made, np.ndarray) and made.ndim:  # several
        return made
    return _end(range(among) if isinstance(among, int) else among, at)


def _end(among: Any, at: float) -> Any:
    return among[0] if at == LOW else among[-1]


_FUNCTIONS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    *((random, name, _fraction) for name in ("random", "uniform")),
    *((np.random, name, _fraction) for name in ("rand", "random", "random_sample", "uniform")),
    (random, "randint", _number_to),
    (random, "randrange", _number),
    (np.random, "randint", _number),
    *((module, "choice", _choice) for module in (random, np.random)),
)
"""Which draw single numbers, and what each gives at an extreme, by what it was given."""


class _Drawn:
    """Whether a single number was drawn since it was last asked."""

    any = False


_aten = torch.ops.aten
_DRAWS = (_aten.rand.default, _aten.bernoulli.default, _aten.bernoulli_.float,
          _aten.bernoulli_.Tensor, _aten.bernoulli.p, _aten.uniform_.default)  # fmt: skip
_WHOLE = (_aten.randint.default, _aten.randint.low)


def is_single_draw(func: Any, out: Any) -> bool:
    """Whether an operation drew one number between 0 and 1 or two bounds, or one truth value."""
    if not isinstance(out, torch.Tensor) or out.numel() != 1:
        return False
    return func in _WHOLE or (func in _DRAWS and out.is_floating_point())


def pinned(real: torch.Tensor, func: Any, args: tuple[Any, ...]) -> torch.Tensor:
    """A number that was drawn, or the extreme that is asked for now."""
    _Drawn.any = True
    at = _pinned.get()
    if at is None:
        return real
    if func not in _WHOLE:
        return real.fill_(at)
    low, high = (0, args[0]) if func is _aten.randint.default else args[:2]
    return real.fill_(low if at == LOW else high - 1)


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
        try:
            with watched:
                first = trace()
        except ShoestringError:
            if not watched.drawn:
                raise
        if not watched.drawn:
            _worst[model] = None
            return first
        _worst[model] = _needier(trace, need)
    extreme = _worst[model]
    return trace() if extreme is None else _at(extreme, trace)


def _needier(trace: Callable[[], Found], need: Callable[[Found], int]) -> float:
    """The extreme that needs more; one at which nothing is left to train is none."""
    found: dict[float, int] = {}
    failed: ShoestringError | None = None
    for at in (LOW, HIGH):
        try:
            found[at] = need(_at(at, trace))
        except ShoestringError as error:
            failed = error
    if failed is not None and not found:
        raise failed
    return max(found, key=lambda at: found[at])


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
        self._plain = [(module, name, getattr(module, name)) for module, name, _ in _FUNCTIONS]
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
            self.drawn = self.drawn or not isinstance(made, np.ndarray)
            return made

        return drawing


@contextmanager
def at_extreme(extreme: float) -> Iterator[None]:
    """Inside, single numbers are the lowest or the highest there are; streams move as ever."""
    token = _pinned.set(extreme)
    plain = [(module, name, getattr(module, name)) for module, name, _ in _FUNCTIONS]

    def drawing(draw: Callable[..., Any], end: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            return end(draw(*args, **kwargs), extreme, *args, **kwargs)

        return drawn

    for (module, name, draw), (_, _, end) in zip(plain, _FUNCTIONS, strict=True):
        setattr(module, name, drawing(draw, end))
    try:
        yield
    finally:
        for module, name, draw in plain:
            setattr(module, name, draw)
        _pinned.reset(token)
