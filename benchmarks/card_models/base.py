"""What is planned for, and how people checkpoint it today."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Made = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]
"""A model, a batch and a loss."""


@dataclass(frozen=True)
class Subject:
    """A model with its data and optimizer; `tiny` is for trying the script on a CPU."""

    name: str
    family: str
    build: Callable[[bool], Made]
    optimizer: str = "adamw"
    """adamw, adamw-fused or sgd."""

    def made(self, device: str, *, tiny: bool = False) -> Made:
        """On the device, the same weights every time."""
        torch.manual_seed(0)
        with torch.device(device):
            return self.build(tiny)

    def optimizer_for(self, model: nn.Module) -> torch.optim.Optimizer:
        """Over all that trains."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=1e-4, fused=self.optimizer == "adamw-fused" or None)


def own_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The loss a Hugging Face model computes itself."""
    loss: Tensor = model(**batch).loss
    return loss


def in_autocast(loss: Any) -> Any:
    """The same under autocast in bf16."""

    def wrapped(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):
            value: Tensor = loss(model, batch)
        return value

    return wrapped


def checkpointed(model: nn.Module) -> bool:
    """As people do it: Hugging Face's one line, or `torch.utils.checkpoint` around every block."""
    if getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return True
    found = False
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        kinds = [type(child) for child in module]
        for child in module:
            if kinds.count(type(child)) > 1 and any(True for _ in child.children()):
                _wrap(child)
                found = True
    return found


def _wrap(block: nn.Module) -> None:
    forward = block.forward

    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = again  # type: ignore[method-assign]
