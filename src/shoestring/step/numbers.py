"""Plain numbers that a step reads in Python, beside those of its modules.

A captured step knows them by value: the weight of a term that grows, a threshold in a settings
object, a step that a closure counts. Only what the code names is looked at, so that a trainer's own
counters, which no loss reads, change nothing.

def loss(model, batch):
    return first(model, batch) + settings.beta * second(model, batch)

settings.beta is watched, and settings.steps, which nobody reads there, is not
"""

from __future__ import annotations

import functools
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

Place = tuple[Any, str]
"""A mapping, and the name of a number in it."""
_DEEPEST = 4
_PLAIN = (bool, int, float)


class _Cell:
    """A variable of a closure, as a mapping of one name."""

    def __init__(self, cell: Any) -> None:
        self._cell = cell

    def get(self, _: str) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # empty
            return None

    def __setitem__(self, _: str, value: Any) -> None:
        self._cell.cell_contents = value


class _Attributes:
    """Those of an object, or of its class, as a mapping."""

    def __init__(self, holder: Any) -> None:
        self._holder = holder

    def get(self, name: str) -> Any:
        return getattr(self._holder, name, None)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._holder, name, value)


def numbers_of(module: nn.Module) -> dict[str, Any]:
    """Its plain numbers: rates, temperatures, whether it trains."""
    return {k: v for k, v in module.__dict__.items() if type(v) in _PLAIN}


def numbers_around(
    functions: Iterable[Callable[..., Any]], modules: Iterable[nn.Module]
) -> list[Place]:
    """Places of numbers that functions name, and that the forward passes of modules do."""
    found = _Found(modules)
    for function in functions:
        found.look_at(function, {}, "", (), 0)
    for module in found.modules:
        found.look_into(module, _names(type(module).forward.__code__), 1)
    return list(found.places.values())


def number_at(place: Place) -> Any:
    """The number there now, also one that a tensor on the host holds."""
    value = place[0].get(place[1])
    if type(value) is torch.Tensor and value.is_cpu and value.numel() == 1:
        return value.item()
    return value if type(value) in _PLAIN else None


def put_back(place: Place, value: Any) -> None:
    """As it was found."""
    if place[0].get(place[1]) is not value:
        place[0][place[1]] = value


class _Found:
    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.places: dict[tuple[int, str], Place] = {}
        self.modules = [m for m in modules if isinstance(type(m).forward, types.FunctionType)]
        self._alive: list[Any] = []
        self._seen: set[Any] = {id(module) for module in self.modules}

    def look_at(self, value: Any, held: Any, name: str, names: Iterable[str], depth: int) -> None:
        """One value that code names, and what it names of that."""
        if type(value) in _PLAIN or type(value) is torch.Tensor:
            self.places[id(held), name] = held, name
        elif depth > _DEEPEST:
            return
        elif isinstance(value, functools.partial):
            self.look_at(value.func, {}, "", (), depth + 1)
            for key, given in value.keywords.items():
                self.look_at(given, value.keywords, key, (), depth + 1)
        elif isinstance(value, types.MethodType):
            if isinstance(value.__func__, types.FunctionType):
                self._look_at_code(value.__func__, value.__self__, depth)
        elif isinstance(value, types.FunctionType):
            self._look_at_code(value, None, depth)
        elif isinstance(value, nn.Module):
            for module in value.modules():
                if id(module) not in self._seen:
                    self._seen.add(id(module))
                    for key in numbers_of(module):
                        self.places[id(module), key] = module.__dict__, key
        else:
            self.look_into(value, names, depth + 1)

    def look_into(self, holder: Any, names: Iterable[str], depth: int) -> None:
        """Items, attributes and methods of these names."""
        if depth > _DEEPEST or (id(holder), tuple(names)) in self._seen:
            return
        self._seen.add((id(holder), tuple(names)))
        self._alive.append(holder)  # so that no other gets its number
        held = holder if isinstance(holder, dict) else _Attributes(holder)
        inside = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
        for name in (*names, "__call__"):
            value = inside[name] if name in inside else getattr(type(holder), name, None)
            if isinstance(value, types.MemberDescriptorType):  # of a class with slots
                value = held.get(name)
            if isinstance(value, types.FunctionType) and name not in inside:
                self._look_at_code(value, holder, depth)
            elif value is not None and not (isinstance(holder, nn.Module) and _is_own(value)):
                self.look_at(value, held, name, names, depth)

    def _look_at_code(self, function: types.FunctionType, own: Any, depth: int) -> None:
        code = function.__code__
        seen = id(function), id(own)
        if seen in self._seen or depth > _DEEPEST or _of_library(code):
            return
        self._seen.add(seen)
        names = _names(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            variable = _Cell(cell)
            self.look_at(variable.get(name), variable, name, names, depth + 1)
        for name in names:
            if name in function.__globals__:
                around = function.__globals__
                self.look_at(around[name], around, name, names, depth + 1)
        if own is not None:
            self.look_into(own, names, depth + 1)


def _is_own(value: Any) -> bool:
    """Of a module: watched by `numbers_of`, or no number."""
    return type(value) in _PLAIN or isinstance(value, (torch.Tensor, nn.Module))


def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names and keys in a function, and in those it makes."""
    return tuple(dict.fromkeys(_all_names(code)))


def _all_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _all_names(constant)


def _of_library(code: types.CodeType) -> bool:
    """Python's, another's, or ours: a user sets nothing there."""
    return code.co_filename.startswith(_LIBRARIES) or "site-packages" in code.co_filename


_LIBRARIES = ("<frozen", sysconfig.get_paths()["stdlib"], str(Path(__file__).parent.parent))
