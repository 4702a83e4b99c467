"""The schema of a study's file: a type for every key, and the names it may use."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Iterable, Mapping
from types import GenericAlias, NoneType, UnionType
from typing import Any, get_args, get_origin

from ...errors import InputError, did_you_mean

_WORDS = {
    str: ("a text", "texts"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    dict: ("a table", "tables"),
}


def check(given: Mapping[str, Any], kinds: Mapping[str, Any], where: str = "") -> None:
    """InputError for a value of another kind; what has no kind may be anything."""
    for name, value in given.items():
        if name in kinds and not _fits(value, kinds[name]):
            one = kinds[name] == list[dict] and isinstance(value, dict)
            hint = f"[[{name}]] in place of [{name}]" if one else None
            raise InputError(
                f"{where} {name} must be {_said(kinds[name])}, not {reprlib.repr(value)}".strip(),
                hint=hint,
            )


def or_list(kind: Any) -> Any:
    """One value of the kind, or several."""
    return kind | GenericAlias(list, (kind,))


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(item, *get_args(kind)) for item in value)
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def _said(kind: Any, plural: bool = False) -> str:
    if isinstance(kind, UnionType):
        return " or ".join(_said(one, plural) for one in get_args(kind) if one is not NoneType)
    if get_origin(kind) is list:
        return "a list of " + _said(get_args(kind)[0], plural=True)
    return _WORDS[kind][plural]


def at_least_one(name: str, number: int) -> int:
    """The number, or InputError."""
    if number < 1:
        raise InputError(f"{name} {number} is below 1", hint="a whole number from 1")
    return number


def positive(name: str, number: float | None) -> float | None:
    """The number, or InputError unless it is above 0 and finite."""
    if number is not None and not 0 < number < math.inf:
        raise InputError(f"{name} {number:g} is not above 0")
    return number


def known(names: Iterable[str], there: Collection[str], where: str) -> None:
    """InputError for a name of no setting."""
    for name in names:
        if name not in there:
            raise InputError(
                f"{where} has no setting {name!r}", hint=did_you_mean(name, sorted(there))
            )


def named(names: Iterable[str], there: Collection[str], where: str, what: str = "setting") -> None:
    """InputError for a name that the study does not set, or know."""
    for name in names:
        if name not in there:
            raise InputError(
                f"{where} names {name!r}, which is not a {what} of this study",
                hint=did_you_mean(name, sorted(there)),
            )
