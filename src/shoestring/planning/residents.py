"""What is there beside the passes: parameters, gradients, state, and the peak of the update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from torch import nn

from ..memory.device import device_timeline
from ..techniques.precision.blocks import block_elements
from ..trace.blocks import is_normalization
from ..trace.graph import Role, Trace
from .stages import Work

_BLOCK_BYTES, _STATE_BYTES = 20, 4
"""FP32 copies for each element of a block while an update in 16 bits runs, and for each of its
state; traced on SGD, Adam and RMSprop it is at most this."""


@dataclass(frozen=True)
class Update:
    """Bytes of one precision and density; none of it depends on the schedule."""

    model_bytes: int
    """Parameters and buffers."""
    gradient_bytes: int
    state_bytes: int
    passing_bytes: int
    """What the update needs for a moment beside all of the above."""
    work: Work


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


def between(low: Update, high: Update, share: float) -> Update:
    """On the line from one to the other."""
    sizes = {
        f.name: round(getattr(low, f.name) * (1 - share) + getattr(high, f.name) * share)
        for f in fields(Update)
        if f.name != "work"
    }
    return Update(**sizes, work=high.work)


MOST_TENSORS = 64
"""Whose update is traced, the largest; the others are in proportion."""


def largest(trained: Mapping[str, int]) -> tuple[list[str], float]:
    """Names of the largest tensors, and their share of all bytes."""
    names = sorted(trained, key=lambda name: -trained[name])[:MOST_TENSORS]
    total = sum(trained.values())
    return names, sum(trained[name] for name in names) / total if total else 1.0


def halved(wide: Update, model: nn.Module, *, copied: bool = True) -> Update:
    """The same in 16 bits, by rule: there are too many blocks to trace them all.

    BatchNorm and buffers stay as they are. Only for optimizers whose tensors are cut into blocks;
    `copied` says whether each block is, to FP32.
    """
    normal = {id(p) for m in model.modules() if is_normalization(m) for p in m.parameters()}
    every = [p for p in model.parameters() if p.is_floating_point()]
    narrow = sum(p.nbytes for p in every if id(p) not in normal)
    share = narrow / max(sum(p.nbytes for p in every), 1)
    sparse = min(wide.gradient_bytes / max(sum(p.nbytes for p in every), 1), 1.0)
    model_bytes = wide.model_bytes - int(narrow * sparse / 2)
    gradients = int(wide.gradient_bytes * (1 - share / 2))
    state = int(wide.state_bytes * (1 - share / 2))
    states = wide.state_bytes / max(wide.gradient_bytes, 1)
    elements = block_elements(sum(p.numel() for p in every))
    copies = int((_BLOCK_BYTES + _STATE_BYTES * states) * elements)
    return replace(
        wide,
        model_bytes=model_bytes,
        gradient_bytes=gradients,
        state_bytes=state,
        passing_bytes=copies if copied else 0,
    )
