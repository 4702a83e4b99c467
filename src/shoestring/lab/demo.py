"""`python -m shoestring.lab.demo`: a small WRN learns digits twice, plainly and in little memory.

A table on stdout, and table and plot in runs/demo/.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

from ..errors import needs_extra
from ..techniques import Checkpointing, Microbatching, Precision, Sparsity
from ..techniques.plan import Plan
from ..units import format_size
from .records.run import Event, read
from .runs.display import duration
from .runs.loop import train
from .runs.settings import settings_for
from .tasks import load_images

MODEL = "wrn-10-0.5"
EPOCHS = 10
PLANS = {
    "plain": Plan(),
    "planned": Plan.of(
        [
            Sparsity(0.5, schedule=((100, 10),)),
            # BF16, not FP16: CPUs multiply it fast.
            Precision("bf16"),
            Checkpointing("residual-1*"),
            Microbatching(5),
        ]
    ),
}


def demo(folder: Path, epochs: int = EPOCHS) -> str:
    """Train by each plan, write the report and return its table.

    On one thread: kernels this small gain nothing from more, and wait for each other on a machine
    that is busy.
    """
    torch.set_num_threads(1)
    task = load_images("digits")
    ends: dict[str, Event] = {}
    for name, plan in PLANS.items():
        print(f"{name}: {MODEL} on digits, {plan}", file=sys.stderr)
        shutil.rmtree(folder / name, ignore_errors=True)
        settings = settings_for(MODEL, "digits", images=len(task.images), plan=plan, epochs=epochs)
        ends[name] = train(settings, task, folder / name, device=torch.device("cpu"))
    shown = table(ends)
    curves = {name: [e for e in read(folder / name) if e["event"] == "evaluation"] for name in ends}
    plot(ends, curves, folder / "report.png")
    plans = "\n".join(f"- {name}: {plan}" for name, plan in PLANS.items())
    (folder / "report.md").write_text(
        f"# {MODEL} on digits, {epochs} epochs, twice\n\n{plans}\n\n{shown}\n\n"
        "![Accuracy by epoch, and peaks](report.png)\n",
        encoding="utf-8",
    )
    return shown


def table(ends: dict[str, Event]) -> str:
    """Accuracy, predicted and measured memory and time, side by side."""
    plain, planned = (ends[name] for name in PLANS)
    peaks = plain["measured_peak_bytes"], planned["measured_peak_bytes"]
    cut = peaks[0] / peaks[1]
    slower = planned["seconds"] / plain["seconds"]
    fundamental, step = (
        [end["predicted"][kind] for end in (plain, planned)]
        for kind in ("fundamental_peak_bytes", "step_peak_bytes")
    )
    rows = [
        ("", "plain", "planned", ""),
        ("accuracy", *(f"{e['accuracy']:.1f}%" for e in (plain, planned)), ""),
        ("predicted, fundamental", *map(format_size, fundamental), ""),
        ("predicted, this step", *map(format_size, step), ""),
        ("measured peak", *map(format_size, peaks), f"{cut:.1f}× less"),
        ("time", *(duration(e["seconds"]) for e in (plain, planned)), f"{slower:.1f}×"),
    ]
    wide = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(r, wide, strict=True)) + " |" for r in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in wide) + "|")
    return "\n".join(lines)


def plot(ends: dict[str, Event], curves: dict[str, list[Event]], path: Path) -> None:
    """Accuracy by epoch, and predicted beside measured peaks."""
    with needs_extra("lab", "matplotlib", "the demo"):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for name, events in curves.items():
        left.plot([e["epoch"] for e in events], [e["accuracy"] for e in events], label=name)
    left.set(xlabel="epoch", ylabel="test accuracy, %", ylim=(0, 100))
    left.legend()
    names = list(ends)
    for offset, (label, sizes) in enumerate(
        {
            "predicted": [ends[n]["predicted"]["step_peak_bytes"] for n in names],
            "measured": [ends[n]["measured_peak_bytes"] for n in names],
        }.items()
    ):
        places = [i + 0.4 * offset for i in range(len(names))]
        bars = right.bar(places, [s / 1e6 for s in sizes], 0.38, label=label)
        right.bar_label(bars, fmt="%.1f")
    right.set(ylabel="peak of a step, MB", yscale="log")
    right.set_xticks([i + 0.2 for i in range(len(names))], names)
    right.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    print(demo(Path("runs/demo")))
