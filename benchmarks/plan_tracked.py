"""Do plans hold by another's measure? 24 models × 4 budgets on the CPU, tracked by PyTorch's tools.

Every model is planned for 80, 55, 35 and 20% of what its plain step takes. A step by the plan then
runs under `torch.distributed._tools.mem_tracker.MemTracker`, and once more under the profiler's
allocator events (`stranger_loop.peak_of`). Neither shares a line with what predicts. Where no plan
fits, the smallest budget that the error names is planned for and tracked instead.

    OMP_NUM_THREADS=1 python benchmarks/plan_tracked.py [NAME …] [--budgets 0.55 0.2] [--json FILE]

The exit status is 1 if a plan took more than its budget.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker, get_untyped_storages

import shoestring as ss
from plan_holds import provenance
from shoestring.planning.planner import Planner
from stranger_loop import held_by, leaves, peak_of
from stranger_models import STRANGERS, Stranger

SHARES = (0.80, 0.55, 0.35, 0.20)
MODELS = (
    "gemma2-padded", "olmo2-padded", "qwen2-full", "mistral-autocast", "phi-bf16",
    "starcoder2-padded", "mixtral-plain", "mamba-padded", "electra-tags", "bart-padded",
    "llama-lora", "qwen2-preferences", "swin", "convnextv2", "regnet", "dinov2",
    "segformer-ignored", "clip-contrastive", "hubert-ctc", "vae-summed", "diffusion-unet",
    "graph-attention", "gru-attention-padded", "flow",
)  # fmt: skip
Row = dict[str, Any]


class _NoModules:
    """In the place of MemTracker's table of modules."""

    is_bw, parents = False, {"Global"}

    def register_user_hooks(self, *_: Any) -> None:
        """None."""

    def clear_user_hooks(self) -> None:
        """None."""

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class Tracker(MemTracker):
    """Of the whole step, without hooks of modules.

    MemTracker's take each module to run once, which microbatches break; and a head that somebody
    looks at computes its logits, so that a chunked loss would not be what is measured. Tensors in
    mapped files are left out: their pages are the system's cache, which no budget counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = _NoModules()

    def _update_and_maybe_create_winfos(self, t: Any, *how: Any, **more: Any) -> Any:
        return set() if _is_mapped(t) else super()._update_and_maybe_create_winfos(t, *how, **more)

    def _track(self, reftype: Any, t: Any) -> None:
        if not _is_mapped(t):
            super()._track(reftype, t)


def _is_mapped(tensor: torch.Tensor) -> bool:
    return any(storage.filename for storage in get_untyped_storages(tensor))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="*", choices=[*STRANGERS, []], default=[])
    parser.add_argument("--budgets", type=float, nargs="*", default=SHARES, help="of plain")
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    print(header(), flush=True)
    for name in arguments.model or MODELS:
        for row in rows_of(STRANGERS[name], arguments.budgets):
            rows.append(row)
            print(line(row), flush=True)
    print("\n" + summary(rows))
    print("\n".join(f"{key}: {value}" for key, value in provenance().items()))
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({"made": provenance(), "rows": rows}, indent=1) + "\n"
        )
    sys.exit(0 if all(row["holds"] for row in rows) else 1)


def rows_of(stranger: Stranger, shares: Iterable[float]) -> Iterator[Row]:
    """One for each budget."""
    torch.manual_seed(0)
    model, batch, loss = stranger.build(1)
    optimizer = stranger.optimizer_for(model)
    planner = Planner(model, batch, loss=loss, optimizer=optimizer, allow="lossless")
    plain = planner.estimates.plain.needed_bytes
    for share in shares:
        budget, refused = int(share * plain), None
        began = time.process_time()
        try:
            plan = planner.plan(budget)
        except ss.BudgetError as error:
            assert error.smallest_bytes is not None
            refused, budget = budget, error.smallest_bytes
            plan = planner.plan(budget)
        row: Row = {
            "name": stranger.name, "share": share, "plain_bytes": plain, "budget_bytes": budget,
            "refused_bytes": refused, "plan": plan.short(),
            "planning_cpu_seconds": time.process_time() - began,
            "predicted_bytes": plan.predicted.peak_bytes,
        }  # fmt: skip
        row |= measured(plan, stranger, model, batch, loss)
        row["holds"] = max(row["tracked_bytes"], row["allocated_bytes"]) <= budget
        yield row


def measured(plan: Any, stranger: Stranger, model: Any, batch: Any, loss: Any) -> Row:
    """The peaks of the third and the fourth step by the plan, each by a tool of its own."""
    twin = copy.deepcopy(model)
    optimizer = stranger.optimizer_for(twin)
    step = ss.apply(ss.Plan.of(plan), twin, optimizer, loss=loss)
    step(batch)
    step(batch)
    gc.collect()
    tracker = Tracker()
    tracker.track_external(twin, optimizer, *leaves(batch))
    with tracker:
        step(batch)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    allocated = peak_of(lambda: step(batch), held_by(twin, optimizer, batch), "cpu")
    return {"tracked_bytes": int(peak["Total"]), "allocated_bytes": allocated}


def header() -> str:
    """Of the table; sizes in MB (10^6 bytes)."""
    return (
        f"{'model':<22}{'share':>6}{'plain':>9}{'budget':>9}{'predicted':>10}{'tracker':>9}"
        f"{'allocator':>10}  {'holds':<6}plan"
    )


def line(row: Row) -> str:
    """Of the table; a budget in brackets is the smallest, where none fits the one asked for."""
    budget = f"{row['budget_bytes'] / 1e6:.2f}"
    budget = f"({budget})" if row["refused_bytes"] is not None else budget
    return (
        f"{row['name']:<22}{row['share']:>6.0%}{row['plain_bytes'] / 1e6:>9.2f}{budget:>9}"
        f"{row['predicted_bytes'] / 1e6:>10.2f}{row['tracked_bytes'] / 1e6:>9.2f}"
        f"{row['allocated_bytes'] / 1e6:>10.2f}  {'yes' if row['holds'] else 'NO':<6}{row['plan']}"
    )


def summary(rows: list[Row]) -> str:
    """In one sentence."""
    apart = sorted(abs(r["tracked_bytes"] / r["predicted_bytes"] - 1) for r in rows)
    closest = max(max(r["tracked_bytes"], r["allocated_bytes"]) / r["budget_bytes"] for r in rows)
    refused = sum(r["refused_bytes"] is not None for r in rows)
    return (
        f"{len({r['name'] for r in rows})} models, {len(rows)} budgets, {refused} of them refused "
        f"and run at the smallest; {sum(not r['holds'] for r in rows)} did not hold; the closest "
        f"took {closest:.1%} of its budget; tracked and predicted differ by "
        f"{apart[len(apart) // 2]:.2%} in the median and {apart[-1]:.2%} at most"
    )


if __name__ == "__main__":
    main()
