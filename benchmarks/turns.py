"""One GPU, several processes: one of them runs steps while the others plan, so times stay true.

Where the environment names no file of turns, nothing waits.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILE = "GPU_TURNS"
"""The environment variable that names the file which is locked."""
_held = 0
_waited = 0.0


@contextmanager
def turn() -> Iterator[None]:
    """Alone on the GPU among the processes that ask; within a turn it is there already."""
    global _held, _waited
    name = os.environ.get(FILE)
    if name is None or _held:
        yield
        return
    with Path(name).open("a") as file:
        began = time.perf_counter()
        fcntl.flock(file, fcntl.LOCK_EX)
        _waited += time.perf_counter() - began
        _held += 1
        try:
            yield
        finally:
            _held -= 1


def busy() -> float:
    """As `time.perf_counter`, without the seconds until turns came."""
    return time.perf_counter() - _waited


def take_turns() -> None:
    """What planning runs on the GPU takes turns, too: steps that are tried, rates, models run."""
    if FILE not in os.environ:
        return
    from shoestring.planning import by_running, cost, trial

    for owner, name in (
        (trial.Trials, "run"), (by_running._Trials, "needed"), (cost, "_gpu"),
    ):  # fmt: skip
        setattr(owner, name, _in_turn(getattr(owner, name)))


def _in_turn(inner: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with turn():
            return inner(*args, **kwargs)

    return wrapped
