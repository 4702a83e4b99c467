"""Plans on the card itself: reserved bytes and time, beside what people use.

Every model trains plainly, with gradient checkpointing as people switch it on, and by `ss.plan` for
80, 55, 35 and 20% of the plain peak and for the peak of checkpointing. Peaks are
`torch.cuda.max_memory_reserved` from the first step on; times are medians of steady steps.

    python benchmarks/card.py                            # all, on one GPU
    python benchmarks/card.py llama-1b-bf16 --budgets 0.55 gc --out rows.jsonl
    python benchmarks/card.py llama-8b-bf16 --budgets 35GB 20GB --allow near --at-once --no-peers
    python benchmarks/card.py --tiny --device cpu        # to try the script
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import shoestring as ss
from card_models import SUBJECTS, Subject
from card_models.base import checkpointed
from plan_holds import clean, provenance
from turns import FILE, busy, take_turns, turn

FRACTIONS = ("0.80", "0.55", "0.35", "0.20", "gc")
Row = dict[str, Any]


class Case:
    """One model, made anew for every way of training it."""

    def __init__(self, subject: Subject, device: str, tiny: bool, steps: int) -> None:
        self.subject, self.device, self.tiny, self.steps = subject, device, tiny, steps

    def plain(self, *, gc_on: bool = False) -> Row | None:
        """As people train; with gradient checkpointing, where there is a way."""
        self._empty()
        model, batch, loss = self.subject.made(self.device, tiny=self.tiny)
        if gc_on and not checkpointed(model):
            return None
        optimizer = self.subject.optimizer_for(model)

        def step() -> None:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        with turn():
            row = self._run(step)
            optimizer.state.clear()
            self._empty()
        return row

    def planned(self, budget_bytes: int, allow: str) -> Row:
        """By a plan for the budget."""
        self._empty()
        model, batch, loss = self.subject.made(self.device, tiny=self.tiny)
        optimizer = self.subject.optimizer_for(model)
        row: Row = {"budget_bytes": budget_bytes, "allow": allow}
        began = busy()
        self._reset()
        try:
            plan = ss.plan(model, batch, loss=loss, optimizer=optimizer, budget=budget_bytes,
                           allow=allow)  # fmt: skip
        except ss.BudgetError as error:
            return {**row, "refused": str(error), "smallest_bytes": error.smallest_bytes,
                    "plan_seconds": busy() - began}  # fmt: skip
        except ss.ShoestringError as error:
            return {**row, "failed": f"{type(error).__name__}: {error}"}
        row |= {
            "plan_seconds": busy() - began, "planning_bytes": self._peak(),
            "plan": plan.short(), "kind": plan.kind,
            "predicted_bytes": plan.predicted.needed_bytes,
            "predicted_ms": 1e3 * plan.predicted.seconds,
            "plain_predicted_ms": 1e3 * plan.plain.seconds,
            "plain_predicted_bytes": plan.plain.needed_bytes,
        }  # fmt: skip
        with turn():
            row |= self._applied(plan, model, batch, optimizer, loss)
            self._empty()
        return row

    def _applied(self, plan: Any, model: Any, batch: Any, optimizer: Any, loss: Any) -> Row:
        """Steps by the plan; what they took is free afterwards."""
        self._empty()
        row: Row = {}
        step = ss.apply(plan, model, optimizer, loss=loss)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                row |= self._run(lambda: step(batch))
            except (ss.ShoestringError, torch.OutOfMemoryError) as error:
                row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        row["captured"] = step.captured
        row["why_not_captured"] = getattr(step, "why_not_captured", None)
        row["warnings"] = [str(w.message)[:200] for w in told]
        return row

    def _run(self, step: Any) -> Row:
        self._reset()
        first = None
        for _ in range(4):  # state, a second eager one, capture, replay
            step()
            if first is None:
                first = self._peak()
        times = []
        for _ in range(self.steps):
            self._wait()
            began = time.perf_counter()
            step()
            self._wait()
            times.append(time.perf_counter() - began)
        row: Row = {"ms": 1e3 * statistics.median(times), "first_bytes": first}
        row["reserved_bytes"] = self._peak()
        if self.device == "cuda":
            row["allocated_bytes"] = torch.cuda.max_memory_allocated()
        return row

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _reset(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def _peak(self) -> int:
        return torch.cuda.max_memory_reserved() if self.device == "cuda" else 0

    def _empty(self) -> None:
        gc.collect()
        clean()


def examine(
    case: Case, budgets: list[str], allow: str, write: Any, *, at_once: bool, peers: bool,
    smallest: bool = False,
) -> None:  # fmt: skip
    """Every way of one model; with `smallest`, also by what a refusal names."""
    name, named = case.subject.name, set()
    plain = peer = None
    if peers:
        plain = case.plain()
        assert plain is not None
        write({"name": name, "way": "plain", **plain})
        peer = case.plain(gc_on=True)
        if peer is not None:
            write({"name": name, "way": "checkpointed", **peer})
    for text in budgets:
        if text == "gc" and peer is None:
            continue
        if text.endswith("GB"):
            budget = int(float(text.removesuffix("GB")) * 1e9)
        elif text == "gc":
            assert peer is not None
            budget = peer["reserved_bytes"]
        else:
            assert plain is not None, "a share is of the plain peak, which --no-peers leaves out"
            budget = int(float(text) * plain["reserved_bytes"])
        for allowed in [allow] if at_once else dict.fromkeys(("lossless", allow)):
            row = case.planned(budget, allowed)
            known = {"name": name, "plain_bytes": plain and plain["reserved_bytes"],
                     "plain_ms": plain and plain["ms"], "gc_ms": peer and peer["ms"]}  # fmt: skip
            write({**known, "way": f"plan {text}", **row})
            if "refused" not in row:
                break
            least = row["smallest_bytes"]
            if smallest and least and (allowed, least) not in named:
                named.add((allowed, least))
                write({**known, "way": "its smallest", **case.planned(least, allowed)})


def line(row: Row) -> str:
    """Of the table; GB are 10^9 bytes."""

    def gb(key: str) -> str:
        return "-" if row.get(key) is None else f"{row[key] / 1e9:.3f}"

    def ms(key: str) -> str:
        return "-" if row.get(key) is None else f"{row[key]:.1f}"

    over = "" if row.get("reserved_bytes", 0) <= row.get("budget_bytes", 1 << 62) else " OVER"
    note = row.get("plan") or row.get("refused") or row.get("failed") or ""
    if row.get("failed") and row.get("plan"):
        note = f"FAILED {row['failed'][:120]} | {note}"
    state = {True: "graph", False: "eager", None: ""}[row.get("captured")]
    return (
        f"{row['name']:<15}{row['way']:<13}{gb('budget_bytes'):>8}{gb('predicted_bytes'):>8}"
        f"{gb('reserved_bytes'):>8}{gb('allocated_bytes'):>8}{gb('first_bytes'):>8}{ms('predicted_ms'):>8}"
        f"{ms('ms'):>8}{ms('gc_ms'):>8}{ms('plain_ms'):>8} {state:<6}{over} {note[:150]}"
    )


HEADER = (
    f"{'model':<15}{'way':<13}{'budget':>8}{'pred.':>8}{'reserv.':>8}{'alloc.':>8}{'first':>8}"
    f"{'pred.ms':>8}{'ms':>8}{'gc ms':>8}{'plain':>8}"
)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*SUBJECTS, []])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--budgets", nargs="*", default=list(FRACTIONS))
    parser.add_argument("--allow", default="lossless")
    parser.add_argument("--at-once", action="store_true", help="do not try lossless plans first")
    parser.add_argument("--no-peers", action="store_true", help="plans alone, for budgets in GB")
    parser.add_argument("--smallest", action="store_true", help="run what refusals name, too")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=0, help="models at once, each in its process")
    given = parser.parse_args()
    if given.jobs:
        return several(given)
    take_turns()
    print(HEADER, flush=True)
    warnings.simplefilter("ignore")

    def write(row: Row) -> None:
        print(line(row), flush=True)
        if given.out:
            with given.out.open("a") as out:
                out.write(json.dumps({**row, "made": provenance()}) + "\n")

    for name in given.names or SUBJECTS:
        try:
            case = Case(SUBJECTS[name], given.device, given.tiny, given.steps)
            examine(case, given.budgets, given.allow, write, at_once=given.at_once,
                    peers=not given.no_peers, smallest=given.smallest)  # fmt: skip
        except Exception as error:
            traceback.print_exc()
            write({"name": name, "way": "-", "failed": f"{type(error).__name__}: {error}"[:300]})


def several(given: argparse.Namespace) -> None:
    """One process a model; they take turns on the GPU, so that times are of one alone."""

    def one(name: str) -> str:
        command = [sys.executable, __file__, name, "--device", given.device, "--allow", given.allow,
                   "--steps", str(given.steps), "--budgets", *given.budgets]  # fmt: skip
        command += ["--tiny"] * given.tiny + ["--at-once"] * given.at_once
        command += ["--no-peers"] * given.no_peers + ["--smallest"] * given.smallest
        if given.out:
            command += ["--out", str(given.out)]
        env = {FILE: file, **os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, capture_output=True, text=True, env=env, check=False).stdout

    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        file = str(Path(folder, "turns"))
        for text in pool.map(one, given.names or list(SUBJECTS)):
            print("\n".join(text.splitlines()[1:]), flush=True)


if __name__ == "__main__":
    main()
