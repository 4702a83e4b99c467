"""The same jobs on a Ray cluster whose machines share the study's folder."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from .execute import Place, execute, fail, outcome
from .expand import Job
from .local import ATTEMPTS, TICK_SECONDS, Ended, Tick

CONNECT_SECONDS = 10.0


def run(
    jobs: Sequence[Job], folder_of: Callable[[Job], Path], place: Place, address: str,
    gpus: float, ended: Ended, tick: Tick,
) -> None:  # fmt: skip
    """Run all jobs on the cluster at `address` ("local" starts one here); each in a new process."""
    try:
        import ray
    except ImportError:
        raise InputError("Ray is not installed", hint="pip install 'shoestring[ray]'") from None
    try:
        host, colon, port = address.rpartition(":")
        if colon and port.isdecimal() and "/" not in host:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False if address == "local" else None,
        )
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        said = str(error).strip().partition("\n")[0]
        raise InputError(
            f"no Ray cluster answers at {address!r}: {said}",
            hint="start one with `ray start --head`, or use --ray local",
        ) from None
    try:
        # max_calls=1: the worker leaves after one job, and with it all that torch holds.
        remote = ray.remote(max_calls=1, max_retries=0, num_cpus=place.threads, num_gpus=gpus)(
            execute
        )
        _drain(ray, remote, jobs, folder_of, place, ended, tick)
    finally:
        ray.shutdown()


def _drain(
    ray: Any, remote: Any, jobs: Sequence[Job], folder_of: Callable[[Job], Path], place: Place,
    ended: Ended, tick: Tick,
) -> None:  # fmt: skip
    """Send all at once: the cluster decides when and where; and wait for each."""

    def send(job: Job, attempt: int) -> None:
        handle = remote.remote(job, folder_of(job).absolute(), place)
        sent[handle] = job, attempt

    sent: dict[Any, tuple[Job, int]] = {}
    for job in jobs:
        send(job, 1)
    while sent:
        done, _ = ray.wait(list(sent), timeout=TICK_SECONDS)
        for handle in done:
            job, attempt = sent.pop(handle)
            error = ""
            try:
                ray.get(handle)
            except Exception as raised:  # Ray's own, or what execute let through
                error = str(raised).strip().rpartition("\n")[2]
            if outcome(job, folder_of(job)) is None:
                if attempt < ATTEMPTS:
                    send(job, attempt + 1)
                    continue
                fail(folder_of(job), f"{error or 'ended without a word'}, {attempt} times")
            ended(job)
        tick([job for job, _ in sent.values()])
