"""`profile`: model + batch + loss → where every byte of a training step goes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..devices import Device
from ..errors import InputError
from ..memory.model import ACCOUNTINGS, Accounting, MemoryProfile, memory_profile
from ..techniques.base import Technique
from ..techniques.plan import Plan
from ..trace.failures import check_trainable
from ..trace.fakes import OptimizerLike
from ..trace.split import examples_of
from ..trace.tracing import Loss, trace_model
from .trace_step import trace_plan


def profile(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    optimizer: OptimizerLike = None,
    accounting: Accounting = "fundamental",
    device: Device | None = None,
    techniques: Plan | Iterable[Technique] = (),
) -> MemoryProfile:
    """Predict the memory of one training step of `loss(model, batch)`; nothing is allocated.

    Args:
        model: Not changed; on any device, or on fake tensors.
        batch: One batch, as your training loop has it.
        loss: `(model, batch) -> scalar`.
        optimizer: Yours, a name such as "adamw", or None for a step without update.
        accounting: "fundamental" is the report's, of an ideal executor. "device" is what PyTorch's
            allocator will show.
        device: For "device": "cpu" or "cuda"; by default where the model is. You need not have it.
        techniques: A plan or a list of techniques for the step.

    Returns:
        The peak, the live bytes at the peak by role and by module, and the timeline.

    Examples:
        >>> print(ss.profile(model, batch, loss=loss, optimizer="sgd"))
        model 5.8 MB · optimizer 11.7 MB · activations 387.3 MB · peak 404.8 MB
    """
    plan = Plan.of(techniques)
    check(accounting, device)
    if accounting == "device":
        check_trainable(model)
        where = next(model.parameters()).device.type if device is None else device
        if all(technique.is_neutral_for(_examples(batch)) for technique in plan.techniques):
            return memory_profile(
                trace_model(model, batch, loss=loss, optimizer=optimizer, device=where), accounting
            )
        trace = trace_plan(plan, model, batch, loss=loss, optimizer=optimizer, device=where)
        return memory_profile(trace, accounting)
    for technique in plan.techniques:
        batch = technique.prepare(batch)
    trace = trace_model(model, batch, loss=loss, optimizer=optimizer, device="cpu")
    for technique in plan.techniques:
        trace = technique.predict(trace)
    return memory_profile(trace, accounting)


def _examples(batch: Any) -> int | None:
    try:
        return examples_of(batch)
    except InputError:  # its tensors share no first dimension
        return None


def check(accounting: str, device: str | None) -> None:
    """Refuse what an accounting cannot tell, before anything is built.

    The fundamental one is of no device: kernels of CUDA, as attention has, would change it.
    """
    if accounting not in ACCOUNTINGS:
        raise InputError(
            f"unknown accounting {accounting!r}", hint="one of " + ", ".join(ACCOUNTINGS)
        )
    if device not in (None, "cpu", "cuda"):
        raise InputError(f"unknown device {device!r}", hint="cpu or cuda")
    if accounting == "fundamental" and device == "cuda":
        raise InputError(
            "the fundamental accounting is the report's, of no device",
            hint="accounting 'device' predicts what CUDA's allocator shows",
        )
