"""An optimizer's arithmetic apart from its parameters."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

from ...torch_private.kernels import fused_sgd_


def reference_copy(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class and attributes, whose parameters and state are set later."""
    copy: Optimizer = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.__dict__.pop("step", None)  # a learning-rate scheduler binds it to the original
    copy._optimizer_step_pre_hooks = OrderedDict()
    copy._optimizer_step_post_hooks = OrderedDict()
    return copy


def single(optimizer: Optimizer, group: dict[str, Any], tensor: torch.Tensor) -> dict[str, Any]:
    """Settings under which the reference copy reads no value of a tensor on the host."""
    chosen: dict[str, Any] = {}
    fused = isinstance(optimizer, (Adam, AdamW))
    if "foreach" in group:
        chosen["foreach"] = tensor.is_cuda and not fused
    if "fused" in group:
        chosen["fused"] = fused
    if "capturable" in group:
        chosen["capturable"] = tensor.is_cuda
    return chosen


def fused_sgd(
    optimizer: Optimizer,
    work: list[tuple[dict[str, Any], torch.Tensor]],
    scale: torch.Tensor,
    found_inf: torch.Tensor,
) -> None:
    """One kernel for all tensors of a group and a type; it unscales, and skips by itself."""
    alike: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
    groups = {id(group): group for group, _ in work}
    for group, parameter in work:
        alike.setdefault((id(group), parameter.dtype), []).append(parameter)
    for (name, _), parameters in alike.items():
        group = groups[name]
        states = [optimizer.state[parameter] for parameter in parameters]
        fused_sgd_(
            [parameter.detach() for parameter in parameters],
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["momentum_buffer"] for state in states] if group["momentum"] else [],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=False,
            grad_scale=scale,
            found_inf=found_inf,
        )
