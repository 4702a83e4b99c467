"""`records.jsonl`: config, plan, seed, every evaluation, predicted and measured bytes."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import stat
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ... import files
from ...errors import InputError, TrainingStopped
from ...version import __version__

FILE = "records.jsonl"

TIMES = frozenset({"time", "seconds", "step_seconds", "host"})
"""Fields that differ from run to run; everything else is the same for the same command."""

Event = dict[str, Any]


class Records:
    """Appends events to a run's file; each is on the disk before `write` returns."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        try:
            flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            self._handle = os.open(self.path, flags, 0o644)
            if not stat.S_ISREG(os.fstat(self._handle).st_mode):
                os.close(self._handle)
                raise files.NotAFile(self.path)
        except OSError as error:
            raise InputError(f"cannot write to {self.path}: {error.strerror}") from None

    def write(self, event: str, **fields: Any) -> Event:
        """One line: what happened, when, and the fields."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        made = {"event": event, "time": now, **fields}
        text = files.json_text({name: _spelt(value) for name, value in made.items()}) + "\n"
        line = text.encode(errors="backslashreplace")  # JSON's own way for a path of odd bytes
        before = self.size_bytes
        try:
            written = os.write(self._handle, line)  # at once: a reader sees whole lines
            if written < len(line):
                os.write(self._handle, line[written:])  # says why
            os.fsync(self._handle)
        except OSError as error:
            with suppress(OSError):  # else the next one to go on drops what was half-written
                os.ftruncate(self._handle, before)
            raise self._unwritable(error) from error
        return made

    def _unwritable(self, error: OSError) -> TrainingStopped:
        return TrainingStopped(
            f"cannot write to {self.path}: {error.strerror}",
            hint="make room and go on with --resume",
        )

    @property
    def size_bytes(self) -> int:
        """Where the next event will begin; a snapshot remembers it."""
        return os.fstat(self._handle).st_size

    def truncate(self, size_bytes: int) -> None:
        """Forget the events after a snapshot: they will happen again."""
        held = self.size_bytes
        if held < size_bytes:
            raise InputError(
                f"{self.path} has {held:,} bytes, the snapshot was made after {size_bytes:,}",
                hint="the file was shortened by hand; start again in another folder",
            )
        try:
            os.ftruncate(self._handle, size_bytes)
            os.fsync(self._handle)
        except OSError as error:
            raise self._unwritable(error) from error

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._handle)


class Unwritten(Records):
    """Records of a rank that leaves the file to rank 0."""

    def __init__(self) -> None:
        pass

    def write(self, event: str, **fields: Any) -> Event:
        """The event, on no disk."""
        return {"event": event, **fields}

    @property
    def size_bytes(self) -> int:
        """Nothing was written."""
        return 0

    def truncate(self, size_bytes: int) -> None:
        """There is nothing to forget."""

    def __exit__(self, *error: object) -> None:
        pass


def read(path: str | Path, *, whole: bool = True) -> list[Event]:
    """The events of a run: of its folder or its file.

    Not `whole`: without a last line that was being written when the process was killed.
    """
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    try:
        data = files.read(file)
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    if not whole:
        data = data[: data.rfind(b"\n") + 1]
    events = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            event = _told(json.loads(line))
        except (ValueError, RecursionError):
            event = None
        why = odd(event)
        if why is not None:
            raise InputError(f"{file}, line {number} {why}")
        events.append(event)
    return events


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""JSON has no word for them, and a mean must not forget a run that diverged."""


def _spelt(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _told(event: Any) -> Any:
    """The event with its numbers that are not finite."""
    if not isinstance(event, dict):
        return event
    return {n: _NOT_FINITE.get(v, v) if isinstance(v, str) else v for n, v in event.items()}


_NUMBER = (int, float)
_SCORES = frozenset(
    "loss train_loss accuracy best_accuracy best_loss bleu perplexity learning_rate loss_scale "
    "exact_percent".split()
)
"""These alone may be NaN or infinite."""
_KINDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys("event time folder bleu_signature".split(), (str,)),
    **dict.fromkeys("settings host predicted data timeline".split(), (dict,)),
    **dict.fromkeys("step epoch best_epoch updates parameters".split(), (int,)),
    **dict.fromkeys(("seconds", "measured_peak_bytes", "evaluation_peak_bytes", *_SCORES), _NUMBER),
}
"""The type of each field of an event; null where the value is not known."""


def odd(event: Any) -> str | None:
    """The error in an event of an untrusted file; None if it is valid."""
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return "is not an event"
    for name, value in event.items():
        kinds = _KINDS.get(name, _NUMBER if name.endswith(("_bytes", "_flops")) else None)
        if kinds is None or value is None:
            continue
        if not isinstance(value, kinds) or isinstance(value, bool):
            return f"has {name} of the type {type(value).__name__}"
        if kinds not in (_NUMBER, (int,)) or (name in _SCORES and isinstance(value, float)):
            continue
        if not -1e300 < value < 1e300:  # NaN neither
            return f"has a {name} that is not a number"
    held = event.get("predicted")
    if held is not None and not all(v is None or type(v) in _NUMBER for v in held.values()):
        return "has a prediction that is not a number"
    return None


def strip_times(events: Iterable[Event]) -> list[Event]:
    """The fields that must be equal when a run is repeated, or interrupted and resumed.

    Without wall times, what describes the machine, and the notes that it was resumed.
    """
    return [
        {key: value for key, value in event.items() if key not in TIMES}
        for event in events
        if event["event"] != "resume"
    ]


def _program(path: str) -> str:
    """The command, without the folders of this machine."""
    found = Path(path)
    return found.parent.name if found.name == "__main__.py" else found.name


def provenance(device: torch.device) -> dict[str, Any]:
    """Where numbers come from: versions, device, what decides the arithmetic, revision."""
    made: dict[str, Any] = {
        "shoestring": __version__,
        "git_revision": git_revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "command": [_program(sys.argv[0]), *sys.argv[1:]],
        "device": str(device),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        made["device_name"] = torch.cuda.get_device_name(device)
        made["cuda"] = torch.version.cuda
        made["cudnn"] = torch.backends.cudnn.version()
        made["tf32"] = {
            "convolutions": torch.backends.cudnn.allow_tf32,
            "matrix_products": torch.backends.cuda.matmul.allow_tf32,
        }
        made["cublas_workspace"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        made["cudnn_benchmark"] = torch.backends.cudnn.benchmark
    return made


def git_revision() -> str | None:
    """Of the code that runs, with a + where it was changed since; None where nobody knows.

    Outside of a repository (in a container, say) the variable SHOESTRING_REVISION can name it.
    """
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("SHOESTRING_REVISION")
