"""Snapshots: everything a run needs to go on, replaced as a whole or not at all.

A snapshot is a file of `torch.save`, read back with `weights_only` so that nothing in it runs. Its
name holds the step and the beginning of its SHA-256. A new one is written beside the old ones,
flushed to the disk and renamed; only then the oldest goes. Two are kept, in case one rots.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch

from ...errors import InputError, TrainingStopped
from ...units import format_size

KEPT = 2
_DIGITS = 16
"""Hexadecimal ones of the checksum: 64 bits."""
_NAME = re.compile(rf"(?:snapshot|weights)-(\d{{9}})-([0-9a-f]{{{_DIGITS}}})\.pt")
_TEMPORARY = ".snapshot.partial"


def save(
    folder: Path, step: int, state: dict[str, Any], *, kind: str = "snapshot", keep: int = KEPT
) -> Path:
    """Write the state of after `step` updates; the one before stays until this one is durable.

    `kind` is "snapshot", or "weights" for the model alone, which is averaged in the end.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getbuffer()
    path = folder / f"{kind}-{step:09d}-{_checksum(data)}.pt"
    temporary = folder / _TEMPORARY
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _flush_names(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        held = found(folder)
        kept = f"the last good one is {held[-1].name}" if held else "there is none before it"
        raise TrainingStopped(
            f"cannot write a snapshot of {format_size(len(data))} to {folder}: {error.strerror}; "
            f"{kept}",
            hint="make room and go on with --resume",
        ) from error
    held = found(folder, kind)
    again = [old for old in held if old != path and old.name.startswith(f"{kind}-{step:09d}-")]
    for old in (*again, *[one for one in held if one not in again][:-keep]):
        old.unlink(missing_ok=True)
    return path


def load_latest(folder: Path, *, held: bool = True) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest snapshot that is whole, None where there never was one; and what was passed over.

    InputError if there are some and none is whole. What was left half-written goes, but only where
    this process has `held` the folder: another may be writing it.
    """
    if held:
        (folder / _TEMPORARY).unlink(missing_ok=True)
    damaged: list[str] = []
    for path in reversed(found(folder)):
        try:
            return load(path), damaged
        except InputError as error:
            damaged.append(error.message)
    if damaged:
        raise InputError("; ".join(damaged), hint="start again in another folder")
    return None, damaged


def load(path: Path) -> dict[str, Any]:
    """One snapshot; InputError if a byte of it is not what was written."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise InputError(f"{path} is not named like a snapshot")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if _checksum(data) != match[2]:
        raise InputError(f"{path} is damaged: its checksum is not {match[2]}")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError) as error:
        raise InputError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


def found(folder: Path, kind: str = "snapshot") -> list[Path]:
    """The snapshots of a folder, the newest last."""
    paths = [path for path in folder.glob(f"{kind}-*.pt") if _NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: path.name)


def _checksum(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]


def _flush_names(folder: Path) -> None:
    """A renamed file is there after a power cut only when its folder is on the disk too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
