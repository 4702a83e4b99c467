"""Jobs on this machine: each in a process of its own, some at a time."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
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
    running: dict[int, tuple[Any, Connection, StudyJob, int]] = {}
    with asked_to_end() as asked:
        try:
            while (waiting or running) and not asked:
                while waiting and len(running) < workers:
                    job, attempt = waiting.pop()
                    process, lifeline = _start(context, job, folder_of(job), place)
                    running[process.sentinel] = process, lifeline, job, attempt
                wait(list(running), timeout=TICK_SECONDS)
                for sentinel, (process, lifeline, job, attempt) in list(running.items()):
                    if process.is_alive() or asked:
                        continue
                    process.join()
                    lifeline.close()
                    del running[sentinel]
                    if outcome(job, folder_of(job)) is None:
                        if attempt < ATTEMPTS:
                            waiting.append((job, attempt + 1))
                            continue
                        fail(folder_of(job), _why(process.exitcode, attempt))
                    ended(job)
                tick([job for _, _, job, _ in running.values()])
        finally:  # each saves a snapshot
            for process, *_ in running.values():
                process.terminate()
            for process, *_ in running.values():
                process.join()
        if asked:
            raise Stopped(asked[0])


def _start(context: Any, job: StudyJob, folder: Path, place: Place) -> tuple[Any, Connection]:
    # Nobody writes to the lifeline: when this process dies, however it dies, its end closes.
    theirs, ours = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(job, folder, place, theirs), daemon=False)
    process.start()
    theirs.close()
    return process, ours


def _child(job: StudyJob, folder: Path, place: Place, lifeline: Connection) -> None:
    gc.freeze()  # what the server imported is no garbage, and takes long to look through
    threading.Thread(target=_follow, args=(lifeline,), daemon=True).start()
    execute_alone(job, folder, place)


def _follow(lifeline: Connection) -> None:
    """End, with a snapshot, when the process that asked for the work is gone."""
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)


def _why(status: int | None, attempts: int) -> str:
    if status is not None and status < 0:
        return f"killed by {signal.Signals(-status).name}, {attempts} times"
    return f"its process ended with status {status}, {attempts} times; see {LOG}"
