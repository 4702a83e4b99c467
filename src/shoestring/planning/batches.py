"""One plan for all batches of a data set: lengths vary, and the last batch is smaller.

A batch needs no more than another one whose tensors are as large in every dimension. So of all that
are seen only those count that no other one covers; the plan is made for the one with most elements,
and its own step is predicted on each of the others. Where one of them needs more than the budget,
the plan is made for that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import BudgetError
from ..trace.batches import tensors_of
from ..units import format_size, plural
from .result import BudgetPlan

Sizes = tuple[tuple[int, ...], ...]
MOST = 16
"""Batches that no other covers, predicted one by one; of more, those with most elements."""


def sizes_of(batch: Any) -> Sizes:
    """Of all its tensors."""
    return tuple(tuple(tensor.shape) for tensor in tensors_of(batch))


def elements(sizes: Sizes) -> int:
    """In all tensors together."""
    total = 0
    for shape in sizes:
        count = 1
        for extent in shape:
            count *= extent
        total += count
    return total


def covers(one: Sizes, other: Sizes) -> bool:
    """Whether every tensor of one is as large as the other's in every dimension."""
    if list(map(len, one)) != list(map(len, other)):
        return False
    pairs = zip(one, other, strict=True)
    return all(a >= b for shape, less in pairs for a, b in zip(shape, less, strict=True))


def largest(batches: Iterable[Any]) -> list[Any]:
    """The batches that no other one covers, those with most elements first."""
    kept: dict[Sizes, Any] = {}
    for batch in batches:
        sizes = sizes_of(batch)
        if any(covers(other, sizes) for other in kept):
            continue
        kept = {other: held for other, held in kept.items() if not covers(sizes, other)}
        kept[sizes] = batch
    order = sorted(kept, key=elements, reverse=True)
    return [kept[sizes] for sizes in order[:MOST]]


def plan_for_all(
    batches: Sequence[Any],
    plan_for: Callable[[Any], BudgetPlan],
    needed: Callable[[BudgetPlan, Any], int],
    limit_bytes: int,
    usual: int = 0,
) -> BudgetPlan:
    """The plan for one of them that holds for all; BudgetError with those that do not fit.

    `usual`: elements of a batch in the middle of the data set, beside which an error names the one
    that is too large.
    """
    tried: set[int] = set()
    at = 0
    while True:
        tried.add(at)
        try:
            found = plan_for(batches[at])
        except BudgetError as error:
            raise _named(error, batches[at], usual) from None
        needs = {i: needed(found, batch) for i, batch in enumerate(batches) if i != at}
        over = {i: nbytes for i, nbytes in needs.items() if nbytes > limit_bytes}
        if not over:
            return found
        worst = max(over, key=over.__getitem__)
        if worst in tried:
            shapes = ", ".join(str(sizes_of(batches[i])[0]) for i in sorted(over))
            count = plural(len(over), "kind of batch", "kinds of batches")
            raise BudgetError(
                f"no plan fits {format_size(limit_bytes)} for all batches: {count} need more, "
                f"up to {format_size(over[worst])} ({shapes})",
                hint="cut or leave out those, or plan for a larger budget",
            )
        at = worst


def usual_elements(batches: Sequence[Any]) -> int:
    """Of the batch in the middle, by size."""
    return sorted(elements(sizes_of(batch)) for batch in batches)[len(batches) // 2]


def _named(error: BudgetError, batch: Any, usual: int) -> BudgetError:
    """The same of one batch of several: which it is, and that it may be the only one."""
    sizes = sizes_of(batch)
    times = elements(sizes) / max(usual, 1)
    larger = f", {times:,.0f} times as large as most" if times >= 2 else ""
    return BudgetError(
        f"{error.message}; that is for the batch of {', '.join(map(str, sizes))}{larger}",
        hint=f"cut or leave out batches of this size; or {error.hint}",
        smallest_bytes=error.smallest_bytes,
    )
