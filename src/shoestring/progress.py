"""Progress of what takes long, on stderr, and how it is asked to end."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress


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
            line = f"{what} … {time.monotonic() - started:.0f} s"
            sys.stderr.write(f"\r{line}" if terminal else f"{line}\n")
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


AGAIN_SECONDS = 0.2
"""A signal that comes twice within this time came once: `timeout` and some shells send two."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""The stronger one first."""


@contextmanager
def asked_to_end() -> Iterator[list[int]]:
    """A list that gets the number of a signal to end, for work that first comes to a good place.

    A second signal ends the process at once, whatever it does: a thread of its own sees to that,
    since an update that hangs in C++ or on a GPU never comes back to Python's handlers.
    Outside of the main thread, where there are no signals, the list stays empty.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    theirs, ours = socket.socketpair()
    ours.setblocking(False)
    watch = threading.Thread(target=_end_at_the_second, args=(theirs,), daemon=True)
    watch.start()
    woken = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    before = {n: signal.signal(n, lambda number, _: asked.append(number)) for n in _SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(woken)
        ours.close()
        watch.join()
        theirs.close()


def _end_at_the_second(signals: socket.socket) -> None:
    """Until the other end is closed; the system writes the number of every signal there."""
    first: dict[int, float] = {}
    while data := signals.recv(1):
        if data[0] not in _SIGNALS:
            continue
        now = time.monotonic()
        # Ray answers a SIGTERM with a SIGINT of its own: only a stronger signal is a second one.
        weaker = [first[n] for n in _SIGNALS[_SIGNALS.index(data[0]) :] if n in first]
        if data[0] not in first:
            first[data[0]] = now
        if weaker and now - min(weaker) > AGAIN_SECONDS:
            name = signal.Signals(data[0]).name
            said = f"ended by a second signal, {name}; everything up to the last snapshot is kept\n"
            with suppress(OSError):
                os.write(2, said.encode())
            os._exit(128 + data[0])
