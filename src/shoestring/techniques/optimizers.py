"""Facts about PyTorch's optimizers that techniques need."""

from __future__ import annotations

import torch

ELEMENTWISE = frozenset(
    {
        torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop,
        torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam,
        torch.optim.RAdam,
    }
)  # fmt: skip
"""Optimizers that treat every element alone, so that tensors may be cut and joined."""


def whole_elements(parameter: torch.Tensor) -> int:
    """Of all of it, where an optimizer holds the rows of one rank."""
    found: int = getattr(parameter, "whole_elements", None) or parameter.numel()
    return found
