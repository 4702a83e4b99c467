"""Six small models on which every technique is tried, each with a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Loss = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True)
class Small:
    """One small model with its data."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Loss
    has_blocks: bool
    has_batch_norm: bool = False


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        return x + self.conv2(F.relu(self.norm2(y)))


class Attention(nn.Module):
    """A pre-norm transformer layer with dropout."""

    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        weights = self.dropout((q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1))
        x = x + self.dropout(self.out(weights @ v))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Language(nn.Module):
    """Embedding, layers, and the embedding again as output: a tied weight."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(Attention(16, 0.0) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.embedding.weight)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    out = model(inputs)
    return F.cross_entropy(out.flatten(0, -2), labels.flatten())


def images() -> Any:
    return torch.randn(6, 3, 10, 10), torch.arange(6) % 4


def tokens() -> Any:
    return torch.arange(6 * 7).reshape(6, 7) % 50, torch.arange(6 * 7).reshape(6, 7) % 50


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )  # fmt: skip


def _residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(*(Residual(8) for _ in range(4))),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def _transformer() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(50, 16), nn.Sequential(*(Attention(16) for _ in range(4))), nn.Linear(16, 50)
    )


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )


SMALL = {
    model.name: model
    for model in (
        Small("cnn", _cnn, images, classify, False, True),
        Small("residual", _residual, images, classify, True, True),
        Small("transformer", _transformer, tokens, classify, True),
        Small("tied", Language, tokens, classify, True),
        Small("lstm", Recurrent, lambda: (torch.randn(6, 5, 8), torch.arange(6) % 4), classify,
              False),
        Small("mlp", _mlp, lambda: (torch.randn(6, 12), torch.arange(6) % 4), classify, False),
    )
}  # fmt: skip
