"""Predicted against measured peak memory of a training step, beside other tools' predictions.

    python benchmarks/profile_accuracy.py                        # predict and measure on this CPU
    python benchmarks/profile_accuracy.py --predict p.json       # for CUDA, made anywhere
    python benchmarks/profile_accuracy.py --measure-cuda m.json  # measurements, on a CUDA machine
    python benchmarks/profile_accuracy.py --compare p.json m.json

The table goes to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from architectures import ARCHITECTURES, Architecture
from shoestring.memory.device import device_timeline
from shoestring.memory.live.measure import Measurement, measure, training_step
from shoestring.trace.fakes import make_optimizer
from shoestring.trace.tracing import trace_model

OPTIMIZERS = ("sgd", "adam")
RESIDENT = ("model", "buffer", "input", "optimizer_state")
METHODS = {"predicted": "shoestring", "mem_tracker": "MemTracker", "torchinfo": "torchinfo"}

Row = dict[str, Any]
"""One architecture with one optimizer: bytes by method, and why a method failed."""


def main() -> None:
    """Run what the command line asks for."""
    arguments = parse()
    warnings.simplefilter("ignore")
    if arguments.compare:
        predictions, measurements = (json.loads(Path(f).read_text()) for f in arguments.compare)
        report(merge(predictions, measurements), [predictions["made"], measurements["made"]])
        return
    device = "cuda" if arguments.predict or arguments.measure_cuda else arguments.device
    if (arguments.measure_cuda or arguments.device == "cuda") and not torch.cuda.is_available():
        sys.exit("no CUDA device here; predict with --predict, measure elsewhere, then --compare")
    methods: list[Callable[[Row, Architecture, str], None]] = []
    if not arguments.measure_cuda:
        methods += [predict, predict_mem_tracker, predict_torchinfo]
    if not arguments.predict:
        methods += [measure_cuda] if device == "cuda" else [measure_cpu]
    rows = list(each_row(arguments, methods, device))
    made = provenance(arguments, device)
    file = arguments.predict or arguments.measure_cuda or arguments.json
    if file:
        Path(file).write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")
    if not (arguments.predict or arguments.measure_cuda):
        report(rows, [made])


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", metavar="NAME", action="append", choices=list(ARCHITECTURES))
    parser.add_argument("--batch", choices=("default", "large"), default="default")
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--predict", metavar="FILE", help="write predictions for CUDA")
    modes.add_argument("--measure-cuda", metavar="FILE", help="write measurements on CUDA")
    modes.add_argument("--compare", metavar=("P", "M"), nargs=2, help="print the table of both")
    return parser.parse_args()


def each_row(
    arguments: argparse.Namespace,
    methods: list[Callable[[Row, Architecture, str], None]],
    device: str,
) -> Iterator[Row]:
    """Every architecture with every optimizer, through all methods; a failure is noted."""
    torch.set_num_threads(1)
    for name in arguments.only or ARCHITECTURES:
        architecture = ARCHITECTURES[name]
        for optimizer in OPTIMIZERS:
            row: Row = {"name": name, "optimizer": optimizer, "device": device, "failures": {}}
            row["batch"] = getattr(architecture, f"{arguments.batch}_batch")
            for method in methods:
                start = time.perf_counter()
                torch.manual_seed(0)
                try:
                    method(row, architecture, optimizer)
                except Exception as error:
                    reason = (str(error).splitlines() or [""])[0]
                    row["failures"][method.__name__] = f"{type(error).__name__}: {reason}"
                seconds = time.perf_counter() - start
                print(f"{name} {optimizer} {method.__name__}: {seconds:.1f} s", file=sys.stderr)
            yield row


# -- predictions, on fake tensors ------------------------------------------------------------------


def predict(row: Row, architecture: Architecture, optimizer: str) -> None:
    """Ours."""
    with FakeTensorMode():
        model, batch = architecture.build(), architecture.batch(row["batch"])
    trace = trace_model(
        model, batch, loss=architecture.loss, optimizer=optimizer, device=row["device"]
    )
    row["predicted"] = int(device_timeline(trace).totals.max())


def predict_mem_tracker(row: Row, architecture: Architecture, optimizer: str) -> None:
    """PyTorch's MemTracker, on fake CPU tensors; steady state like ours."""
    with FakeTensorMode():
        row["mem_tracker"] = tracked_peak(
            architecture.build(), architecture.batch(row["batch"]), architecture, optimizer
        )


def tracked_peak(model: nn.Module, batch: Any, architecture: Architecture, optimizer: str) -> int:
    """The peak MemTracker shows for the second step."""
    from torch.distributed._tools.mem_tracker import MemTracker

    updates = make_optimizer(optimizer, model, {})
    assert updates is not None
    training_step(model, batch, architecture.loss, updates)
    tracker = MemTracker()
    inputs = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    tracker.track_external(model, updates, *inputs)
    with tracker:
        training_step(model, batch, architecture.loss, updates)
    kind = next(model.parameters()).device.type
    return sum(
        snapshot["Total"]
        for device, snapshot in tracker.get_tracker_snapshot("peak").items()
        if device.type == kind
    )


def predict_torchinfo(row: Row, architecture: Architecture, optimizer: str) -> None:
    """The "estimated total size" of torchinfo: input, forward/backward pass and parameters."""
    import torchinfo

    with FakeTensorMode():
        model, batch = architecture.build(), architecture.batch(row["batch"])
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        hook = model.register_forward_pre_hook(
            lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
        )
        architecture.loss(model, batch)
        hook.remove()
        args, kwargs = calls[0]
        summary = torchinfo.summary(
            model, input_data=list(args) if args else dict(kwargs), verbose=0, mode="train"
        )
    row["torchinfo"] = int(
        summary.total_input + summary.total_output_bytes + summary.total_param_bytes
    )


# -- measurements ----------------------------------------------------------------------------------


def measure_cpu(row: Row, architecture: Architecture, optimizer: str) -> None:
    """Storages of a real step by `shoestring.measure`; and what the CPU's allocator saw."""
    model, batch = architecture.build(), architecture.batch(row["batch"])
    updates = make_optimizer(optimizer, model, {})
    measured = measure(model, batch, loss=architecture.loss, optimizer=updates)
    row["measured"], row["roles"] = measured.peak_bytes, measured.bytes_by_role
    row["allocator"] = allocator_peak(model, batch, architecture, updates, measured)


def allocator_peak(
    model: nn.Module,
    batch: Any,
    architecture: Architecture,
    updates: torch.optim.Optimizer | None,
    measured: Measurement,
) -> int:
    """Peak of the allocator's own events in a plain step, kernels' scratch included."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        training_step(model, batch, architecture.loss, updates)
    results = profile.profiler.kineto_results
    assert results is not None
    events = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    live = peak = 0
    for _, nbytes in sorted(events, key=lambda event: event[0]):
        live += nbytes
        peak = max(peak, live)
    return peak + sum(measured.bytes_by_role[role] for role in RESIDENT)


def measure_cuda(row: Row, architecture: Architecture, optimizer: str) -> None:
    """The peak of the CUDA allocator, above what was there before the model."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = architecture.build().to("cuda")
    batch = tree_map(
        lambda leaf: leaf.to("cuda") if isinstance(leaf, torch.Tensor) else leaf,
        architecture.batch(row["batch"]),
    )
    measured = measure(model, batch, loss=architecture.loss, optimizer=optimizer)
    row["measured"] = measured.peak_bytes - before
    row["before"] = before
    row["roles"] = measured.bytes_by_role


# -- the table -------------------------------------------------------------------------------------


def provenance(arguments: argparse.Namespace, device: str) -> dict[str, str]:
    """Where these numbers come from."""
    made = {"command": " ".join(["python", "benchmarks/profile_accuracy.py", *sys.argv[1:]])}
    made["python"], made["torch"] = platform.python_version(), str(torch.__version__)
    for package in ("transformers", "torchinfo"):
        try:
            made[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            made[package] = "missing"
    if device == "cuda" and torch.cuda.is_available():
        made["measured on"] = torch.cuda.get_device_name()
    else:
        made["run on"] = cpu_name()
    made["batch"] = arguments.batch
    return made


def cpu_name() -> str:
    """The processor, as Linux names it."""
    info = Path("/proc/cpuinfo")
    names = info.read_text().splitlines() if info.exists() else []
    found = [line.partition(":")[2].strip() for line in names if line.startswith("model name")]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{found[0] if found else platform.processor()} ({capability}), 1 thread"


def merge(predictions: dict[str, Any], measurements: dict[str, Any]) -> list[Row]:
    """Rows that both files have, the measured file's own entries last."""
    measured = {(r["name"], r["optimizer"], r["batch"]): r for r in measurements["rows"]}
    rows = []
    for row in predictions["rows"]:
        other = measured.get((row["name"], row["optimizer"], row["batch"]))
        if other is not None:
            failures = {**row["failures"], **other["failures"]}
            rows.append({**row, **other, "failures": failures})
    return rows


def report(rows: list[Row], made: list[dict[str, str]]) -> None:
    """Print the table, why numbers are missing, and each method's errors."""
    for entries in made:
        print(*(f"{key}: {value}" for key, value in entries.items()), sep="\n", end="\n\n")
    with_allocator = any("allocator" in row for row in rows)
    extra = ["allocator"] * with_allocator
    print("Peak bytes of a training step in MB (10^6 bytes); errors against `measured`.\n")
    header = f"{'architecture':<24}{'optimizer':<10}{'batch':>7}{'predicted':>11}{'measured':>11}"
    header += f"{'error':>9}" + "".join(f"{name:>11}" for name in extra)
    print(header + f"{'MemTracker':>12}{'error':>9}{'torchinfo':>12}{'error':>9}")
    for row in rows:
        line = f"{row['name']:<24}{row['optimizer']:<10}{row['batch']:>7}"
        line += f"{megabytes(row, 'predicted'):>11}{megabytes(row, 'measured'):>11}"
        line += f"{percent(error_of(row, 'predicted')):>9}"
        line += "".join(f"{megabytes(row, name):>11}" for name in extra)
        for method in ("mem_tracker", "torchinfo"):
            line += f"{megabytes(row, method):>12}{percent(error_of(row, method)):>9}"
        print(line)
    failures = [
        f"{row['name']} {row['optimizer']} {method}: {reason}"
        for row in rows
        for method, reason in row["failures"].items()
    ]
    if failures:
        print("\nMissing:", *failures, sep="\n  ")
    if with_allocator:
        print("\nallocator: the peak of the CPU allocator's own events in a plain step, which adds")
        print(
            "the scratch memory inside kernels (oneDNN's layouts for convolutions) to `measured`."
        )
    print()
    for method, name in METHODS.items():
        print(summary(name, [e for row in rows if (e := error_of(row, method)) is not None]))
    if with_allocator:
        against = [
            row["predicted"] / row["allocator"] - 1
            for row in rows
            if "allocator" in row and "predicted" in row
        ]
        print(summary("shoestring, against the allocator", against))


def error_of(row: Row, method: str) -> float | None:
    """Relative error, positive where too much was predicted."""
    if method not in row or "measured" not in row:
        return None
    return row[method] / row["measured"] - 1


def megabytes(row: Row, key: str) -> str:
    """Bytes as the table shows them."""
    return f"{row[key] / 1e6:.2f}" if key in row else "-"


def percent(error: float | None) -> str:
    """An error as the table shows it."""
    return "-" if error is None else f"{100 * error:+.2f}%"


def summary(name: str, errors: list[float]) -> str:
    """Median, 95th percentile and worst underestimate of one method."""
    if not errors:
        return f"{name}: no rows"
    sizes = sorted(abs(error) for error in errors)
    high = sizes[min(len(sizes) - 1, -(-95 * len(sizes) // 100) - 1)]
    return (
        f"{name}: n = {len(errors)}, median |error| {100 * statistics.median(sizes):.2f}%, "
        f"95th percentile {100 * high:.2f}%, worst underestimate {percent(min(0.0, *errors))}"
    )


if __name__ == "__main__":
    main()
