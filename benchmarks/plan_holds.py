"""Does a plan hold? Models × budgets: the measured peak beside the budget, and certificates.

    python benchmarks/plan_holds.py                   # 12 models × 8 budgets on this CPU
    python benchmarks/plan_holds.py --device cuda     # 4 models × 8 budgets on one GPU
    python benchmarks/plan_holds.py --only gpt2 --budgets 2

Budgets go from 90% of the plain peak down to the smallest for which there is a plan, by equal
steps. The table goes to stdout, progress to stderr; the exit status is 1 if a plan did not hold.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

import shoestring as ss
from architectures import ARCHITECTURES
from shoestring.lab.models import builtin
from shoestring.planning.planner import Planner
from shoestring.techniques.claims import LOSSLESS
from shoestring.trace.fakes import make_optimizer

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model with its batch, loss and optimizer."""

    build: Callable[[], nn.Module]
    batch: Any
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: str


def built_in(name: str, size: int) -> Callable[[], Case]:
    """One of ours."""
    known = builtin(name)
    return lambda: Case(known.build, known.batch(size), known.loss, known.default_optimizer)


def architecture(name: str, optimizer: str, size: int | None = None) -> Callable[[], Case]:
    """One of those the profiler is compared on."""
    known = ARCHITECTURES[name]

    def make() -> Case:
        return Case(known.build, known.batch(size or known.default_batch), known.loss, optimizer)

    return make


CPU = {
    "wrn-28-2": built_in("wrn-28-2", 20),
    "dc-transformer-width-128": built_in("dc-transformer-width-128", 400),
    "gpt2": architecture("gpt2", "adamw"),
    "bert": architecture("bert", "adamw"),
    "llama": architecture("llama", "adamw"),
    "t5": architecture("t5", "adamw"),
    "vit-hf": architecture("vit-hf", "adamw"),
    "resnet18": architecture("resnet18", "sgd", 64),
    "groupnorm-resnet": architecture("groupnorm-resnet", "sgd", 64),
    "densenet": architecture("densenet", "sgd"),
    "unet": architecture("unet", "adam"),
    "lstm": architecture("lstm", "adam"),
}
CUDA = {
    "wrn-28-2": built_in("wrn-28-2", 100),
    "gpt2": architecture("gpt2", "adamw", 128),
    "llama": architecture("llama", "adamw", 128),
    "resnet50": architecture("resnet50", "sgd", 64),
}


def main() -> None:
    """Run what the command line asks for."""
    arguments = parse()
    torch.set_num_threads(1)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here")
    known = CUDA if arguments.device == "cuda" else CPU
    rows = []
    print(header(), flush=True)
    for name in arguments.only or known:
        for row in rows_of(name, known[name](), arguments):
            rows.append(row)
            print(line(row), flush=True)
    broken = [row for row in rows if not row["holds"] or row["certified"] is False]
    closest = max(row["measured_bytes"] / row["budget_bytes"] for row in rows)
    print(
        f"\n{len(rows)} plans, {len(broken)} did not hold; the closest took {100 * closest:.1f}% "
        f"of its budget; {sum(row['certified'] is True for row in rows)} lossless ones certified"
    )
    for text in dict.fromkeys(text for row in rows for text in row["said"]):
        print(text)
    if arguments.json:
        made = {"made": provenance(), "rows": rows}
        Path(arguments.json).write_text(json.dumps(made, indent=1) + "\n")
    sys.exit(1 if broken else 0)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", metavar="NAME", action="append", choices=sorted({**CPU, **CUDA}))
    parser.add_argument("--budgets", type=int, default=8, help="budgets for each model")
    parser.add_argument("--allow", help="as for shoestring plan; by default lossless and precision")
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    return parser.parse_args()


def rows_of(name: str, case: Case, arguments: argparse.Namespace) -> Iterator[Row]:
    """One row for each budget."""
    torch.manual_seed(0)
    device = arguments.device
    model = case.build()  # the original stays on the host: a budget is for all that is allocated
    start = time.perf_counter()
    planner = Planner(
        model, case.batch, loss=case.loss, optimizer=case.optimizer, allow=arguments.allow,
        device=device,
    )  # fmt: skip
    first, last = int(0.9 * planner.estimates.plain.needed_bytes), planner.smallest_bytes()
    print(f"{name}: chain in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    count = arguments.budgets
    for number in range(count):
        share = number / max(count - 1, 1)
        budget = round(first + (last - first) * share)
        start = time.perf_counter()
        plan = planner.plan(budget)
        seconds = time.perf_counter() - start
        row = {
            "name": name,
            "device": device,
            "plain_bytes": planner.estimates.plain.needed_bytes,
            "budget_bytes": budget,
            "predicted_bytes": plan.predicted.peak_bytes,
            "predicted_times_plain": plan.predicted.seconds / plan.plain.seconds,
            "planning_seconds": seconds,
            "kind": plan.kind,
            "plan": plan.to_dict(),
            "short": plan.short(),
            "certified": None,
            "certified_in": None,
        }
        measure(row, plan, model, case)
        if plan.kind == LOSSLESS:
            certify(row, plan, model, case)
        yield row


def certify(row: Row, plan: ss.BudgetPlan, model: nn.Module, case: Case) -> None:
    """Planned beside plain training; in FP64 if FP32 differs, where a ReLU may turn by rounding."""
    for kind in (torch.float32, torch.float64):
        twin, batch, optimizer = on_device(model, case, row["device"], kind)
        made = ss.verify(plan, twin, [batch], loss=case.loss, optimizer=optimizer, steps=1)
        row["certified"], row["certified_in"] = made.ok, str(kind).removeprefix("torch.")
        row["gradients"] = made["gradients"].as_dict()
        del twin, batch, optimizer
        if made.ok:
            return


def on_device(
    model: nn.Module, case: Case, device: str, kind: torch.dtype = torch.float32
) -> tuple[nn.Module, Any, Any]:
    """Copies of the model and its batch, and an optimizer."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to(device, kind if leaf.is_floating_point() else leaf.dtype, copy=True)

    twin, batch = copy.deepcopy(model).to(device, kind), tree_map(moved, case.batch)
    return twin, batch, make_optimizer(case.optimizer, twin, {})


def measure(row: Row, plan: ss.BudgetPlan, model: nn.Module, case: Case) -> None:
    """Real steps by the plan: the peak of the third, and on CUDA of a captured one."""
    clean()
    on_cuda = row["device"] == "cuda"
    row["allocated_before"] = torch.cuda.memory_allocated() if on_cuda else 0
    twin, batch, optimizer = on_device(model, case, row["device"])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ss.BudgetWarning)
        step = ss.apply(plan, twin, optimizer, loss=case.loss)
        step.use_graph(False)
        for _ in range(2):
            step(batch)
        row["measured_bytes"] = step.measure(batch).peak_bytes
        step.use_graph(True)
        for _ in range(4 if on_cuda else 0):
            step(batch)
        row["captured_bytes"] = step.measure(batch).peak_bytes if step.captured else None
    row["said"] = [str(w.message) for w in said if issubclass(w.category, ss.BudgetWarning)]
    row["holds"] = max(row["measured_bytes"], row["captured_bytes"] or 0) <= row["budget_bytes"]
    del twin, batch, optimizer, step
    clean()


def clean() -> None:
    """Give back what an earlier step left."""
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def header() -> str:
    """Of the table; sizes in MB (10^6 bytes)."""
    return (
        f"{'model':<25}{'plain':>9}{'budget':>9}{'predicted':>10}{'measured':>10}{'captured':>9}"
        f"{'time':>7}  {'holds':<6}{'kind':<14}{'verify':<7}plan"
    )


def line(row: Row) -> str:
    """Of the table."""
    captured = "-" if row["captured_bytes"] is None else f"{row['captured_bytes'] / 1e6:.2f}"
    certified = {True: "ok", False: "FAILS", None: "-"}[row["certified"]]
    if certified == "ok" and row["certified_in"] == "float64":
        certified = "fp64"
    return (
        f"{row['name']:<25}{row['plain_bytes'] / 1e6:>9.2f}{row['budget_bytes'] / 1e6:>9.2f}"
        f"{row['predicted_bytes'] / 1e6:>10.2f}{row['measured_bytes'] / 1e6:>10.2f}{captured:>9}"
        f"{row['predicted_times_plain']:>6.2f}x  {'yes' if row['holds'] else 'NO':<6}"
        f"{row['kind']:<14}{certified:<7}{row['short']}"
    )


def provenance() -> dict[str, str]:
    """Where these numbers come from."""
    made = {"command": " ".join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d")}
    made["python"], made["torch"] = platform.python_version(), str(torch.__version__)
    made["transformers"] = metadata.version("transformers")
    if torch.cuda.is_available():
        made["device"] = torch.cuda.get_device_name()
    else:
        made["device"] = f"CPU ({torch.backends.cpu.get_cpu_capability()}), 1 thread"
    return made


if __name__ == "__main__":
    main()
