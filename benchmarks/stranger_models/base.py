"""What a stranger is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]
"""A model, a batch and a loss."""


@dataclass(frozen=True)
class Stranger:
    """One model with its data; `scale` multiplies widths, lengths and batches."""

    name: str
    family: str
    build: Callable[[int], Made]
    optimizer: str = "adamw"
    random: bool = False
    """A plain step draws numbers."""

    def optimizer_for(self, model: nn.Module) -> torch.optim.Optimizer:
        """Over all that trains."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=1e-3)


def own_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The loss a Hugging Face model computes itself."""
    loss: Tensor = model(**batch).loss
    return loss


def in_autocast(loss: Any) -> Any:
    """The same under autocast in bf16."""

    def wrapped(model: nn.Module, batch: Any) -> Tensor:
        kind = next(model.parameters()).device.type
        with torch.autocast(kind, torch.bfloat16):
            value: Tensor = loss(model, batch)
        return value

    return wrapped
