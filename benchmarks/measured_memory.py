"""The rows of the report's Pareto table, executed: peak memory and step time on one GPU.

    PYTHONPATH=src python3 benchmarks/measured_memory.py [--json FILE] [--only 2,3] [--live]

WRN-28-2, minibatch 100, SGD with Nesterov momentum, `torch.cuda.max_memory_allocated` of a whole
step: parameters, gradients, momentum, the batch, activations and cuDNN's workspaces. cuBLAS
is given no workspace of its own (`CUBLAS_WORKSPACE_CONFIG=:0:0`), since 32 MiB is five times the
subject.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":0:0")
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")

import torch

from shoestring.lab.models import builtin
from shoestring.memory.live.measure import training_step
from shoestring.step.apply import apply
from shoestring.techniques import Checkpointing, Microbatching, Precision, Sparsity


@dataclass(frozen=True)
class Row:
    """One row of the report's Table 3."""

    density: float
    microbatch: int
    counted_mb: float


ROWS = (
    Row(1.0, 100, 42.6),
    Row(1.0, 10, 12.2),
    Row(0.3, 10, 6.7),
    Row(0.2, 10, 5.6),
    Row(0.2, 4, 3.6),
    Row(0.1, 4, 2.5),
)


LAYOUTS = ("contiguous", "channels_last")
GROUPS = 5
"""Times are the median of so many groups of steps."""


def main() -> int:
    """Print one table."""
    options, start = arguments(), time.perf_counter()
    if not torch.cuda.is_available():
        print("this benchmark measures a CUDA device, and there is none", file=sys.stderr)
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    found: list[dict[str, Any]] = []
    for layout in options.layout:
        found.append(shown(plain(layout, "before", options.steps)))
        found.append(shown(captured(layout, options.steps)))
        for row in options.only:
            try:
                found.append(shown(planned(ROWS[row - 1], layout, options.steps, options.live)))
            except Exception:  # one row must not cost the others
                print(f"row {row}, {layout} failed")
                traceback.print_exc()
        found.append(shown(plain(layout, "after", options.steps)))
    ratios(found)
    if options.others:
        found += others(options.steps)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                       "rows": found}, file, indent=1)  # fmt: skip
    print(f"{time.perf_counter() - start:.0f} s in all")
    return 0


def arguments() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--steps", type=int, default=5, help=f"steps in each of {GROUPS} groups")
    parser.add_argument("--live", action="store_true", help="what is live at each row's peak")
    parser.add_argument(
        "--only",
        type=lambda text: [int(part) for part in text.split(",") if part],
        default=list(range(1, len(ROWS) + 1)),
        help="rows of the table, such as 2,3; empty for none",
    )
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument(
        "--others", action=argparse.BooleanOptionalAction, default=True,
        help="also DC-Transformer and GPT-2",
    )  # fmt: skip
    options = parser.parse_args()
    options.layout = options.layout or list(LAYOUTS)
    return options


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Print one line of the table."""
    name = row["name"] + (", one graph" if row.get("captured") else "")
    low, high = row["spread"]
    line = f"{name:58s} {row['peak_bytes'] / 1e6:9.2f} MB"
    if "counted_mb" in row:
        ratio = row["peak_bytes"] / 1e6 / row["counted_mb"]
        line += f"  report {row['counted_mb']:6.1f}  {ratio:5.2f}x"
    print(f"{line}  {row['milliseconds']:8.2f} ms ({low:.2f} to {high:.2f})", flush=True)
    return row


def ratios(rows: list[dict[str, Any]]) -> None:
    """Step times to plain FP32 in the same run, by its layout, before and after taken together."""
    bases = {}
    for layout in LAYOUTS:
        plains = [r for r in rows if r["name"].startswith("plain") and r["layout"] == layout]
        if plains:
            bases[layout] = statistics.mean(r["milliseconds"] for r in plains)
            low, high = min(r["spread"][0] for r in plains), max(r["spread"][1] for r in plains)
            print(f"plain FP32, {layout}: {bases[layout]:.2f} ms ({low:.2f} to {high:.2f})")
    print(f"step time to {', to '.join(f'plain {layout}' for layout in bases)}")
    for row in rows:
        row["time_ratios"] = {k: row["milliseconds"] / base for k, base in bases.items()}
        columns = "".join(f"{ratio:7.2f}x" for ratio in row["time_ratios"].values())
        print(f"{row['name']:58s}{columns}", flush=True)


def fresh(layout: str) -> tuple[Any, Any, Any, int]:
    """Model, batch and loss on the GPU, and what was allocated before."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    known = builtin("wrn-28-2")
    torch.manual_seed(0)
    model = known.build().cuda()
    images, labels = torch.randn(100, 3, 32, 32), torch.randint(0, 10, (100,))
    form = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    model = model.to(memory_format=form)
    return model, (images.cuda().contiguous(memory_format=form), labels.cuda()), known.loss, before


def timed(call: Any, steps: int) -> dict[str, Any]:
    """Milliseconds a call: the median of the groups, and their lowest and highest."""
    times = []
    for _ in range(GROUPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            call()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start) / steps)
    return {"milliseconds": statistics.median(times), "spread": [min(times), max(times)]}


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """The report's optimizer."""
    return torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4
    )


def plain(layout: str, when: str, steps: int) -> dict[str, Any]:
    """The baseline: plain PyTorch, FP32, eager."""
    model, batch, loss, before = fresh(layout)
    optimizer = sgd(model)
    for _ in range(3):
        training_step(model, batch, loss, optimizer)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    training_step(model, batch, loss, optimizer)
    peak = torch.cuda.max_memory_allocated() - before
    times = timed(lambda: training_step(model, batch, loss, optimizer), steps)
    return {"name": f"plain FP32, {layout}, {when} the rows", "counted_mb": 404.8,
            "peak_bytes": peak, "layout": layout, **times}  # fmt: skip


def captured(layout: str, steps: int) -> dict[str, Any]:
    """The same baseline as one CUDA graph of plain PyTorch: what launches cost it."""
    model, batch, loss, before = fresh(layout)
    optimizer = sgd(model)
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            training_step(model, batch, loss, optimizer)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        training_step(model, batch, loss, optimizer)
    peak = torch.cuda.max_memory_allocated() - before
    times = timed(graph.replay, steps)
    return {"name": f"FP32, {layout}, plain PyTorch", "counted_mb": 404.8, "captured": True,
            "peak_bytes": peak, "layout": layout, **times}  # fmt: skip


def planned(row: Row, layout: str, steps: int, live: bool) -> dict[str, Any]:
    """One row, for real."""
    model, (images, labels), loss, before = fresh(layout)
    batch = (images.half().cpu(), labels.cpu())  # the step moves it: one copy on the device
    del images, labels
    techniques: list[Any] = [Precision("fp16"), Checkpointing("residual-2*")]
    if row.density < 1:
        techniques.append(Sparsity(row.density))
    if row.microbatch < 100:
        techniques.append(Microbatching(row.microbatch))
    step = apply(techniques, model, sgd(model), loss=loss)
    for _ in range(3):  # eagerly, captured, replayed
        value = step(batch)
    gc.collect()
    peak = step.measure(batch).peak_bytes - before
    times = timed(lambda: step(batch), steps)
    found = {"name": f"density {row.density:g} microbatch {row.microbatch}, {layout}",
             "counted_mb": row.counted_mb, "peak_bytes": peak, "loss": float(value),
             "layout": layout, "captured": step.captured, **times}  # fmt: skip
    if live:
        try:
            found |= taken_apart(step, batch, before)
        except Exception:  # the row itself was measured
            traceback.print_exc()
    return found


def taken_apart(step: Any, batch: Any, before: int) -> dict[str, Any]:
    """The peak of the same step without a graph, and what was live at it."""
    step.use_graph(False)
    gc.collect()
    torch.cuda.empty_cache()
    step(batch)
    eager = step.measure(batch).peak_bytes - before
    peak = step.live(batch)
    print(
        f"\neager {eager:,} bytes, watched {peak.allocator_bytes - before:,}, "
        f"from others {before:,}\n{peak.table()}\n",
        flush=True,
    )
    return {"eager_peak_bytes": eager, "live": peak.as_json()}


def others(steps: int) -> list[dict[str, Any]]:
    """DC-Transformer and GPT-2, plain FP32 against FP16 + residual-1 + microbatches."""
    found = []
    for name, build, batch, loss, size in (dc_transformer(), gpt2()):
        for plan in ([], [Precision("fp16"), Checkpointing("residual-1"), Microbatching(size)]):
            gc.collect()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.manual_seed(0)
            model = build().cuda()
            step = apply(plan, model, torch.optim.Adam(model.parameters(), lr=1e-4), loss=loss)
            data = {key: value.cuda() for key, value in batch.items()}
            for _ in range(3):
                value = step(data)
            peak = step.measure(data).peak_bytes - before
            times = timed(lambda s=step, d=data: s(d), steps)
            found.append(shown({"name": f"{name}, {step.plan}", "peak_bytes": peak,
                                "loss": float(value), "captured": step.captured,
                                **times}))  # fmt: skip
            del model, step, data
    return found


def dc_transformer() -> tuple[Any, ...]:
    """4,000 tokens in sentences of 25; a microbatch of 250 tokens is ten of them."""
    known = builtin("dc-transformer")
    batch = {k: torch.randint(4, 6000, v.shape) for k, v in known.batch(4000).items()}
    return "dc-transformer 4,000 tokens", known.build, batch, known.loss, 10


def gpt2() -> tuple[Any, ...]:
    """Hugging Face's GPT-2 small from its configuration, 8 sequences of 512."""

    def build() -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel

        model = GPT2LMHeadModel(GPT2Config())
        model.loss_type = "ForCausalLM"
        return model

    tokens = torch.randint(0, 50257, (8, 512))
    batch = {"input_ids": tokens, "labels": tokens}
    return "gpt2 8 x 512", build, batch, lambda model, data: model(**data).loss, 2


if __name__ == "__main__":
    sys.exit(main())
