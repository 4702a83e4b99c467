"""Which cases of a parametrized test `make test` runs; `make test-all` runs the others too."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(few: int, values: Iterable[Any]) -> list[Any]:
    """The values, all but the first few marked slow."""
    return [
        v if number < few else pytest.param(*_cases(v), marks=pytest.mark.slow)
        for number, v in enumerate(values)
    ]


def _cases(value: Any) -> tuple[Any, ...]:
    """Of several arguments, each by itself."""
    return value if type(value) is tuple else (value,)
