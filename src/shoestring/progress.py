"""Progress of what takes long, on stderr, and how it is asked to end."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say on stderr what is going on once it takes longer than a second."""
    done = threading.Event()
    started = time.monotonic()
    terminal = sys.stderr.isatty()

    def report() -> None:
        if done.wait(1.0):
            return
        while True:
            elapsed = time.monotonic() - started
            sys.stderr.write(f"\r{what} … {elapsed:.0f} s" if terminal else f"{what} …\n")
            sys.stderr.flush()
            if done.wait(1.0 if terminal else 10.0):
                break
        if terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        with redirect_stdout(sys.stderr):  # what the user's own code prints is not our data
            yield
    finally:
        done.set()
        thread.join()


@contextmanager
def asked_to_end() -> Iterator[list[int]]:
    """A list that gets the number of a signal to end, for work that first comes to a good place.

    Outside of the main thread, where there are no signals, it stays empty.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {n: signal.signal(n, lambda number, _: asked.append(number)) for n in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
