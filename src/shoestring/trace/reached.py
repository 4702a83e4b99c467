"""Objects a function can reach beside its arguments: closures, their attributes and lists.

calls = 0; history = []
def loss(model, batch):
    nonlocal calls
    calls += 1; history.append(…)      found through the function's closure
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
from torch import nn

from .attributes import CONTAINERS, GENERATORS, copied, refill

_DEEPEST, _MOST = 5, 1000
"""Steps away from the function, of which the last may lead to a list or dict only (where trainers
note values by mode and name), and elements of a list that are looked at."""


class Reached:
    """A record of what functions refer to, which can be put back."""

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[int, int] = {}
        """Objects, and how near they were found: from nearer by, more is reached."""
        self._alive: list[Any] = []
        for function in functions:
            self._look(function, 0)

    def restore(self) -> None:
        """Put variables, attributes and contents back."""
        for undo in self._undo:
            undo()

    def _look(self, value: Any, depth: int) -> None:
        # Tensors, modules and optimizers are looked after where they are used.
        if depth >= _DEEPEST + isinstance(value, CONTAINERS) or isinstance(value, _ELSEWHERE):
            return
        if depth >= self._seen.get(id(value), _DEEPEST + 1):
            return
        self._seen[id(value)] = depth
        self._alive.append(value)
        if isinstance(value, functools.partial):
            self._all([value.func, *value.args, *value.keywords.values()], depth)
        elif isinstance(value, types.MethodType):
            self._all([value.__func__, value.__self__], depth)
        elif isinstance(value, types.FunctionType):
            self._function(value, depth)
        elif isinstance(value, GENERATORS):
            self._undo.append(functools.partial(refill, value, copied(value)))
        elif isinstance(value, CONTAINERS):
            self._undo.append(functools.partial(refill, value, copied(value)))
            self._all(value.values() if isinstance(value, dict) else value, depth)
        elif isinstance(value, (tuple, frozenset)):
            self._all(value, depth)
        elif _has_attributes(value):
            attributes = value.__dict__
            self._undo.append(functools.partial(refill, attributes, dict(attributes)))
            self._all(attributes.values(), depth)

    def _all(self, values: Iterable[Any], depth: int) -> None:
        for value in islice(values, _MOST):
            self._look(value, depth + 1)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        for cell in function.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # empty
                continue
            self._undo.append(functools.partial(setattr, cell, "cell_contents", held))
            self._look(held, depth + 1)
        self._all(
            [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()], depth
        )
        around = function.__globals__
        for name in function.__code__.co_names:
            if name in around and not isinstance(around[name], _FIXED):
                self._undo.append(functools.partial(around.__setitem__, name, around[name]))
                self._look(around[name], depth + 1)


_ELSEWHERE = (torch.Tensor, nn.Module, torch.optim.Optimizer, types.ModuleType, type)
_FIXED = (types.ModuleType, type, types.BuiltinFunctionType)


def _has_attributes(value: Any) -> bool:
    """An object of the user's class; what libraries made is theirs."""
    library = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and library not in _LIBRARIES


_LIBRARIES = frozenset({"builtins", "torch", "numpy", "functools", "logging", "threading"})
