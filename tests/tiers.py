"""Which cases of a parametrized test `make test` runs; `make test-all` runs the others too."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(few: int, values: Iterable[Any], *, several: bool = False) -> list[Any]:
    """The values, all but the first few marked slow; with `several` arguments each, tuples."""
    return [
        v if number < few else pytest.param(*(v if several else (v,)), marks=pytest.mark.slow)
        for number, v in enumerate(values)
    ]
