"""Forty short runs: undisturbed, killed five times and resumed, and on a local Ray cluster.

    python benchmarks/study_resume.py [--ray]

All three must end with the same forty records. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torch import nn

from shoestring.lab.records.run import FILE, Event, read, strip_times

STUDY = """
title = "Forty short runs"
threads = 1
trials = 2
profile = false

[base]
model = "study_resume:linear"
data = "digits"
batch = 100
epochs = 2
snapshot_every = 4

[[grid]]
precision = ["fp32", "bf16"]
density = [1.0, 0.5]
lr = [0.01, 0.02, 0.05, 0.1, 0.2]
"""
RUNS, KILLS = 40, 5


def linear() -> nn.Module:
    """A linear layer on 8×8 pixels."""
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 10))


def start(file: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    """`shoestring study`, as a user would."""
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, *(p for p in sys.path if p)])
    return subprocess.Popen(
        [sys.executable, "-m", "shoestring", "study", str(file), "--out", str(out),
         "--device", "cpu", "--resume", *options],
        env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def records(out: Path) -> dict[str, list[Event]]:
    """Run → what must be equal whenever it is made."""
    return {path.parent.name: strip_times(read(path)) for path in out.glob(f"runs/*/{FILE}")}


def ended(out: Path) -> int:
    """Runs that have come to their end."""
    return sum(events[-1]["event"] == "end" for events in records(out).values() if events)


def killed(file: Path, out: Path) -> None:
    """SIGKILL to the study's process after a sixth, a third, … of the runs; then to the end."""
    chance = random.Random(0)
    for number in range(1, KILLS + 1):
        process, enough = start(file, out, "--workers", "2"), number * RUNS // (KILLS + 1)
        while process.poll() is None and ended(out) < enough:
            time.sleep(0.2)
        time.sleep(chance.uniform(0, 1))
        process.kill()
        if process.wait() != -signal.SIGKILL or (done := ended(out)) == RUNS:
            sys.exit("the study ended before it could be killed")
        print(f"killed with {done} of {RUNS} runs done", flush=True)
    if start(file, out, "--workers", "2").wait() != 0:
        sys.exit("the resumed study failed")


def main() -> None:
    """Run all, compare, and say how long each took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ray", action="store_true", help="on a local Ray cluster, too")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "forty.toml"
        file.write_text(STUDY)
        found = {}
        began = time.monotonic()
        assert start(file, Path(folder) / "whole", "--workers", "2").wait() == 0
        found["whole"] = records(Path(folder) / "whole")
        print(f"whole: {time.monotonic() - began:.0f} s", flush=True)
        began = time.monotonic()
        killed(file, Path(folder) / "killed")
        found["killed"] = records(Path(folder) / "killed")
        print(f"killed {KILLS} times: {time.monotonic() - began:.0f} s", flush=True)
        if asked.ray:
            began = time.monotonic()
            assert start(file, Path(folder) / "ray", "--ray", "local").wait() == 0
            found["ray"] = records(Path(folder) / "ray")
            print(f"Ray: {time.monotonic() - began:.0f} s", flush=True)
    for name, runs in found.items():
        ends = sum(event["event"] == "end" for events in runs.values() for event in events)
        print(f"{name}: {len(runs)} runs, {ends} ends, equal: {runs == found['whole']}")
    if any(runs != found["whole"] or len(runs) != RUNS for runs in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
