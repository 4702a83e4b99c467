"""Adagrad's state is there before any step, of parameters without a gradient, too."""

from typing import Any

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.step.predict import predict_step


class Partly(nn.Module):
    """Uses one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("named", [True, False])
def test_state_of_unused_parameters_counts(named: bool) -> None:
    model, batch = Partly(), torch.randn(4, 8)
    made = torch.optim.Adagrad(model.parameters())
    optimizer: Any = "adagrad" if named else made
    predicted = ss.profile(model, batch, loss=_loss, optimizer=optimizer, accounting="device")
    measured = ss.measure(model, batch, loss=_loss, optimizer=optimizer)
    assert predicted.peak_bytes == measured.peak_bytes
    planned = predict_step((), model, batch, loss=_loss, optimizer=made)
    assert planned.peak_bytes == measured.peak_bytes
