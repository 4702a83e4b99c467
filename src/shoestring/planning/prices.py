"""The price of memory: plans for somewhat smaller and larger budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import BudgetError
from ..plain_values import PlainValues
from ..techniques.plan import Plan
from ..units import format_seconds, format_size

_STEPS = (-2, -1, 1, 2)


@dataclass(frozen=True)
class Price(PlainValues):
    """The plan of another budget.

    Examples:
        >>> for price in plan.prices: print(price.budget_bytes, price.seconds, price.plan)
    """

    budget_bytes: int
    """Of that plan."""
    plan: Plan | None
    """None where nothing fits."""
    needed_bytes: int
    """Bytes of the budget the plan needs; where nothing fits, the smallest that does."""
    seconds: float | None
    """Of a step."""
    kind: str
    """Lossless, near-lossless or lossy."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "budget_bytes": self.budget_bytes,
            "plan": None if self.plan is None else self.plan.to_dict(),
            "needed_bytes": self.needed_bytes,
            "step_seconds": self.seconds,
            "kind": self.kind,
        }


def step_bytes(budget_bytes: int) -> int:
    """A tenth of a budget, as 1, 2 or 5 of some unit: 2 GB of 20 GB."""
    tenth = max(budget_bytes / 10, 1)
    unit = 10 ** math.floor(math.log10(tenth))
    return int(max(step * unit for step in (1, 2, 5) if step * unit <= tenth))


def prices(chosen: Any, plan_for: Callable[[int], Any]) -> tuple[Price, ...]:
    """Of budgets one and two steps below and above that of a `BudgetPlan`."""
    each = step_bytes(chosen.budget_bytes)
    made: dict[int, Price] = {}
    known = _price(chosen.budget_bytes, chosen)
    for step in sorted(_STEPS, key=abs):
        budget = chosen.budget_bytes + step * each
        nearer = made.get(step - 1 if step > 0 else step + 1)
        if nearer is not None and step < 0 and nearer.plan is None:
            continue  # less than too little
        try:
            made[step] = _price(budget, plan_for(budget))
        except BudgetError as error:
            made[step] = Price(budget, None, error.smallest_bytes or 0, None, known.kind)
    return tuple(made[step] for step in sorted(made))


def _price(budget_bytes: int, plan: Any) -> Price:
    predicted = plan.predicted
    return Price(budget_bytes, plan.plan, predicted.needed_bytes, predicted.seconds, plan.kind)


def price_rows(chosen: Any) -> list[tuple[str, str, str, str]]:
    """Budget, step, how it compares, plan: one row for each price of a `BudgetPlan`."""
    rows = []
    now = chosen.predicted.seconds
    for price in chosen.prices:
        more = price.budget_bytes - chosen.budget_bytes
        budget = f"{format_size(price.budget_bytes)} ({'+' if more > 0 else '-'}{_size(more)})"
        if price.plan is None:
            found = f"nothing fits; the smallest is {format_size(price.needed_bytes)}"
            rows.append((budget, "", "", found))
        elif price.plan == chosen.plan:
            rows.append((budget, "", "", "the same plan"))
        else:
            shown = "" if price.seconds is None else format_seconds(price.seconds)
            share = "" if not now or price.seconds is None else f"{price.seconds / now - 1:+.0%}"
            kind = "" if price.kind == chosen.kind else f"{price.kind}: "
            rows.append((budget, shown, share, kind + (price.plan.short() or "plain")))
    return rows


def _size(nbytes: int) -> str:
    return format_size(abs(nbytes))


def price_lines(chosen: Any) -> Sequence[str]:
    """As a table of text."""
    rows = price_rows(chosen)
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    head = "with more or less memory:"
    return [
        head,
        *("  " + "  ".join([*(f"{c:>{w}}" for c, w in zip(row, widths, strict=False)), row[3]])
          for row in rows),
    ]  # fmt: skip
