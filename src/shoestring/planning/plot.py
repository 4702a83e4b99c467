"""The front as a table, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import InputError, needs_extra
from ..memory.prediction import Prediction
from ..units import format_seconds, format_size
from .result import FrontPoint


def front_table(points: Sequence[FrontPoint], plain: Prediction) -> str:
    """Memory, time and plan, from the least memory on."""
    lines = [f"{'peak':>10}  {'step':>9}  {'of plain':>15}  {'':13}  plan"]
    assert plain.seconds is not None
    for point in points:
        share = f"{point.peak_bytes / plain.peak_bytes:.2f}x / {point.seconds / plain.seconds:.2f}x"
        lines.append(
            f"{format_size(point.peak_bytes):>10}  {format_seconds(point.seconds):>9}  "
            f"{share:>15}  {point.kind:13}  {point.plan.short()}"
        )
    return "\n".join(lines)


def plot_front(points: Sequence[FrontPoint], plain: Prediction, title: str, file: str) -> None:
    """Write the picture; the ending of the name says which format."""
    with needs_extra("lab", "matplotlib", "a plot of the front"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    assert plain.seconds is not None
    for kind in dict.fromkeys(p.kind for p in points):
        some = [p for p in points if p.kind == kind]
        memory, seconds = [p.peak_bytes / 1e6 for p in some], [p.seconds for p in some]
        axes.step(memory, seconds, where="post", marker="o", markersize=4, label=kind)
    axes.plot(plain.peak_bytes / 1e6, plain.seconds, "k*", markersize=10, label="plain")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(f"predicted peak in MB ({plain.accounting} accounting)")
    axes.set_ylabel("predicted seconds a step")
    axes.set_title(title)
    axes.legend()
    try:
        figure.savefig(Path(file))
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot write the plot {file}: {error}", hint="such as front.png"
        ) from None
