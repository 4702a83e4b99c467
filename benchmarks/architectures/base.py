"""What an architecture of the comparison is, and the batches and losses several of them share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Architecture:
    """A model, its minibatches and its loss, with batch sizes for a CPU and for a GPU.

    `build` and `batch` only use factory functions without a device, so that they follow
    `torch.device(...)` and `FakeTensorMode` contexts.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    default_batch: int
    large_batch: int
    note: str


def labeled_inputs(*shape: int, classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Minibatches of normal inputs of `shape`, each with a class label."""

    def batch(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, *shape), torch.randint(classes, (n,))

    return batch


def labeled_tokens(length: int, vocabulary: int, classes: int) -> Callable[[int], Any]:
    """Minibatches of token sequences, each with a class label."""

    def batch(n: int) -> tuple[Tensor, Tensor]:
        return torch.randint(vocabulary, (n, length)), torch.randint(classes, (n,))

    return batch


def token_sequences(length: int, vocabulary: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Minibatches of token sequences and the tokens to predict at each position."""

    def batch(n: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(vocabulary, (n, length + 1))
        return tokens[:, :-1], tokens[:, 1:]

    return batch


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Classification loss, one label for each input or for each position of a sequence."""
    inputs, labels = batch
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())
