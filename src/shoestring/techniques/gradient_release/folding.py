"""Add the gradients of parts to an optimizer's moments, so that no gradient outlives its layer.

Momentum is linear: b' = μ·b + g₁ + … + gₙ, exact but for rounding. Adam's first moment is, too. Its
second is not: folded it adds up g₁² + … + gₙ² in place of (g₁ + … + gₙ)² (AdamA). Where the parts'
gradients are mostly noise that is the same on average; where they agree it is n times less, and the
update √n times larger.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW

from ..base import Setup


def folds(setup: Setup, wanted: bool | str) -> bool:
    """Whether parts are added to the moments: by the optimizer's own arithmetic, and as wanted."""
    own = not (setup.update_on_device or setup.update_streams)
    return own and can_fold(setup.optimizer, wanted)


def can_fold(optimizer: torch.optim.Optimizer, wanted: bool | str) -> bool:
    """Heavy-ball SGD; Adam and AdamW where "all" is wanted."""
    groups = optimizer.param_groups
    if type(optimizer) is SGD and wanted:
        return all(g["momentum"] and not g["nesterov"] and not g["dampening"] for g in groups)
    return (
        type(optimizer) in (Adam, AdamW)
        and wanted == "all"
        and not any(group["amsgrad"] for group in groups)
    )


def fold_momentum(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    *,
    first: bool,
) -> None:
    """Add the gradient of a part to SGD's momentum; the first that there is decays it."""
    if first:
        if group["weight_decay"]:
            gradient.add_(parameter, alpha=group["weight_decay"])
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = gradient.clone()
        else:
            state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
    else:
        state["momentum_buffer"].add_(gradient)


def move_by_momentum(parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """SGD's update, once all parts are added."""
    _move(parameter, state["momentum_buffer"], group["lr"])


def fold_adam(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    *,
    first: bool,
) -> None:
    """Add the gradient of a part to the moments of Adam or AdamW; the first decays them."""
    beta1, beta2 = group["betas"]
    decoupled = group.get("decoupled_weight_decay", False)
    if first:
        if "step" not in state:
            on_device = bool(group.get("fused") or group.get("capturable"))
            where = parameter.device if on_device else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=where)
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg"].mul_(beta1)
        state["exp_avg_sq"].mul_(beta2)
        if group["weight_decay"] and not decoupled:
            gradient.add_(parameter, alpha=group["weight_decay"])
    state["exp_avg"].add_(gradient, alpha=1 - beta1)
    state["exp_avg_sq"].addcmul_(gradient, gradient, value=1 - beta2)


def move_by_adam(parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """The update of Adam or AdamW, once all parts are added."""
    beta1, beta2 = group["betas"]
    decoupled = group.get("decoupled_weight_decay", False)
    state["step"] += 1
    count = state["step"].double()
    lack1, lack2 = (
        -torch.expm1(count * (math.log(beta) if beta else -math.inf)) for beta in (beta1, beta2)
    )
    if decoupled and group["weight_decay"]:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
    root = state["exp_avg_sq"].sqrt().div_(lack2.sqrt()).add_(group["eps"])
    move = torch.div(state["exp_avg"], root, out=root).div_(lack1)
    _move(parameter, move, group["lr"])


def _move(parameter: torch.Tensor, move: torch.Tensor, rate: float | torch.Tensor) -> None:
    if isinstance(rate, torch.Tensor):
        parameter.sub_(move * rate)
    else:
        parameter.add_(move, alpha=-rate)
