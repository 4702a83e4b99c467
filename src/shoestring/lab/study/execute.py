"""One job in its folder, in whichever process: records as it goes, or the error it ended with."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import files
from ...errors import InputError, ShoestringError, TrainingStopped
from ...techniques.registry import flags, registered
from ..records.run import FILE, Event, Records, provenance, read
from ..runs import snapshot
from ..runs.folder import is_held
from .expand import StudyJob
from .spec import FLAGS, Values, profiled

FAILURE = "failure.json"
LOG = "log.txt"
MEASURED_UPDATES = 3
LOCK_SECONDS = 30.0
"""How long a run that was told to stop may take to let go of its folder."""


@dataclass(frozen=True)
class Place:
    """Where jobs run, and what is the same for all of them."""

    device: str | None = None
    data_dir: str | None = None
    threads: int = 1
    run_seconds: float | None = None
    """After which a run is ended, and has failed; it can go on from its snapshot."""
    keep_snapshots: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a job ended: its events, or its error."""

    job: StudyJob
    folder: Path
    events: tuple[Event, ...]
    error: str | None = None

    @property
    def end(self) -> Event:
        """The last event, with the summary."""
        return self.events[-1]

    @property
    def start(self) -> Event:
        """The first event, with settings and host."""
        return self.events[0]


def outcome(job: StudyJob, folder: Path) -> Outcome | None:
    """The result in a job's folder; None where it has not finished."""
    try:
        error = failure(folder)
    except InputError as unreadable:
        error = f"{unreadable.message}: how the run failed is not known"
    if error is not None:
        return Outcome(job, folder, _before(folder), error)
    if not (folder / FILE).exists():
        return None
    try:
        events = read(folder / FILE)
    except InputError:  # a line that was being written when the process was killed
        return None
    return Outcome(job, folder, tuple(events)) if events and events[-1]["event"] == "end" else None


def _before(folder: Path) -> tuple[Event, ...]:
    """The records of a failed run; empty where they cannot be read."""
    try:
        return tuple(read(folder, whole=False))
    except InputError:
        return ()


def failure(folder: Path) -> str | None:
    """The error a job left."""
    file = folder / FAILURE
    if not file.exists():
        return None
    try:
        return str(json.loads(files.read(file))["error"])
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        raise InputError(f"{file} is not of shoestring study") from None


def execute(job: StudyJob, folder: Path, place: Place) -> None:
    """Run the job to its end, going on where there is a snapshot; an error becomes a file.

    A signal from outside is raised: the study continues later.
    """
    import torch

    torch.set_num_threads(place.threads)
    folder.mkdir(parents=True, exist_ok=True)
    _wait_for(folder)
    try:
        _KINDS[job.kind](job, folder, place)
    except TrainingStopped as error:
        if error.exit_status > 128:
            raise
        fail(folder, error)
    except Exception as error:
        fail(folder, error)
    else:  # one that failed goes on from its snapshot when the cause is gone
        for path in () if place.keep_snapshots else snapshot.found(folder):
            path.unlink(missing_ok=True)


def execute_alone(job: StudyJob, folder: Path, place: Place) -> None:
    """Execute, in a process that is there for this job: what it prints goes to its log."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    log = os.open(folder / LOG, flags, 0o644)
    os.utime(log)  # says that a job which goes on has begun, too
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        execute(job, folder, place)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def fail(folder: Path, error: Exception | str) -> None:
    """Record why a job ended before its time; a user's mistake in one line, all else in full."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(error, ShoestringError):
        text, details = error.message, error.hint
        if error.__cause__ is not None:  # of a model that somebody wants to mend
            details = "".join([f"{details}\n\n", *traceback.format_exception(error.__cause__)])
    elif isinstance(error, Exception):
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        details = "".join(traceback.format_exception(error))
    else:
        text, details = error, None
    held = files.json_text({"error": text, "details": details}, indent=1) + "\n"
    files.write(folder / FAILURE, held.encode(errors="backslashreplace"))


def _wait_for(folder: Path) -> None:
    """Until nobody else writes here: who was told to stop saves a snapshot first."""
    until = time.monotonic() + LOCK_SECONDS
    while is_held(folder) and time.monotonic() < until:
        time.sleep(0.05)


def arguments(settings: Mapping[str, Any]) -> Values:
    """Settings as the arguments of `Call`: those with a dot change a technique."""
    dotted = {name: v for name, v in settings.items() if name.partition(".")[0] in registered()}
    dotted = {name: value for name, value in dotted.items() if "." in name}
    flagged = {name: value for name, value in settings.items() if name in flags()}
    taken = dotted.keys() | flagged.keys()
    plain = {FLAGS.get(name, name): v for name, v in settings.items() if name not in taken}
    return {**plain, "techniques": flagged, "changes": dotted}


def _train(job: StudyJob, folder: Path, place: Place, **more: Any) -> Event:
    from ..runs.command import Call, start

    given = {"device": place.device, "data_dir": place.data_dir, **arguments(job.settings), **more}
    return start(Call(**given, out=str(folder), resume=True)).event


def _measure(job: StudyJob, folder: Path, place: Place) -> None:
    steps = folder / "steps"
    shutil.rmtree(steps, ignore_errors=True)
    event = _train(job, steps, place, stop_after=f"{MEASURED_UPDATES} steps")
    start = read(steps)[0]
    with Records(folder) as records:
        records.truncate(0)
        records.write("start", **{n: v for n, v in start.items() if n not in ("event", "time")})
        records.write("end", **{n: v for n, v in event.items() if n not in ("event", "folder")})
    shutil.rmtree(steps)


def _profile(job: StudyJob, folder: Path, place: Place) -> None:
    import torch

    from ..runs.command import Call, job_of
    from ..tasks import IMAGES, is_there
    from .timelines import profiled_job, profiled_settings

    if job.settings.get("data", "") in ("", *IMAGES):
        made = profiled_settings({n: v for n, v in job.settings.items() if _counts(n)})
    elif is_there(str(job.settings["data"]), place.data_dir):  # it decides vocabularies and shapes
        made = profiled_job(job_of(Call(**arguments(job.settings), data_dir=place.data_dir)))
    else:
        counted = {n: v for n, v in job.settings.items() if _counts(n) and n != "data"}
        made = {**profiled_settings(counted), "vocabularies": "the report's: no text is there"}
    with Records(folder) as records:
        records.truncate(0)
        host = provenance(torch.device("cpu"))
        records.write("start", settings=dict(job.settings), host=host)
        records.write("end", **made)


_KINDS: dict[str, Callable[[StudyJob, Path, Place], Any]] = {
    "train": _train,
    "profile": _profile,
    "measure": _measure,
}


def _counts(name: str) -> bool:
    """Whether a setting of a training has a say in its memory."""
    return name in profiled() or name == "data" or "." in name
