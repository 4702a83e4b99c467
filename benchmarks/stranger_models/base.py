"""What a stranger is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]
"""A model, a batch and a loss."""


@dataclass(frozen=True)
class Stranger:
    """One model with its data; `scale` multiplies widths, lengths and batches."""

    name: str
    family: str
    build: Callable[[int], Made]
    optimizer: str | Callable[[nn.Module], torch.optim.Optimizer] = "adamw"
    random: bool = False
    """A plain step draws numbers."""

    def optimizer_for(self, model: nn.Module) -> torch.optim.Optimizer:
        """Over all that trains."""
        if callable(self.optimizer):
            return self.optimizer(model)
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


class Layer(nn.Module):
    """A residual block."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(wide), nn.Linear(wide, 2 * wide), nn.Linear(2 * wide, wide),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        made: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return made


def tower(wide: int, out: int, depth: int = 4) -> nn.Module:
    """48 numbers → `out`, through residual blocks."""
    return nn.Sequential(nn.Linear(48, wide), *(Layer(wide) for _ in range(depth)),
                         nn.Linear(wide, out))  # fmt: skip


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of (inputs, labels)."""
    return F.cross_entropy(model(batch[0]), batch[1])


def labeled(scale: int, rows: int = 128) -> tuple[Tensor, Tensor]:
    """48 numbers and one of five classes each."""
    return torch.randn(rows * scale, 48), torch.arange(rows * scale) % 5
