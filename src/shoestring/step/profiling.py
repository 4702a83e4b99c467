"""`profile`: model + batch + loss → where every byte of a training step goes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..errors import InputError
from ..memory.model import ACCOUNTINGS, MemoryProfile, memory_profile
from ..techniques import Checkpointing, Precision, Sparsity, Technique
from ..techniques.plan import Plan
from ..trace.capture import Loss, capture
from ..trace.fakes import OptimizerLike


def profile(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    optimizer: OptimizerLike = None,
    accounting: str = "fundamental",
    device: str = "cpu",
    techniques: Iterable[Technique] = (),
) -> MemoryProfile:
    """Predict the memory of one training step of `loss(model, batch)`; nothing is allocated.

    `fundamental` is the report's accounting, with or without techniques. `device` is what
    PyTorch's allocator shows for the plain step on `device` ("cpu" or "cuda", neither needed).
    """
    chosen = Plan.of(techniques).techniques
    check(accounting, device, chosen)
    for technique in chosen:
        batch = technique.prepare(batch)
    trace = capture(model, batch, loss=loss, optimizer=optimizer, device=device)
    for technique in chosen:
        trace = technique.predict(trace)
    return memory_profile(trace, accounting)


def check(accounting: str, device: str, techniques: Iterable[Technique]) -> None:
    """Refuse what an accounting cannot tell, before anything is built.

    That of a device is of the plain step, where only the microbatch may differ; the fundamental
    one is of no device, and kernels of CUDA, as attention has, would change it.
    """
    if accounting not in ACCOUNTINGS:
        raise InputError(
            f"unknown accounting {accounting!r}", hint="one of " + ", ".join(ACCOUNTINGS)
        )
    if accounting != "device":
        if device == "cuda":
            raise InputError(
                f"the {accounting} accounting is the report's, of no device",
                hint="accounting 'device' predicts what CUDA's allocator shows",
            )
        return
    for technique in techniques:
        neutral = technique in (Checkpointing("none"), Precision("fp32"), Sparsity(1.0))
        if isinstance(technique, (Checkpointing, Precision, Sparsity)) and not neutral:
            raise InputError(
                f"the device accounting is of the plain step, without {technique}",
                hint="use accounting 'fundamental' to see what a technique changes",
            )
