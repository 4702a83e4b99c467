"""Snapshots: everything a run needs to go on, replaced as a whole or not at all.

A snapshot is a file of `torch.save`, read back with `weights_only` so that nothing in it runs. Its
name holds the step and the beginning of its SHA-256. A new one is written beside the old ones,
flushed to the disk and renamed; only then the oldest goes. Two are kept, in case one rots.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from ... import files
from ...errors import InputError, TrainingStopped, first_line
from ...units import format_size

KEPT = 2
_DIGITS = 16
"""Hexadecimal ones of the checksum: 64 bits."""
_NAME = re.compile(rf"(?:snapshot|weights)-(\d{{9}})-([0-9a-f]{{{_DIGITS}}})\.pt")


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
    try:
        files.write(path, data)
    except OSError as error:
        held = found(folder)
        kept = f"the last good one is {held[-1].name}" if held else "there is none before it"
        raise TrainingStopped(
            f"cannot write a snapshot of {format_size(len(data))} to {folder}: {error.strerror}; "
            f"{kept}",
            hint="make room and go on with --resume",
        ) from error
    _prune(folder, path, kind, keep)
    return path


def _prune(folder: Path, newest: Path, kind: str, keep: int) -> None:
    """Leave `keep` snapshots up to the newest good one.

    Later ones could not be read, or are of updates that the run has not repeated yet.
    """
    held = found(folder, kind)
    older = [one for one in held if _step(one) < _step(newest)]
    kept = {newest, *older[max(len(older) - keep + 1, 0) :]}
    for one in held:
        if one not in kept:
            with contextlib.suppress(OSError):
                one.unlink()


def load_latest(
    folder: Path, *, held: bool = True, keys: Collection[str] = ()
) -> tuple[dict[str, Any] | None, list[str]]:
    """The newest snapshot that is whole, None where there never was one; and what was passed over.

    InputError if there are some and none is whole, with all these `keys`. What a killed process
    left, half-written or one too many, goes, but only where this process has `held` the folder:
    another may be writing it.
    """
    if held:
        files.remove_partial(folder)
    damaged: list[str] = []
    for path in reversed(found(folder)):
        try:
            state = load(path)
            if lacking := sorted(set(keys) - state.keys()):
                raise InputError(f"{path} is not a snapshot of a run: it has no {lacking[0]}")
        except InputError as error:
            damaged.append(error.message)
            continue
        if held and not damaged:  # what comes after it goes when it has been replaced
            _prune(folder, path, "snapshot", KEPT)
        return state, damaged
    if damaged:
        raise InputError("; ".join(damaged), hint="start again in another folder")
    return None, damaged


def load(path: Path) -> dict[str, Any]:
    """One snapshot; InputError if a byte of it is not what was written."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise InputError(f"{path} is not named like a snapshot")
    try:
        data = files.read(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if _checksum(data) != match[2]:
        raise InputError(f"{path} is damaged: its checksum is not {match[2]}")
    try:
        state = _loaded(data)
    except Exception as error:  # a file that was made to do harm can raise anything
        raise InputError(f"{path} cannot be read: {first_line(error)}") from None
    if type(state) is not dict:
        raise InputError(f"{path} is not a snapshot: it holds a {type(state).__name__}")
    return state


def _loaded(data: bytes) -> Any:
    """Read a file of `save`: tensors and plain values; it runs no code and decompresses nothing.

    torch.save compresses nothing, so a compressed entry would be there to fill the memory.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("it is compressed, which no snapshot is")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def found(folder: Path, kind: str = "snapshot") -> list[Path]:
    """The snapshots of a folder, the newest last."""
    paths = [path for path in folder.glob(f"{kind}-*.pt") if _NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: path.name)


def _step(path: Path) -> int:
    """How many updates it is after."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _checksum(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]
