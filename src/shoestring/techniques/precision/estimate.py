"""Bytes of an update in 16 bits, by rule: large models have too many blocks to trace."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ...trace.blocks import is_normalization
from ..base import Technique
from ..offers import Update, Updates
from ..optimizers import ELEMENTWISE
from .blocks import block_elements
from .update import kernels_know

_BLOCK_BYTES, _STATE_BYTES = 20, 4
"""FP32 copies for each element of a block while an update in 16 bits runs, and for each of its
state; traced on SGD, Adam and RMSprop it is at most this."""
_TRACED_BYTES = 2**23
"""Gradients up to which an update in blocks is traced: there the rule for them is too coarse."""


def estimate_update(technique: Technique, updates: Updates) -> Update | None:
    """Half of the wide one; None where it must be traced."""
    context = updates.context
    if type(context.optimizer) not in ELEMENTWISE:
        return None
    copied = context.device != "cuda" or not kernels_know(context.optimizer)
    if copied and sum(updates.trained.values()) <= _TRACED_BYTES:
        return None
    return halved(updates.without(technique), context.model, copied=copied)


def halved(wide: Update, model: nn.Module, *, copied: bool = True) -> Update:
    """The same in 16 bits: BatchNorm and buffers stay as they are.

    Only for optimizers whose tensors are cut into blocks; `copied` says whether each block is, to
    FP32.
    """
    normal = {id(p) for m in model.modules() if is_normalization(m) for p in m.parameters()}
    every = [p for p in model.parameters() if p.is_floating_point()]
    narrow = sum(p.nbytes for p in every if id(p) not in normal and p.itemsize > 2)
    share = narrow / max(sum(p.nbytes for p in every), 1)
    sparse = min(wide.gradient_bytes / max(sum(p.nbytes for p in every), 1), 1.0)
    states = wide.state_bytes / max(wide.gradient_bytes, 1)
    elements = block_elements(sum(p.numel() for p in every))
    copies = int((_BLOCK_BYTES + _STATE_BYTES * states) * elements)
    return replace(
        wide,
        model_bytes=wide.model_bytes - int(narrow * sparse / 2),
        gradient_bytes=int(wide.gradient_bytes * (1 - share / 2)),
        state_bytes=int(wide.state_bytes * (1 - share / 2)),
        passing_bytes=copies if copied else 0,
    )
