"""Files that may come from a stranger are read with care, and ours are written whole or not."""

from __future__ import annotations

import json
import math
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

PARTIAL = ".partial"
"""Ends the name of a file that is being written."""


class NotAFile(OSError):
    """A FIFO, a socket, a device or a folder in place of a file: to read it could wait forever."""

    def __init__(self, path: Path, kind: str = "not a plain file") -> None:
        super().__init__(0, kind, str(path))


def read(path: str | Path, most_bytes: int | None = None, *, plain: bool = True) -> bytes:
    """All of a file; OSError where it cannot be read, is too large or is not `plain`.

    Opened without waiting: a FIFO that nobody writes to would block for ever. What a user names
    on the command line need not be plain, such as /dev/stdin or a shell's `<(…)`.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_NONBLOCK * plain)), "rb") as f:
        held = os.fstat(f.fileno())
        if plain and not stat.S_ISREG(held.st_mode):
            raise NotAFile(Path(path))
        if most_bytes is None:
            return f.read()
        data = f.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise NotAFile(Path(path), f"more than {most_bytes:,} bytes")
    return data


def write(path: str | Path, data: bytes | memoryview) -> None:
    """Replace a file as a whole: written beside it, on the disk, renamed; OSError if it cannot be.

    A link is followed. What is not a plain file (/dev/stdout) is written to as it is.
    """
    place = Path(os.path.realpath(path))
    mode = None
    try:
        held = os.stat(place)
    except FileNotFoundError:
        pass
    else:
        mode = stat.S_IMODE(held.st_mode)
        if not stat.S_ISREG(held.st_mode):
            place.write_bytes(data)
            return
    beside = place.with_name(f".{place.name[:100]}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        # Never through a link that somebody put there.
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(beside, flags, 0o666)
        try:
            if mode is not None:
                os.fchmod(handle, mode)
            left = memoryview(data)
            while left:
                left = left[os.write(handle, left) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(beside, place)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise
    flush_names(place.parent)


def flush_names(folder: Path) -> None:
    """A renamed file is there after a power cut only when its folder is on the disk too."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_partial(folder: Path) -> None:
    """Remove what a killed process left half-written; only for who holds the folder alone."""
    for path in folder.glob(f".*{PARTIAL}"):
        with suppress(OSError):
            path.unlink()


def json_text(value: Any, *, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON that every reader takes: NaN and infinities, which it has no word for, become null."""
    return json.dumps(finite(value), ensure_ascii=ensure_ascii, allow_nan=False, **options)


def finite(value: Any) -> Any:
    """The same values without NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(held) for name, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(held) for held in value]
    return value
