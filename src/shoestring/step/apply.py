"""`apply`: plan + model + optimizer + loss → Step, in one process or on several ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn

from ..techniques.base import Technique
from ..techniques.plan import Plan
from ..trace.tracing import Loss
from .clipping import Clip
from .distributed import apply_on_ranks, parallel_of
from .shares import Parallel
from .step import Step, apply_alone


def apply(
    plan: Plan | Iterable[Technique],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss: Loss,
    parallel: Literal["ddp", "fsdp"] | Parallel | None = None,
    clip: float | Clip | None = None,
) -> Step:
    """Transform the model and optimizer in place and return the step that trains them.

    Everything is checked before anything is changed; if a technique still fails, those before it
    are undone and the model and optimizer are as they were.

    Args:
        plan: The result of `plan`, a `Plan`, or a list of techniques.
        model: Changed in place.
        optimizer: Over the model's parameters; changed in place.
        loss: `(model, batch) -> scalar`.
        parallel: "ddp" or "fsdp": all ranks of the process group share the step.
        clip: A norm that gradients are clipped to before the update, or a `Clip`;
            `step.grad_norm` is the norm before.

    Returns:
        A `Step`; `step(batch)` is forward, backward and update, `step(batch, update=False)` leaves
        the gradients for the next one.

    Examples:
        >>> step = ss.apply([ss.Microbatching(8)], model, optimizer, loss=loss)
        >>> for batch in loader: step(batch)
    """
    chosen = parallel_of(parallel)
    if chosen is None:
        return apply_alone(plan, model, optimizer, loss=loss, clip=clip)
    return apply_on_ranks(plan, model, optimizer, loss=loss, parallel=chosen, clip=clip)
