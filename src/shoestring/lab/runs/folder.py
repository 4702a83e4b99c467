"""The folder of a run: made or refused, and locked while somebody writes into it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import InputError, TrainingStopped
from ..records.run import FILE
from . import snapshot

_LOCK = ".lock"


@contextmanager
def run_folder(path: Path, *, resume: bool) -> Iterator[Path]:
    """The folder, held by this process alone; the system lets go of it however the process ends."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise InputError(
            f"cannot write to {path}: {error.strerror}", hint="name another folder with --out"
        ) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another run is writing to {path}", hint="name another folder with --out"
            ) from None
        if not resume and ((path / FILE).exists() or snapshot.found(path)):
            raise InputError(
                f"{path} holds a run already", hint="go on with --resume, or name another --out"
            )
        yield path
    finally:
        os.close(handle)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A disk that is full, say, ends the run in one line; it can go on from its snapshot."""
    try:
        yield
    except OSError as error:
        raise TrainingStopped(
            f"cannot write to {error.filename or folder}: {error.strerror}",
            hint="make room and go on with --resume",
        ) from error
