"""Loops whose passes are alike: to know what memory they take, a first and a last one will do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

Pass = TypeVar("Pass")
_few = 0
"""Nesting depth of `peak_only()`, process-wide: a backward pass may run in another thread."""
_times = 1
"""How many passes the one that runs now stands for, process-wide as well."""


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


def counted(loop: Sequence[Pass]) -> list[tuple[Pass, int]]:
    """Of a loop over fake tensors the first pass, one for all between, and the last.

    Each comes with how many it stands for: run it within `standing_for` that number, and a trace
    has the memory and the work of all, without as many operations. For loops as `passes` takes.
    """
    if len(loop) < 4 or _few:
        return [(one, 1) for one in passes(loop)]
    return [(loop[0], 1), (loop[1], len(loop) - 2), (loop[-1], 1)]


@contextmanager
def standing_for(times: int) -> Iterator[None]:
    """Within: every operation is recorded as so many alike."""
    global _times
    before, _times = _times, _times * times
    try:
        yield
    finally:
        _times = before


def times() -> int:
    """How many operations the one that is recorded now stands for."""
    return _times
