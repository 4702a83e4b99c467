"""Why a plan is as it is, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ..memory.items import leaves, read
from ..techniques.microbatching.split_test import SplitFound
from ..units import format_size
from .result import LOSSLESS, LOSSY, NEAR, Choice
from .search import Candidate, Estimates
from .settings import Setting


def choices(
    candidate: Candidate,
    estimates: Estimates,
    batch_norm: bool,
    milder: Sequence[Setting],
    limit_bytes: int,
    examples: int | None,
    split: SplitFound,
) -> tuple[Choice, ...]:
    """One for each technique of the plan, in the order they are applied."""
    setting, plan = candidate.setting, candidate.plan
    made = []
    needed = _needed(estimates, milder, setting.loss, limit_bytes)
    if setting.density is not None:
        made.append(
            Choice("sparsity", f"density {setting.density:g}", LOSSY, f"another model; {needed}")
        )
    if setting.precision is not None:
        why = f"16 bits round; {needed}"
        made.append(Choice("precision", setting.precision, NEAR, why))
    if plan.checkpointing is not None:
        text = ", ".join(plan.checkpointing.schedule) or plan.checkpointing.strategy
        shown = text if len(text) <= 40 else f"{text[:37]}..."
        made.append(Choice("checkpointing", shown, LOSSLESS, _again(plan.checkpointing.schedule)))
    if setting.microbatch is not None:
        rest = 0 if examples is None else examples % setting.microbatch
        shown = f"{setting.parts - bool(rest)} × {setting.microbatch}" + f" + {rest}" * bool(rest)
        if batch_norm:
            seen = f"{setting.microbatch} examples at a time"
            why = f"statistics, as BatchNorm has them, are of {seen}; {needed}"
            made.append(Choice("microbatching", shown, LOSSY, why))
        else:
            why = f"gradients are added part by part; {split.why}"
            made.append(Choice("microbatching", shown, LOSSLESS, why))
    return tuple(made)


def _needed(estimates: Estimates, milder: Sequence[Setting], loss: float, limit_bytes: int) -> str:
    """What milder plans need at least, where that is known to be too much."""
    lowest = min((estimates.least_bytes(s) for s in milder if s.loss < loss), default=0)
    if lowest <= limit_bytes:
        return "nothing milder was found to fit"
    return f"milder plans need {format_size(lowest)} or more"


def _again(schedule: tuple[str, ...]) -> str:
    if not schedule:
        return "made again in the backward pass"
    items = read(schedule)
    again = sum(leaves(item) for item in items if not isinstance(item, str))
    total = sum(map(leaves, items))
    counts = {
        "run again": again,
        "without cheap outputs": items.count("cheap"),
        "without cheap and wide ones": items.count("lean"),
    }
    parts = [f"{count} {how}" for how, count in counts.items() if count]
    if not parts:  # wrapped all the same
        return "nothing runs again; BatchNorm in kernels of its own keeps its input alone"
    return f"of {total} blocks {' and '.join(parts)}"
