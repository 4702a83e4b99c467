"""Model → a copy, where `copy.deepcopy` refuses one, or makes one that goes on using the original.

It refuses tensors with a graph: a result that a module keeps, a weight that a hook makes. And it
takes functions as they are. One that is set on a module, `block.forward = again`, or registered as
a hook may hold a module of the model: in a closure, an argument's default or a `functools.partial`.
In a plain copy it would go on reading, and training, the original.
"""

from __future__ import annotations

import copy
import functools
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


def copied_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy; `memo` is as for `copy.deepcopy`.

    Results of functions are copied without their graph. The next forward pass makes them anew: from
    a graph that is freed no step can train.
    """
    memo = {} if memo is None else memo
    with _WithoutGraphs():
        made = copy.deepcopy(model, memo)
    functions = _Functions(memo)
    for module in made.modules():
        held = vars(module)
        for name, value in held.items():
            now = functions.of(value)
            if now is not value:
                held[name] = now
    return made


class _WithoutGraphs(TorchFunctionMode):
    """Within, `deepcopy` copies the result of a function as well, without its graph."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return func(*args, **(kwargs or {}))


class _Functions:
    """Functions that hold something of a model, made anew to hold what stands for it in a copy."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._copies = memo
        self._made: dict[int, Any] = {}
        self._known: list[Any] = []
        """Functions that were seen, so that ids stay their own."""

    def of(self, value: Any) -> Any:
        """The same, but for functions and what holds some; itself if nothing in it was copied."""
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, functools.partial):
            parts = [value.func, *value.args, *value.keywords.values()]
            now = list(map(self._held, parts))
            if all(a is b for a, b in zip(parts, now, strict=True)):
                return value
            arguments, named = now[1 : 1 + len(value.args)], now[1 + len(value.args) :]
            return type(value)(now[0], *arguments, **dict(zip(value.keywords, named, strict=True)))
        if isinstance(value, dict):  # hooks are one
            for key, one in value.items():
                now = self.of(one)
                if now is not one:
                    value[key] = now
        return value

    def _held(self, value: Any) -> Any:
        """Of something that a function holds."""
        if id(value) in self._copies and not isinstance(value, (FunctionType, type)):
            return self._copies[id(value)]
        if isinstance(value, MethodType):
            owner = self._held(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if type(value) in (list, tuple):
            now = list(map(self._held, value))
            same = all(a is b for a, b in zip(value, now, strict=True))
            return value if same else type(value)(now)
        return value if isinstance(value, dict) else self.of(value)

    def _function(self, function: FunctionType) -> Any:
        if id(function) in self._made:
            return self._made[id(function)]
        cells, defaults = function.__closure__ or (), function.__defaults__ or ()
        named = function.__kwdefaults__ or {}
        if not (cells or defaults or named):
            return function
        empty = tuple(CellType() for _ in cells)
        made = FunctionType(
            function.__code__, function.__globals__, function.__name__, closure=empty
        )
        self._known.append(function)
        self._made[id(function)] = made  # it may hold itself
        before = [*map(_content, cells), *defaults, *named.values()]
        after = list(map(self._held, before))
        if all(a is b or b is made for a, b in zip(before, after, strict=True)):
            self._made[id(function)] = function
            return function
        for cell, content in zip(empty, after, strict=False):
            if content is not _NOTHING:
                cell.cell_contents = content
        made.__dict__.update(function.__dict__)
        made.__qualname__, made.__doc__ = function.__qualname__, function.__doc__
        made.__module__, made.__annotations__ = function.__module__, function.__annotations__
        made.__defaults__ = tuple(after[len(cells) : len(cells) + len(defaults)]) or None
        made.__kwdefaults__ = dict(zip(named, after[len(cells) + len(defaults) :], strict=True))
        return made


_NOTHING = object()


def _content(cell: CellType) -> Any:
    """A cell is empty until its variable is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return _NOTHING
