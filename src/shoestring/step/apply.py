"""`apply`: plan + model + optimizer + loss → Step, in one process or on several ranks."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable

import torch
from torch import nn

from ..techniques.base import Technique
from ..techniques.plan import Plan
from ..trace.failures import check_module, check_values
from ..trace.tracing import Loss
from .clipping import Clip
from .distributed import apply_on_ranks, parallel_of
from .shares import Parallel, ShardingName
from .step import Step, apply_alone


def apply(
    plan: Plan | Iterable[Technique],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss: Loss,
    parallel: ShardingName | Parallel | None = None,
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
    check_module(model)
    check_values(model)
    if chosen is None:
        step = apply_alone(plan, model, optimizer, loss=loss, clip=clip)
    else:
        step = apply_on_ranks(plan, model, optimizer, loss=loss, parallel=chosen, clip=clip)
    _tell_of_others(step)
    return step


def _tell_of_others(step: Step) -> None:
    """Of another optimizer over the model: a step drops the gradients that it would read."""
    held = {id(p) for group in step.optimizer.param_groups for p in group["params"]}
    left = {id(p): n for n, p in step.model.named_parameters() if id(p) not in held}
    if not left:
        return
    names = [
        left[id(p)]
        for other in gc.get_objects()
        if issubclass(type(other), torch.optim.Optimizer)
        for group in getattr(other, "param_groups", ())
        for p in group["params"]
        if id(p) in left and p.requires_grad
    ]
    if names:
        warnings.warn(
            f"another optimizer holds {names[0]}{' and others' * (len(names) > 1)}: a step drops "
            "their gradients, so that optimizer would move nothing. Give all parameters to one "
            "optimizer, or call step(batch, update=False) and update by both yourself",
            RuntimeWarning,
            stacklevel=3,
        )
