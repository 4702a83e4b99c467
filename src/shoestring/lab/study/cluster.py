"""The same jobs on a Ray cluster whose machines share the study's folder."""

from __future__ import annotations

import importlib.util
import logging
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...errors import InputError, needs_extra
from ...progress import asked_to_end
from .execute import LOG, Place, execute_alone, fail, outcome
from .expand import StudyJob
from .local import ATTEMPTS, STOP_SECONDS, TICK_SECONDS, Ended, Stopped, Tick

CONNECT_SECONDS = 10.0


def check(address: str) -> None:
    """InputError where Ray is not installed, or nobody listens at an address of host and port."""
    if importlib.util.find_spec("ray") is None:
        with needs_extra("ray", "ray", "--ray"):
            raise ImportError
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or "/" in host:
        return
    try:  # Ray itself would try for minutes
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError, ValueError) as error:
        raise _silent(address, error) from None


def _silent(address: str, error: Exception) -> InputError:
    said = str(error).strip().partition("\n")[0]
    return InputError(
        f"no Ray cluster answers at {address!r}: {said}",
        hint="start one with `ray start --head`, or use --ray local",
    )


def run(
    jobs: Sequence[StudyJob], folder_of: Callable[[StudyJob], Path], place: Place, address: str,
    gpus: float, ended: Ended, tick: Tick,
) -> None:  # fmt: skip
    """Run all jobs on the cluster at `address` ("local" starts one here); each in a new process."""
    check(address)
    import ray

    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False if address == "local" else None,
        )
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        raise _silent(address, error) from None
    with asked_to_end() as asked:  # after init, which has handlers of its own
        try:
            # max_calls=1: the worker leaves after one job, and with it all that torch holds.
            remote = ray.remote(max_calls=1, max_retries=0, num_cpus=place.threads, num_gpus=gpus)(
                execute_alone
            )
            _drain(ray, remote, jobs, folder_of, place, ended, tick, asked)
        finally:
            ray.shutdown()


def _drain(
    ray: Any, remote: Any, jobs: Sequence[StudyJob], folder_of: Callable[[StudyJob], Path],
    place: Place, ended: Ended, tick: Tick, asked: Sequence[int],
) -> None:  # fmt: skip
    """Send all at once: the cluster decides when and where; and wait for each."""

    def send(job: StudyJob, attempt: int) -> None:
        before = _logged(folder_of(job))
        handle = remote.remote(job, folder_of(job).absolute(), place)
        sent[handle] = job, attempt, before

    sent: dict[Any, tuple[StudyJob, int, int]] = {}
    began: dict[Any, float] = {}
    told: dict[Any, float] = {}
    for job in jobs:
        send(job, 1)
    while sent and not asked:
        done, _ = ray.wait(list(sent), timeout=TICK_SECONDS)
        for handle in () if asked else done:  # a cluster that ends, too, is not their failure
            job, attempt, _ = sent.pop(handle)
            error = ""
            try:
                ray.get(handle)
            except Exception as raised:  # Ray's own, or what execute let through
                error = str(raised).strip().rpartition("\n")[2]
            if outcome(job, folder_of(job)) is None:
                if attempt < ATTEMPTS and handle not in told:
                    send(job, attempt + 1)
                    continue
                late = f"took longer than run_seconds = {place.run_seconds}"
                why = f"{error or 'ended without a word'}, {attempt} times"
                fail(folder_of(job), late if handle in told else why)
            ended(job)
        running = [h for h, (job, _, before) in sent.items() if _logged(folder_of(job)) != before]
        now = time.monotonic()
        for handle in running if place.run_seconds is not None else ():
            if handle in told:
                if now - told[handle] > STOP_SECONDS:
                    ray.cancel(handle, force=True)
            elif now - began.setdefault(handle, now) > (place.run_seconds or 0):
                told[handle] = now
                ray.cancel(handle)
        tick([sent[handle][0] for handle in running])
    if asked:
        for handle in sent:
            ray.cancel(handle)  # where it runs an interrupt, for which it saves a snapshot
        if sent:
            ray.wait(list(sent), num_returns=len(sent), timeout=STOP_SECONDS)
        raise Stopped(asked[0])


def _logged(folder: Path) -> int:
    """When its log was last written, by the clock of the machine that did; a job begins so."""
    try:
        return (folder / LOG).stat().st_mtime_ns
    except FileNotFoundError:
        return 0
