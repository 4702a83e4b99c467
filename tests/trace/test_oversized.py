"""Results that shrink, such as losses of many terms, keep the storage they had."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from shoestring.step.predict import predict_step
from shoestring.trace.tracing import trace_model

LOSSES = {
    "mse": F.mse_loss,
    "smooth_l1": F.smooth_l1_loss,
    "soft_margin": F.soft_margin_loss,
    "bce": lambda out, target: F.binary_cross_entropy(out.sigmoid(), target.sigmoid()),
    "sum": lambda out, target: F.mse_loss(out, target, reduction="sum"),
    "unreduced": lambda out, target: F.mse_loss(out, target, reduction="none").mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_storage_counts_on_the_device_and_the_number_alone_elsewhere(name: str) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return LOSSES[name](model(batch[0]), batch[1])

    model = nn.Linear(8, 64)
    batch = torch.randn(32, 8), torch.randn(32, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    measured = ss.measure(model, batch, loss=loss, optimizer=optimizer)
    predicted = ss.profile(model, batch, loss=loss, optimizer=optimizer, accounting="device")
    assert predicted.peak_bytes == measured.peak_bytes
    planned = predict_step((), model, batch, loss=loss, optimizer=optimizer)
    assert planned.peak_bytes == measured.peak_bytes
    trace = trace_model(model, batch, loss=loss)
    assert trace.values[trace.loss].numel == 1


def test_folded_patches_lie_in_a_storage_as_large_as_the_patches() -> None:
    class Folding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(27, 27)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                patches = F.unfold(x, 3, padding=1, stride=2).transpose(1, 2)
                made = self.layer(patches).tanh().transpose(1, 2)
                x = x + F.fold(made, x.shape[-2:], 3, 1, 1, 2)
            return x

    given: dict[str, Any] = {"loss": lambda m, b: m(b).square().mean(), "optimizer": "sgd"}
    model, batch = Folding(), torch.randn(8, 3, 32, 32)
    predicted = ss.profile(model, batch, accounting="device", **given)
    assert predicted.peak_bytes == ss.measure(model, batch, **given).peak_bytes
