"""Jobs on this machine: each in a process of its own, some at a time."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ...progress import asked_to_end
from ...torch_private.autograd import DYNAMO
from .execute import LOG, Place, execute_alone, fail, outcome
from .expand import StudyJob

ATTEMPTS = 3
"""Processes that die without a word (out of memory, say) before their job counts as failed."""
TICK_SECONDS = 0.5
STOP_SECONDS = 60.0
"""For the snapshot of a run that was asked to end; then it is killed."""
PRELOADED = [
    DYNAMO,
    "sklearn.datasets",
    "shoestring.lab.study.execute",
    "shoestring.lab.study.timelines",
    "shoestring.lab.runs.command",
]

Ended = Callable[[StudyJob], None]
Tick = Callable[[Sequence[StudyJob]], None]


class Stopped(Exception):
    """A signal asked to end; what ran has saved itself."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass
class _Running:
    """A job in its process."""

    process: Any
    lifeline: Connection
    job: StudyJob
    attempt: int
    began: float
    asked: float | None = None
    """When it was told to end."""

    def hurry(self, limit: float | None) -> None:
        """Tell it to end when its time is over, and kill it if it does not."""
        now = time.monotonic()
        if self.asked is None and limit is not None and now - self.began > limit:
            self.asked = now
            self.process.terminate()
        elif self.asked is not None and now - self.asked > STOP_SECONDS:
            self.process.kill()


def run(
    jobs: Sequence[StudyJob], folder_of: Callable[[StudyJob], Path], place: Place, workers: int,
    ended: Ended, tick: Tick,
) -> None:  # fmt: skip
    """Run all jobs, `workers` at a time; a job that fails or dies does not stop the others."""
    # Forked from a server that has imported torch but never touched a device: a start takes
    # milliseconds, and CUDA begins anew in every process.
    # Asked through NVML, the question whether there is a GPU does not start CUDA either.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    waiting = [(job, 1) for job in reversed(jobs)]
    running: dict[int, _Running] = {}
    with asked_to_end() as asked:
        try:
            while (waiting or running) and not asked:
                while waiting and len(running) < workers:
                    job, attempt = waiting.pop()
                    process, lifeline = _start(context, job, folder_of(job), place)
                    began = time.monotonic()
                    running[process.sentinel] = _Running(process, lifeline, job, attempt, began)
                wait(list(running), timeout=TICK_SECONDS)
                for sentinel, one in list(running.items()):
                    one.hurry(place.run_seconds)
                    if one.process.is_alive() or asked:
                        continue
                    one.process.join()
                    one.lifeline.close()
                    del running[sentinel]
                    if outcome(one.job, folder_of(one.job)) is None:
                        if one.asked is None and one.attempt < ATTEMPTS:
                            waiting.append((one.job, one.attempt + 1))
                            continue
                        fail(folder_of(one.job), _why(one, place.run_seconds))
                    ended(one.job)
                tick([one.job for one in running.values()])
        finally:  # each saves a snapshot
            _end([one.process for one in running.values()])
        if asked:
            raise Stopped(asked[0])


def _end(processes: Sequence[Any]) -> None:
    """Ask all to end, and kill those that do not: an update may hang."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + STOP_SECONDS
    for process in processes:
        process.join(max(until - time.monotonic(), 0))
        if process.is_alive():
            process.kill()
            process.join()


def _start(context: Any, job: StudyJob, folder: Path, place: Place) -> tuple[Any, Connection]:
    # Nobody writes to the lifeline: when this process dies, however it dies, its end closes.
    theirs, ours = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(job, folder, place, theirs), daemon=False)
    process.start()
    theirs.close()
    return process, ours


def _child(job: StudyJob, folder: Path, place: Place, lifeline: Connection) -> None:
    gc.freeze()  # what the server imported is not garbage, and takes long to look through
    with suppress(OSError):  # a Ctrl-C is for the study, which then tells each run once
        os.setsid()
    threading.Thread(target=_follow, args=(lifeline,), daemon=True).start()
    execute_alone(job, folder, place)


def _follow(lifeline: Connection) -> None:
    """End, with a snapshot, when the process that asked for the work is gone; at last without."""
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(STOP_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)


def _why(ended: _Running, limit: float | None) -> str:
    if ended.asked is not None:
        return f"took longer than run_seconds = {limit:g}"
    status, attempts = ended.process.exitcode, ended.attempt
    if status is not None and status < 0:
        return f"killed by {signal.Signals(-status).name}, {attempts} times"
    return f"its process ended with status {status}, {attempts} times; see {LOG}"
