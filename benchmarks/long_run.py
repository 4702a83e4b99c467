"""A long run under a budget: does memory grow, and is a killed and resumed run the same to the bit?

    PYTHONPATH=src python3 benchmarks/long_run.py --device cuda --budget '4 MB' --json FILE
    PYTHONPATH=src python3 benchmarks/long_run.py --device cpu --updates 200 --early 20 \\
        --kill-updates 60 --snapshot-every 10

First `--updates` updates of the real loop, with evaluations, snapshots and rewiring, by a plan for
`--budget` or by the techniques that are named: device, reserved and host memory at update `--early`
and at the last one. Then the same training for `--kill-updates` updates, as processes: one whole,
one killed (`--kills` times) and resumed. Weights, optimizer, random streams and records are
compared to the bit. Fails if memory has grown by more than 1% and 20 MB, or if a bit differs; on a
GPU that asks for kernels that are deterministic.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from shoestring.lab.records.run import provenance, read, strip_times
from shoestring.lab.runs import loop, snapshot
from shoestring.lab.runs.command import Call, start
from shoestring.lab.runs.trainer import Trainer
from shoestring.lab.tasks import load_task
from shoestring.lab.tasks.images import ImageTask
from shoestring.techniques.plan import Plan

PLAN = "plan.toml"
MOST_GROWN = 0.01
MOST_GROWN_BYTES = 20 * 10**6


def memory(device: torch.device) -> dict[str, int]:
    """Of the device and of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"host_bytes": pages * os.sysconf("SC_PAGE_SIZE")}
    if device.type == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        found["allocated_bytes"] = torch.cuda.memory_allocated()
        found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_bytes"] = torch.cuda.memory_reserved()
        found["device_used_bytes"] = total - free
    return found


class Watched(Trainer):
    """Looks at memory after some updates."""

    wanted: frozenset[int] = frozenset()
    seen: dict[int, dict[str, int]]

    def advance(self) -> None:
        """One update, and a look."""
        super().advance()
        if self.done in self.wanted:
            self.seen[self.done] = memory(self.device)


def call(options: argparse.Namespace, updates: int, out: Path, **more: Any) -> Call:
    """The training, stopped after so many updates; rewiring is the report's, over all of them."""
    task = load_task(options.data, folder=options.data_dir)
    assert isinstance(task, ImageTask)
    each = len(task.images) // options.batch
    return Call(
        model=options.model,
        data=options.data,
        data_dir=options.data_dir,
        device=options.device,
        batch=options.batch,
        epochs=-(-options.updates // each),
        stop_after=f"{updates} steps",
        snapshot_every=options.snapshot_every,
        evaluate_every=options.evaluate_every,
        out=str(out),
        **more,
    )


def technique_flags(options: argparse.Namespace) -> dict[str, Any]:
    """What the first run is told: a budget, or techniques by name."""
    if options.budget:
        return {"budget": options.budget, "allow": options.allow}
    named = {"density": options.density, "precision": options.precision}
    micro = {"microbatch": options.microbatch} if options.microbatch else {}
    return {"techniques": {**named, **micro}}


def long_run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Memory early and late, in this process."""
    Watched.wanted = frozenset({options.early, options.updates})
    Watched.seen = {}
    plain, loop.Trainer = loop.Trainer, Watched  # type: ignore[misc]
    began = time.monotonic()
    try:
        given = technique_flags(options)
        event = start(call(options, options.updates, folder / "long", **given)).event
    finally:
        loop.Trainer = plain  # type: ignore[misc]
    early, late = (Watched.seen[at] for at in (options.early, options.updates))
    grown = {name: late[name] - early[name] for name in early if name != "peak_allocated_bytes"}
    state = snapshot.load(snapshot.found(folder / "long")[-1])
    plan = Plan.from_dict(read(folder / "long")[0]["settings"]["plan"])
    plan.save(folder / PLAN)  # a second search could find another one
    return {
        "plan": str(plan),
        "budget": options.budget,
        "updates": options.updates,
        "memory": {str(at): found for at, found in Watched.seen.items()},
        "grown_bytes": grown,
        "rewirings": state["step"]["techniques"].get("sparsity", {}).get("rewirings", 0),
        "measured_peak_bytes": event["measured_peak_bytes"],
        "snapshots_left": len(snapshot.found(folder / "long")),
        "seconds": round(time.monotonic() - began, 1),
        "grew": any(b > MOST_GROWN_BYTES and b > MOST_GROWN * early[n] for n, b in grown.items()),
    }


def child(options: argparse.Namespace, out: Path) -> subprocess.Popen[bytes]:
    """The same training as a process of its own."""
    arguments = [sys.executable, __file__, *sys.argv[1:], "--child", str(out)]
    return subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def killed(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Whole, and killed at random moments: what differs at the end."""
    whole, broken = folder / "whole", folder / "killed"
    began = time.monotonic()
    if child(options, whole).wait() != 0:
        raise SystemExit("the undisturbed run failed")
    seconds, chance, kills = time.monotonic() - began, random.Random(0), 0
    while kills < options.kills:
        process = child(options, broken)
        try:
            status = process.wait(timeout=chance.uniform(0.3, 0.9) * seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
            continue
        if status != 0:
            raise SystemExit("a resumed run failed")
        shutil.rmtree(broken)  # it came to its end before its time
        seconds *= 0.8
    if child(options, broken).wait() != 0:
        raise SystemExit("the last resumed run failed")
    states = [snapshot.load(snapshot.found(f)[-1]) for f in (whole, broken)]
    for state in states:
        del state["seconds"], state["records_bytes"]
    records = [strip_times(read(f)) for f in (whole, broken)]
    return {
        "kills": kills,
        "updates": options.kill_updates,
        "state_equal": same(*states),
        "records_equal": repr(records[0]) == repr(records[1]),
    }


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, whatever the nesting."""
    if isinstance(one, torch.Tensor):
        bits = [t.contiguous().view(-1).view(torch.uint8) for t in (one, other)]
        return one.dtype is other.dtype and one.shape == other.shape and bits[0].equal(bits[1])
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def main() -> int:
    """Print what was found; 1 if memory grew or a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="wrn-10-1")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-dir")
    parser.add_argument("--device")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--updates", type=int, default=20_000)
    parser.add_argument("--early", type=int, default=1_000)
    parser.add_argument("--density", type=float, default=0.3)
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--microbatch", type=int, default=20)
    parser.add_argument("--budget", help="plan for it, in place of the three above")
    parser.add_argument("--allow", default="sparsity", help="what the budget may cost")
    parser.add_argument("--evaluate-every", type=int, default=5)
    parser.add_argument("--snapshot-every", type=int, default=200)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--kill-updates", type=int, default=1_000)
    parser.add_argument("--json", help="also write the result to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        out = Path(options.child)
        plan = str(out.parent / PLAN)
        start(call(options, options.kill_updates, out, plan=plan, resume=True, predict=False))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = {"long": long_run(options, Path(folder)), "killed": killed(options, Path(folder))}
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    found["host"] = provenance(device)
    for at, held in found["long"]["memory"].items():
        print(f"update {int(at):,}: " + ", ".join(f"{n} {b:,}" for n, b in held.items()))
    print(f"grown: {found['long']['grown_bytes']}; rewirings: {found['long']['rewirings']}")
    print(f"killed: {found['killed']}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return int(
        found["long"]["grew"]
        or not found["killed"]["state_equal"]
        or not found["killed"]["records_equal"]
    )


if __name__ == "__main__":
    sys.exit(main())
