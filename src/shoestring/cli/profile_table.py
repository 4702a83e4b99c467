"""A profile on the terminal."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..units import format_count, format_flops, format_size


def show_profile(settings: dict[str, Any], plan: str, result: Any) -> None:
    """A table by category, the largest modules, and the instant of the peak."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    what = [f"{settings['batch']} {settings['batch_unit']}", str(settings["optimizer"])]
    if plan != "plain":
        what.append(plan)
    console.print(
        f"[bold]{settings['model']}[/bold] · {escape(' · '.join(what))}\n"
        f"{format_count(result.parameters)} parameters, "
        f"{format_count(result.sparsifiable_parameters)} of them sparsifiable · "
        f"{result.accounting} accounting"
        + (f" for {result.device}" if result.accounting == "device" else "")
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column, justify in (("at the peak", "left"), ("bytes", "right"), ("share", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for role, size in result.bytes_by_role.items():
        if size:
            share = f"{100 * size / result.peak_bytes:.1f}%"
            table.add_row(role.value.replace("_", " "), format_size(size), share)
    table.add_row("[bold]peak[/bold]", f"[bold]{format_size(result.peak_bytes)}[/bold]", "")
    console.print(table)
    where = f" of {result.peak_module}" if result.peak_module else ""
    console.print(
        f"peak at {result.peak_operation.rpartition('.')[2]}{where}, {result.peak_phase} "
        f"(instant {result.timeline.peak_instant + 1} of {len(result.timeline.labels)})"
    )
    largest = [(m, b) for m, b in result.bytes_by_module.items() if m and b > 0][:5]
    if largest:
        console.print("largest modules: " + ", ".join(f"{m} {format_size(b)}" for m, b in largest))
    total = result.forward_flops + result.backward_flops
    again = f", recomputed {format_flops(result.recompute_flops)}" if result.recompute_flops else ""
    share = f" (+{100 * result.recompute_flops / total:.1f}%)" if again else ""
    console.print(
        f"forward {format_flops(result.forward_flops)}, "
        f"backward {format_flops(result.backward_flops)}{again}{share}"
    )
