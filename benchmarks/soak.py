"""A long run: throughput of the first and the last tenth, and growth of the host's memory.

    PYTHONPATH=src python3 benchmarks/soak.py --data cifar10 --data-dir DIR --json FILE

The real loop with evaluations, records and snapshots runs for `--steps` updates in a temporary
folder. Fails if the last tenth is more than 5% slower than the first, or if the process has grown
by more than 20 MB after the first tenth.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from shoestring.lab.records.run import provenance
from shoestring.lab.runs import loop
from shoestring.lab.runs.settings import ImageSettings, settings_for
from shoestring.lab.runs.trainer import Trainer, prepare_device
from shoestring.lab.tasks import load_task
from shoestring.lab.tasks.images import ImageTask
from shoestring.techniques import Checkpointing, Microbatching, Precision, Sparsity
from shoestring.techniques.plan import Plan

MOST_SLOWER = 1.05
MOST_GROWN_BYTES = 20 * 10**6
SAMPLES = 100
"""Of time and memory, evenly over the run."""


def resident_bytes() -> int:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class Watched(Trainer):
    """Notes the time and the memory of the process as it goes."""

    samples: list[tuple[int, float, int]]
    every: int = 1

    def advance(self) -> None:
        """One update; now and then a look at the clock."""
        if self.done % self.every == 0:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self.samples.append((self.done, time.perf_counter(), resident_bytes()))
        super().advance()


def soak(
    settings: ImageSettings, task: ImageTask, device: torch.device, steps: int
) -> dict[str, Any]:
    """Run it and compare the ends."""
    samples: list[tuple[int, float, int]] = []
    Watched.samples, Watched.every = samples, max(1, steps // SAMPLES)
    plain, loop.Trainer = loop.Trainer, Watched  # type: ignore[misc]
    try:
        with tempfile.TemporaryDirectory() as folder:
            loop.train(settings, task, Path(folder) / "run", device=device, stop_after=steps)
    finally:
        loop.Trainer = plain  # type: ignore[misc]
    rates = [
        (later[0] - early[0]) / (later[1] - early[1])
        for early, later in itertools.pairwise(samples)
    ]
    tenth = max(1, len(rates) // 10)
    # The first sample has the capture and the measured step in it.
    first, last = _mean(rates[1 : 1 + tenth]), _mean(rates[-tenth:])
    return {
        "model": settings.model,
        "plan": settings.plan.to_dict(),
        "steps": steps,
        "first_updates_per_second": first,
        "last_updates_per_second": last,
        "slower": first / last,
        "resident_bytes_after_first_tenth": samples[tenth][2],
        "resident_bytes_at_end": samples[-1][2],
        "grown_bytes": samples[-1][2] - samples[tenth][2],
        "host": provenance(device),
    }


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def main() -> int:
    """Print what was found; 1 if it slowed down or grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="wrn-28-2")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--device")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--density", type=float)
    parser.add_argument("--microbatch", type=int)
    parser.add_argument("--checkpoint")
    parser.add_argument("--json", help="also write the result to this file")
    options = parser.parse_args()
    device = prepare_device(options.device, tf32=False, benchmark=False)
    task = load_task(options.data, folder=options.data_dir)
    parts: list[Any] = [Precision(options.precision)]
    parts += [] if options.density is None else [Sparsity(options.density)]
    parts += [] if options.microbatch is None else [Microbatching(options.microbatch)]
    parts += [] if options.checkpoint is None else [Checkpointing(options.checkpoint)]
    each = len(task.images) // options.batch
    settings = settings_for(
        options.model,
        options.data,
        images=len(task.images),
        plan=Plan.of(parts),
        epochs=-(-options.steps // each),
        batch=options.batch,
        channels_last=device.type == "cuda",
    )
    found = soak(settings, task, device, options.steps)
    print(
        f"{found['steps']:,} updates: {found['first_updates_per_second']:.1f} per second in the "
        f"first tenth, {found['last_updates_per_second']:.1f} in the last "
        f"(×{found['slower']:.3f} slower); the process grew by "
        f"{found['grown_bytes'] / 1e6:.1f} MB"
    )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)
    return int(found["slower"] > MOST_SLOWER or found["grown_bytes"] > MOST_GROWN_BYTES)


if __name__ == "__main__":
    sys.exit(main())
