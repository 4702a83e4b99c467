"""Bounds for configurations, which may come from anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules.module import register_module_module_registration_hook

from ..errors import InputError

_THINGS = {"layer": 10**4, "depth": 10**4, "label": 10**6, "expert": 10**6, "block": 10**6}
"""Parts of the names of settings that count what is made one by one, and the most of each."""
_MOST, _MOST_MODULES = 10**12, 100_000


def check_sizes(held: Any, name: str = "it") -> None:
    """ValueError for numbers that no model has, before a list of so many things is made.

    And for names of kernels on the hub, which transformers would fetch and run.
    """
    if isinstance(held, dict):
        for key, value in held.items():
            # By part of a model it may be a dict, whose keys are the parts.
            inside = name if name.endswith("_implementation") else str(key)
            check_sizes(value, inside)
    elif isinstance(held, list):
        for value in held:
            check_sizes(value, name)
    elif isinstance(held, str):
        if name.endswith("_implementation") and "/" in held:
            raise ValueError(f"{name} names code on the hub, {held[:60]!r}, which is not run")
    elif isinstance(held, int):
        most = min((most for word, most in _THINGS.items() if word in name), default=_MOST)
        if abs(held) > most:
            raise ValueError(f"{name} is {str(held)[:30]}, more than {most:,}")


@contextmanager
def counted_modules(name: str) -> Iterator[None]:
    """InputError for a model of more modules than any has: to build them takes all memory."""
    count = 0

    def registered(*_: object) -> None:
        nonlocal count
        count += 1
        if count > _MOST_MODULES:
            raise InputError(
                f"{name} has more than {_MOST_MODULES:,} modules", hint="check its configuration"
            )

    handle = register_module_module_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()
