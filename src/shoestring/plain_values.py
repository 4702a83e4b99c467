"""Results ↔ plain values, which JSON can hold: `to_dict` and `from_dict` of every result class."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

import numpy as np

from .errors import InputError


class PlainValues:
    """A dataclass of numbers, text, containers of them, and others that have `to_dict`."""

    def to_dict(self) -> dict[str, Any]:
        """Every field, by its name, as JSON can hold it."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote.

        Args:
            given: Field → plain value.

        Returns:
            A result with the same fields.
        """
        kinds = get_type_hints(cls)
        names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        if not isinstance(given, Mapping) or set(given) - set(names):
            found = sorted(given) if isinstance(given, Mapping) else given
            raise InputError(
                f"not a {cls.__name__}: {found}", hint="its to_dict() has " + ", ".join(names)
            )
        try:
            return cls(**{name: _made(kinds[name], value) for name, value in given.items()})
        except (TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"not a {cls.__name__}: {error}", hint="give its to_dict()") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(_plain(name)): _plain(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _made(kind: Any, value: Any) -> Any:
    """A plain value as the type that a field is annotated with."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _made(inner[0], value)
    if origin is tuple:
        kinds = [inner[0]] * len(value) if inner[1:] == (...,) else inner
        return tuple(_made(one, each) for one, each in zip(kinds, value, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        return {_made(inner[0], name): _made(inner[1], one) for name, one in value.items()}
    if hasattr(kind, "from_dict"):
        return kind.from_dict(value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if kind is np.ndarray:
        return np.array(value)
    return float(value) if kind is float else value
