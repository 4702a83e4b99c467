"""The folder of a run: made or refused, and locked while somebody writes into it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import InputError, TrainingStopped
from ..records.run import FILE
from . import snapshot

_LOCK = ".lock"
_ELSEWHERE = "name another folder with --out"
_NO_FOLDER_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP)
LONGEST_NAME = 120


def component(text: str) -> str:
    """The text as one part of a path, whatever a model or a data set is called."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", ".", text).lstrip(".")
    return plain[:LONGEST_NAME] or "run"


def check_place(path: Path) -> None:
    """InputError where no folder can be made, without writing anything."""
    nearest = path
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    why = None
    if not nearest.is_dir():
        why = f"{nearest} is not a folder"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        why = f"{nearest} cannot be written to"
    if why is not None:
        raise InputError(f"cannot write to {path}: {why}", hint=_ELSEWHERE)


@contextmanager
def run_folder(path: Path, *, resume: bool, make: bool = True) -> Iterator[Path]:
    """The folder, held by this process alone; the system lets go of it however the process ends.

    Without `make` it must be there, and nothing is written. The folder itself is locked: there is
    no file that could be deleted to let a second run in.
    """
    try:
        if make:
            path.mkdir(parents=True, exist_ok=True)
        handle = _locked(path)
    except BlockingIOError:
        raise InputError(f"another run is writing to {path}", hint=_ELSEWHERE) from None
    except OSError as error:
        raise InputError(f"cannot write to {path}: {error.strerror}", hint=_ELSEWHERE) from None
    try:
        if not resume and ((path / FILE).exists() or snapshot.found(path)):
            raise InputError(
                f"{path} holds a run already", hint="go on with --resume, or name another --out"
            )
        yield path
    finally:
        os.close(handle)


def _locked(path: Path) -> int:
    """A handle with a lock of the folder; BlockingIOError where somebody else has it.

    Network file systems lock only what is open for writing, which a folder never is: a file in it.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if error.errno not in _NO_FOLDER_LOCKS:
            raise
        flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(path / _LOCK, flags, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise
    return handle


def is_held(path: Path) -> bool:
    """Whether somebody writes into the folder now."""
    try:
        os.close(_locked(path))
    except BlockingIOError:
        return True
    return False


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
