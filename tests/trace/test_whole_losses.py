"""Losses that shrink their terms to one number keep the storage of the terms."""

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
