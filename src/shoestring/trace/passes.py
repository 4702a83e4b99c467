"""Loops whose passes are alike: to know what memory they take, a first and a last one will do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

Pass = TypeVar("Pass")
_few = 0
"""Nesting depth of `peak_only()`, process-wide: a backward pass may run in another thread."""


@contextmanager
def peak_only() -> Iterator[None]:
    """Within: steps on fake tensors of which nothing but the peak is looked at."""
    global _few
    _few += 1
    try:
        yield
    finally:
        _few -= 1


def passes(loop: Sequence[Pass]) -> Sequence[Pass]:
    """All of a loop; where only the peak is asked for, the first and the last.

    For loops of which no pass needs more than the first, and none keeps anything.
    """
    return loop if not _few or len(loop) < 3 else (loop[0], loop[-1])
