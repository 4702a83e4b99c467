"""The weight of a part's loss in the loss of its minibatch."""

from __future__ import annotations

import torch


def weighted_loss(loss: torch.Tensor, weight: float | torch.Tensor | None) -> torch.Tensor:
    """A part's loss in the loss of its minibatch; of a part that has no unit, 0/0, nothing.

    A weight on the CPU beside a loss elsewhere is a number to its kernel, and known not to be zero.
    """
    if weight is None:
        return loss
    if not isinstance(weight, torch.Tensor):
        return loss * weight
    weighted = loss * weight.to(loss.dtype)
    return weighted.masked_fill(weight == 0, 0) if weight.device == loss.device else weighted
