"""What is there beside the passes: parameters, gradients, state, and the peak of the update."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from ..memory.device import device_timeline
from ..planning.stages import Work
from ..techniques.precision.blocks import block_elements
from ..trace.blocks import is_normalization
from ..trace.graph import Role, Trace

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
    input_bytes: int
    peak_bytes: int
    """Of the update, all of the above included."""
    work: Work


def traced_update(trace: Trace) -> Update:
    """From the trace of an update alone."""
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
    return Update(
        held[Role.MODEL] + held[Role.BUFFER],
        held[Role.GRADIENT],
        held[Role.OPTIMIZER_STATE],
        held[Role.INPUT],
        int(device_timeline(trace).totals.max(initial=0)),
        Work(flops, sum(moved), len(trace.ops)),
    )


def halved(wide: Update, model: nn.Module) -> Update:
    """The same in 16 bits, by rule: there are too many blocks to trace them all.

    BatchNorm and buffers stay as they are.
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
        peak_bytes=model_bytes + gradients + state + wide.input_bytes + copies,
    )
