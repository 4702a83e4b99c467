"""A loop with Hugging Face's accelerate under a budget or a plan.

from shoestring.integrations.accelerate import prepare_passes

passes = prepare_passes(accelerator, model, optimizer, batch, loss=loss, budget="24 GB")
for batch in loader:
    with accelerator.accumulate(model):
        value = passes(batch)  # in place of the forward pass and accelerator.backward
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import InputError
from ..planning.fit import gradient_bytes
from ..step.step import Step
from ..techniques.base import Technique
from ..techniques.plan import Plan
from ..trace.tracing import Loss
from .hosted import Wanted, hosted_step, library, route_updates, synchronized

with library("accelerate", "1.0", "hf"):
    import accelerate


class Passes:
    """Forward and backward passes of a batch; its gradients wait for `optimizer.step()`."""

    def __init__(self, step: Step) -> None:
        self.step = step
        """The step behind it: its plan, what it measured."""

    def __call__(self, batch: Any) -> torch.Tensor:
        """The loss of the batch, detached."""
        return self.step(batch, update=False)


def prepare_passes(
    accelerator: accelerate.Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    *,
    loss: Loss,
    budget: str | int | None = None,
    plan: Plan | Iterable[Technique] | str | None = None,
    allow: str | Iterable[str] | None = "lossless",
) -> Passes:
    """Make the passes of a plan, for a model and an optimizer that accelerate prepared.

    Args:
        accelerator: Clipping, accumulation and mixed precision stay its own.
        model: As `accelerator.prepare` returned it; changed in place.
        optimizer: As `accelerator.prepare` returned it.
        batch: What one step is given, on the accelerator's device.
        loss: `(model, batch) -> scalar`.
        budget: What the GPU may take, such as "24 GB".
        plan: In place of a budget: what `ss.plan` found, techniques, or the file of a plan.
        allow: As for `ss.plan`; "lossless" unless said otherwise.
    """
    kind = str(accelerator.distributed_type.value)
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise InputError(
            f"a plan cannot keep accelerate's {kind}",
            hint="one process, or several with DDP",
        )
    wanted = Wanted.of(budget, plan, allow)
    bare = accelerator.unwrap_model(model)
    ranked = model if isinstance(model, DistributedDataParallel) else None
    scaled = ranked is not None or getattr(accelerator, "scaler", None) is not None
    step = hosted_step(
        wanted, bare, batch, optimizer=optimizer, backward=accelerator.backward,
        loss=lambda given, part: loss(model if given is bare else given, part),
        held_bytes=0 if ranked is None else gradient_bytes(bare), same_state=scaled,
        waiting=accelerator.gradient_accumulation_steps > 1,
    )  # fmt: skip
    if step.loss_scale is not None:
        raise InputError(
            f"accelerate cannot clip gradients that {step.plan.short()} scales",
            hint='bf16, or allow="lossless"',
        )
    if ranked is not None:
        step._setup.split = synchronized(ranked, step._setup.split)
    route_updates(step.optimizer, lambda: step)
    return Passes(step)
