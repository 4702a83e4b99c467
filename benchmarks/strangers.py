"""Plans and certificates of models that the project is not developed with.

Every stranger is planned for 80, 55, 35 and 20% of what its plain step takes. A loop of its
own (`stranger_loop.py`), which uses nothing of shoestring's but the step it checks, trains plainly
and by the plan and compares gradients, buffers and peaks. Three questions: is a plan that is called
lossless right, does the certificate say so, and does the peak stay within the budget.

    python benchmarks/strangers.py --jobs 16 --out rows.jsonl    # all, on the CPU
    python benchmarks/strangers.py gemma2 vae
    python benchmarks/strangers.py --device cuda --scale 4
    python benchmarks/strangers.py --read rows.jsonl             # the table again
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoestring as ss
from stranger_loop import (
    Seen,
    apart,
    buffers_apart,
    by_example,
    held_by,
    mapped,
    outside,
    peak_of,
    plain_step,
    planned_step,
    seed,
)
from stranger_models import STRANGERS, Stranger
from stranger_table import is_wrong, line, provenance, read, summary

FRACTIONS = (0.80, 0.55, 0.35, 0.20)
SLACK = 1e-3
"""Relative error of FP32 gradients, in L2 over all of them, that no rounding explains."""
FAR, FAR_TENSOR = 0.2, 0.8
"""What 16 bits may change all gradients by, and one tensor, to be called near."""
TENSOR_SLACK = 2e-2
"""The same of one tensor, which has at least a thousandth of the norm of all."""


# -- a stranger ------------------------------------------------------------------------------------


class Case:
    """A stranger on a device, made anew for every loop."""

    def __init__(self, stranger: Stranger, scale: int, device: str) -> None:
        self.stranger, self.device = stranger, device
        torch.manual_seed(0)
        model, batch, self.loss = stranger.build(scale)
        self.model = model.to(device)
        self.batch = mapped(lambda t: t.to(device), batch)
        self._outside = [(net, copy.deepcopy(net.state_dict())) for net in outside(self.loss)]

    def fresh(self) -> tuple[nn.Module, Any]:
        """A copy and its optimizer; networks beside it are as they were."""
        for network, state in self._outside:
            network.load_state_dict(state)
        model = copy.deepcopy(self.model)
        return model, self.stranger.optimizer_for(model)

    def plain(self, loss: Any = None, *, wide: bool = False) -> Seen:
        """One plain step from the same seed."""
        model, optimizer = self.fresh()
        batch = self.batch
        if wide:
            model = model.double()
            optimizer = self.stranger.optimizer_for(model)
            batch = mapped(lambda t: t.double() if t.is_floating_point() else t, batch)
        seed(7)
        return plain_step(model, batch, loss or self.loss, optimizer)

    def planned(self, plan: Any, loss: Any = None) -> Seen:
        """One step by a plan from the same seed."""
        model, optimizer = self.fresh()
        step = ss.apply(plan, model, optimizer, loss=loss or self.loss)
        step.use_graph(False)
        for _ in range(30):
            seed(7)
            seen = planned_step(step, self.batch)
            if all(bool(torch.isfinite(g).all()) for g in seen.gradients.values()):
                return seen  # FP16's scale has come down, and nothing has moved so far
        return seen

    def plain_peak(self) -> int:
        """Of a steady step."""
        model, optimizer = self.fresh()
        run = lambda: plain_step_quiet(model, self.batch, self.loss, optimizer)  # noqa: E731
        run()
        return peak_of(run, held_by(model, optimizer, self.batch), self.device)

    def planned_peak(self, plan: Any) -> int:
        """Of a steady step."""
        model, optimizer = self.fresh()
        step = ss.apply(ss.Plan.of(plan), model, optimizer, loss=self.loss)
        step(self.batch)
        step(self.batch)
        held = held_by(model, optimizer, self.batch)
        return peak_of(lambda: step(self.batch), held, self.device)


def plain_step_quiet(model: nn.Module, batch: Any, loss: Any, optimizer: Any) -> None:
    """A plain step that keeps nothing."""
    loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def truth(case: Case, plan: Any) -> dict[str, Any]:
    """How far the plan's gradients are from plain ones, and what rounding explains."""
    techniques = {t.name: t for t in plan.techniques}
    micro, kept = techniques.get("microbatching"), dict(techniques)
    plans = [(plan, case.loss)]
    if micro is not None and case.stranger.random:
        kept.pop("microbatching")
        parts = {n: t for n, t in techniques.items() if n != "checkpointing"}
        plans = [
            (list(parts.values()), by_example(case.loss, case.batch)),
            (list(kept.values()), case.loss),
        ]
    worst = {"error": 0.0, "tensor": 0.0, "buffers": 0.0, "loss": 0.0}
    for chosen, loss in plans:
        expected, found = case.plain(loss), case.planned(chosen, loss)
        total, tensor = apart(expected, found)
        worst["error"], worst["tensor"] = max(worst["error"], total), max(worst["tensor"], tensor)
        worst["buffers"] = max(worst["buffers"], buffers_apart(expected, found))
        if chosen is plans[0][0]:  # the loss of what was planned, not of a part of the plan
            off = float(abs(expected.loss - found.loss))
            worst["loss"] = off / max(abs(float(expected.loss)), 1e-12)
    try:
        noise = apart(case.plain(wide=True), case.plain()) if not case.stranger.random else None
    except (RuntimeError, ValueError, TypeError):
        noise = None
    kinds = {p.dtype for p in case.model.parameters()}
    narrow = "autocast" in case.stranger.name or torch.bfloat16 in kinds
    base = (SLACK, TENSOR_SLACK) if not narrow else (0.02, 0.1)
    limits = base if noise is None else (max(base[0], 4 * noise[0]), max(base[1], 4 * noise[1]))
    worst["limit"], worst["tensor_limit"] = limits
    right = worst["error"] <= limits[0] and worst["tensor"] <= limits[1]
    return {**worst, "right": right and worst["buffers"] <= 1e-3}


def examine(case: Case, plain_bytes: int, fraction: float) -> dict[str, Any]:
    """One plan of one stranger."""
    stranger = case.stranger
    row: dict[str, Any] = {
        "name": stranger.name, "family": stranger.family, "fraction": fraction,
        "plain_bytes": plain_bytes, "budget_bytes": int(plain_bytes * fraction),
        "device": case.device,
    }  # fmt: skip
    model, optimizer = case.fresh()
    started = time.perf_counter()
    plan = None
    for allow in ("lossless", None):
        try:
            plan = ss.plan(model, case.batch, loss=case.loss, optimizer=optimizer,
                           budget=row["budget_bytes"], allow=allow)  # fmt: skip
            break
        except ss.BudgetError as error:
            row["refused"] = f"{error.message}; {error.hint}"
        except ss.ShoestringError as error:
            row["untraced"] = f"{type(error).__name__}: {error.message}"
            break
    row["plan_seconds"] = time.perf_counter() - started
    if plan is None:
        row["verdict"] = "untraced" if "untraced" in row else "no plan"
        return row
    row["by_running"] = plan.by_running
    row |= {"kind": plan.kind, "plan": plan.to_dict(), "short": plan.short()}
    row["why"] = {c.part: c.why for c in plan.choices}
    row["measured_bytes"] = case.planned_peak(plan)
    row["holds"] = row["measured_bytes"] <= row["budget_bytes"]
    try:
        row["truth"] = truth(case, plan)
    except NotImplementedError as error:
        row["truth"] = None
        row["unchecked"] = str(error)
    started = time.perf_counter()
    certificate = ss.verify(plan, model, [case.batch], loss=case.loss, optimizer=optimizer, steps=2)
    row["verify_seconds"] = time.perf_counter() - started
    values = all(c.ok for c in certificate.comparisons)
    row |= {"verified": values, "peak_ok": certificate.peak_ok}
    row["broken"] = [f"{c.what}: {c.why}" for c in certificate.comparisons if not c.ok]
    row["verdict"] = verdict(row)
    return row


def verdict(row: dict[str, Any]) -> str:
    """One word: ok, or what is wrong."""
    found = row["truth"]
    wrong = found is not None and not found["right"]
    if row["kind"] == "lossless" and wrong:
        return "WRONG PLAN" if not row["verified"] else "FALSE CERTIFICATE"
    near = row["kind"] == "near-lossless" and found is not None
    overflows = found is not None and not math.isfinite(found["loss"])
    if near and (found["error"] > FAR or found["tensor"] > FAR_TENSOR or overflows):
        return "FAR" if row["verified"] else "far, and told"
    if not row["verified"]:
        return "FALSE ALARM" if found is not None else "alarm, unchecked"
    if not row["holds"]:
        return "OVER BUDGET"
    return "ok" if found is not None else "ok, unchecked"


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings; what they say is in the rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main() -> None:
    """Examine the strangers that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="names or parts of names; all by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--budgets", default=",".join(map(str, FRACTIONS)))
    parser.add_argument("--jobs", type=int, default=1, help="models at once, a process for each")
    parser.add_argument("--minutes", type=float, default=20, help="for one model, with --jobs")
    parser.add_argument("--out", default=None, help="JSON lines, one for each plan")
    parser.add_argument("--read", nargs="+", default=[], help="show rows that were written before")
    options = parser.parse_args()
    if options.read:
        origins, rows = read(options.read)
        for origin in origins:
            print(f"# {json.dumps(origin)}")
    else:
        rows = _examined(options)
    print(summary(rows), flush=True)
    sys.exit(any(is_wrong(row["verdict"]) for row in rows))


def _examined(options: Any) -> list[dict[str, Any]]:
    names = [name for asked in options.names or [""] for name in _named(asked)]
    origin = provenance(options.device, options.scale)
    print(f"# {json.dumps(origin)}", flush=True)
    rows = []
    out = None if options.out is None else Path(options.out).open("w")  # noqa: SIM115
    if out is not None:
        out.write(json.dumps({"provenance": origin}) + "\n")
    for row in (_in_turn if options.jobs == 1 else _at_once)(list(dict.fromkeys(names)), options):
        rows.append(row)
        print(line(row), flush=True)
        if out is not None:
            out.write(json.dumps(row, default=str) + "\n")
            out.flush()
    return rows


def _named(asked: str) -> list[str]:
    """The stranger of this name, or all whose names have it."""
    found = [asked] if asked in STRANGERS else [name for name in STRANGERS if asked in name]
    if not found:
        sys.exit(f"no stranger is called {asked!r}")
    return found


def _in_turn(names: list[str], options: Any) -> Iterator[dict[str, Any]]:
    try:
        import transformers
    except ImportError:
        sys.exit("strangers need transformers")
    transformers.logging.set_verbosity_error()
    fractions = [float(text) for text in options.budgets.split(",")]
    for name in names:
        with quiet():
            yield from _rows(STRANGERS[name], fractions, options)


def _at_once(names: list[str], options: Any) -> Iterator[dict[str, Any]]:
    """A process for each model, so that one that crashes or hangs is one row."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        running = [pool.submit(_alone, name, options, folder) for name in names]
        for done in as_completed(running):
            yield from done.result()


def _alone(name: str, options: Any, folder: str) -> list[dict[str, Any]]:
    out = Path(folder) / f"{name}.jsonl"
    command = [
        sys.executable, __file__, name, "--device", options.device, "--scale", str(options.scale),
        "--budgets", options.budgets, "--out", str(out),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    ended = "ended"
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False,
            timeout=60 * options.minutes,
        )  # fmt: skip
        ended += f" with status {done.returncode}: {done.stderr[-300:]}"
    except subprocess.TimeoutExpired:
        ended += f" after {options.minutes:g} minutes"
    rows = read([str(out)])[1] if out.exists() else []
    lacking = {float(text) for text in options.budgets.split(",")} - {r["fraction"] for r in rows}
    if any(row["fraction"] == 1.0 for row in rows):  # its plain step did not run
        return rows
    return rows + [
        {"name": name, "family": STRANGERS[name].family, "fraction": fraction, "plain_bytes": 0,
         "budget_bytes": 0, "verdict": "ERROR", "failed": ended}
        for fraction in sorted(lacking, reverse=True)
    ]  # fmt: skip


def _rows(stranger: Stranger, fractions: list[float], options: Any) -> Iterator[dict[str, Any]]:
    base = {"name": stranger.name, "family": stranger.family, "device": options.device}
    try:
        case = Case(stranger, options.scale, options.device)
        plain_bytes = case.plain_peak()
    except ImportError as error:
        yield {**base, "fraction": 1.0, "plain_bytes": 0, "budget_bytes": 0, "failed": str(error),
               "verdict": "not installed"}  # fmt: skip
        return
    except Exception as error:
        yield {**base, "fraction": 1.0, "plain_bytes": 0, "budget_bytes": 0, "failed": repr(error),
               "verdict": "CANNOT RUN"}  # fmt: skip
        return
    for fraction in fractions:
        try:
            yield examine(case, plain_bytes, fraction)
        except Exception as error:
            yield {**base, "fraction": fraction, "plain_bytes": plain_bytes,
                   "budget_bytes": int(plain_bytes * fraction), "verdict": "ERROR",
                   "failed": f"{type(error).__name__}: {error}",
                   "traceback": traceback.format_exc()}  # fmt: skip
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
