"""A hang is sixty seconds of a process's own: waiting for a busy CPU does not count."""

import os
import subprocess
import sys
import time
from contextlib import suppress

import pytest

import chaos


def test_a_process_that_sleeps_has_its_time_and_a_hang_is_counted(monkeypatch):
    monkeypatch.setattr(chaos, "HANG_SECONDS", 0.3)
    monkeypatch.setattr(chaos, "COUNTS", type(chaos.COUNTS)())
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def ended(seconds):
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.returncode is not None

    try:
        assert not chaos.ended_in_time(process.pid, ended)
        assert chaos.COUNTS["hangs"] == 1
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the kernel does not say")
def test_waiting_for_a_busy_cpu_does_not_count():
    """Three that compute share one CPU: each has a third of the time, and owns no more."""
    spin = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(3)]
    try:
        time.sleep(0.3)
        owns = [chaos.OwnTime(process.pid) for process in processes]
        began = time.monotonic()
        while time.monotonic() < began + 1.5:
            time.sleep(0.05)
            for own in owns:
                own.look()
        assert sum(own.seconds for own in owns) < 1.6 * (time.monotonic() - began)  # not 3 times
    finally:
        for process in processes:
            process.kill()
            process.wait()
