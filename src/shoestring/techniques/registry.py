"""The techniques there are, by name, in the order they are applied.

Others register theirs by an entry point of the group "shoestring.techniques", or by `register`.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from ..errors import InputError
from .base import Flag, Technique

GROUP = "shoestring.techniques"
_known: dict[str, type[Technique]] = {}
Kind = TypeVar("Kind", bound=type[Technique])


def register(kind: Kind) -> Kind:
    """Make a technique known under its `name`; used as a decorator.

    Args:
        kind: A frozen dataclass that derives from `Technique`.

    Returns:
        The same class.

    Examples:
        >>> @ss.register
        ... @dataclass(frozen=True)
        ... class Mine(ss.Technique):
        ...     name = "mine"
    """
    name = kind.name
    if not (is_dataclass(kind) and kind.__dataclass_params__.frozen):
        raise TypeError(f"{kind.__name__} must be a frozen dataclass")
    if _known.get(name, kind).__qualname__ != kind.__qualname__:
        raise ValueError(f"the name {name!r} is taken by {_known[name].__qualname__}")
    flags = {flag.name: other.name for other in _known.values() for flag in other.flags}
    for flag in kind.flags:
        if flags.get(flag.name, name) != name:
            raise ValueError(f"the flag {flag.name!r} is taken by {flags[flag.name]}")
    _known[name] = kind
    return kind


def unregister(name: str) -> None:
    """Forget a technique."""
    _known.pop(name, None)


@cache
def _load_others() -> None:
    for point in entry_points(group=GROUP):
        try:
            register(point.load())
        except Exception as error:
            raise InputError(
                f"the technique {point.name} ({point.value}) cannot be loaded: {error}",
                hint="repair or uninstall the package it comes from",
            ) from error


def registered() -> dict[str, type[Technique]]:
    """All of them by name, in the order they are applied."""
    _load_others()
    return dict(sorted(_known.items(), key=lambda item: (item[1].order, item[0])))


def flags() -> dict[str, Flag]:
    """The flags of all techniques by name."""
    return {flag.name: flag for kind in registered().values() for flag in kind.flags}


def neutral_flags() -> dict[str, Any]:
    """Values of flags that change nothing."""
    return {n: flag.neutral for n, flag in flags().items() if flag.neutral is not None}


def name_of(technique: object) -> str:
    """The name a technique is registered under, or InputError."""
    name = getattr(technique, "name", None)
    if isinstance(technique, Technique) and name in registered():
        return str(name)
    if isinstance(technique, type) and issubclass(technique, Technique):
        kind = technique.__name__
        raise InputError(f"{kind} is a class, not a technique", hint=f"make one: {kind}(…)")
    raise InputError(f"{technique!r} is not a technique", hint="one of " + ", ".join(registered()))
