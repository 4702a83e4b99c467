"""Resident bytes: parameters, gradients, optimizer state; and the peak of the update."""

from __future__ import annotations

from collections.abc import Mapping

from ..memory.device import device_timeline
from ..memory.work import Work
from ..techniques.offers import Update
from ..trace.graph import Role, Trace


def traced_update(trace: Trace, shown: float = 1.0, *, together: bool = False) -> Update:
    """From the trace of an update alone, of tensors that hold the share `shown` of the gradients.

    State and gradients are in proportion. What is needed for a moment is, too, if the optimizer
    takes all tensors `together`; else the largest tensor decides, which must be among those shown.
    """
    held = dict.fromkeys(Role, 0)
    for storage in trace.storages:
        if storage.birth < 0 < storage.death:
            held[storage.role] += storage.nbytes
    moved = [
        spec.numel * spec.dtype.itemsize
        for op in trace.ops
        for spec in (*(s for _, s in op.inputs), *op.outputs)
    ]
    flops = sum(op.flops for op in trace.ops)
    passing = int(device_timeline(trace).totals.max(initial=0)) - sum(held.values())
    gradients, state = (int(held[role] / shown) for role in (Role.GRADIENT, Role.OPTIMIZER_STATE))
    return Update(
        held[Role.MODEL] + held[Role.BUFFER],
        gradients,
        state,
        max(int(passing / shown if together else passing), 0),
        Work(flops / shown, sum(moved) / shown, len(trace.ops)),
    )


MOST_TENSORS = 64
"""Whose update is traced, the largest; the others are in proportion."""


def largest(trained: Mapping[str, int]) -> tuple[list[str], float]:
    """Names of the largest tensors, and their share of all bytes."""
    names = sorted(trained, key=lambda name: -trained[name])[:MOST_TENSORS]
    total = sum(trained.values())
    return names, sum(trained[name] for name in names) / total if total else 1.0
