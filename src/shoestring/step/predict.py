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
from ..trace.capture import Loss
from ..trace.passes import peak_only
from .trace_step import capture_step


def predict_step(
    plan: Plan | Iterable[Technique],
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    device: str = "cpu",
) -> Prediction:
    """What `apply(plan, …).measure(batch)` will find; nothing is allocated or changed.

    For "cuda" it is what PyTorch's allocator will show, kernels and workspaces of CUDA included,
    wherever the model lies and whether there is a GPU or not.
    """
    chosen = Plan.of(plan)
    with peak_only():
        trace = capture_step(chosen, model, batch, loss=loss, optimizer=optimizer, device=device)
    peak_bytes = int(device_timeline(trace).totals.max(initial=0))
    return Prediction(peak_bytes, "device", device)
