"""The peak a planned step will have, from the same step run on fake tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..memory.device import device_timeline
from ..memory.live.measure import Measurement
from ..techniques.base import Technique
from ..techniques.plan import Plan
from ..trace.answers import Answers, with_answers
from ..trace.capture import Loss, named_failures
from ..trace.draws import at_worst
from ..trace.fakes import fake_batch, fake_model, make_optimizer
from ..trace.outside import Outside
from ..trace.passes import memory_alone
from ..trace.untouched import nothing_changes
from .apply import apply
from .trace_step import capture_step


def predict_step(
    plan: Plan | Iterable[Technique],
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    device: str = "cpu",
) -> Measurement:
    """What `apply(plan, …).measure(batch)` will find; nothing is allocated or changed.

    For "cuda" it is what PyTorch's allocator will show, kernels and workspaces of CUDA included,
    wherever the model lies and whether there is a GPU or not.
    """
    chosen = Plan.of(plan.techniques if isinstance(plan, Plan) else plan)  # without a budget
    if device == "cuda":
        with memory_alone():
            trace = capture_step(
                chosen, model, batch, loss=loss, optimizer=optimizer, device=device
            )
        return Measurement(device, int(device_timeline(trace).totals.max(initial=0)), {})

    def measured(answers: Answers | None) -> Measurement:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with warnings.catch_warnings(), nothing_changes(model, loss):
            warnings.simplefilter("ignore")
            twin, mapping = fake_model(model, mode)
            asked = nullcontext() if answers is None else answers.following(twin)
            data = fake_batch(batch, mode)
            twin_optimizer = make_optimizer(optimizer, twin, mapping)
            assert twin_optimizer is not None
            outside = Outside(mode, answers=answers)
            with named_failures(), asked, mode, outside, memory_alone():
                step = apply(chosen, twin, twin_optimizer, loss=loss)
                step.measure(data)  # makes the state; not step(data), which cannot read step counts
                return step.measure(data)

    micro = chosen.microbatching
    cuts = micro is not None and not micro.simulated
    size = micro.examples_at_once(batch) if micro is not None and cuts else None
    return at_worst(
        model, lambda: with_answers(measured, model, batch, loss, size), lambda m: m.peak_bytes
    )
