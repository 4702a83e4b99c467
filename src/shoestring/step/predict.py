"""The peak a planned step will have, from the same step run on fake tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..memory.device import device_timeline
from ..memory.prediction import Prediction
from ..techniques.base import Technique
from ..techniques.plan import Plan
from ..trace.fakes import OptimizerLike
from ..trace.passes import peak_only
from ..trace.tracing import Loss, trace_model
from .trace_step import trace_plan


def predict_step(
    plan: Plan | Iterable[Technique],
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    device: str = "cpu",
) -> Prediction:
    """Predict what `apply(plan, …).measure(batch)` will measure; allocate and change nothing.

    For "cuda" it is what PyTorch's allocator will show, kernels and workspaces of CUDA included,
    wherever the model lies and whether there is a GPU or not.
    """
    chosen = Plan.of(plan)
    with peak_only():
        trace = trace_plan(chosen, model, batch, loss=loss, optimizer=optimizer, device=device)
    peak_bytes = int(device_timeline(trace).totals.max(initial=0))
    return Prediction(peak_bytes, "device", device)


def evaluation_bytes(
    model: nn.Module, batch: Any, *, loss: Loss, optimizer: OptimizerLike, device: str = "cpu"
) -> int:
    """Peak of an evaluation between two steps: forward without gradients, the state beside it.

    It leaves out what a trainer collects over many batches, such as scores for its metrics.
    """

    def evaluated(given: nn.Module, batch: Any) -> torch.Tensor:
        modes = [(module, module.training) for module in given.modules()]
        try:
            with torch.no_grad():
                value = loss(given.eval(), batch)
        finally:
            for module, training in modes:
                module.training = training
        # All parameters have state, which needs gradients; of the trace only the forward counts.
        for parameter in given.parameters():
            if parameter.requires_grad:
                value = value + 0 * parameter.sum()
        return value

    trace = trace_model(model, batch, loss=evaluated, optimizer=optimizer, device=device)
    timeline = device_timeline(trace)
    kept = [str(label[1]).lower().startswith("forw") for label in timeline.labels]
    return int(timeline.totals[kept].max(initial=0))
