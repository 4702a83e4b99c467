"""Mean and deviation of a normalization in 16 bits are as wide as the kernels make them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoestring import Checkpointing, apply, measure, profile
from shoestring.step.predict import predict_step
from shoestring.trace.tracing import trace_model

KINDS: dict[str, Any] = {
    "layer": lambda: nn.LayerNorm(6),
    "group": lambda: nn.GroupNorm(4, 8),
    "batch": lambda: nn.BatchNorm1d(8),
}
IMAGES = torch.randn(64, 8, 6)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        found: Tensor = model(batch)
    return found.float().square().mean()


def build(kind: str) -> nn.Module:
    """The convolution makes 16 bits, under autocast."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(8, 8, 1), KINDS[kind](), nn.ReLU(), KINDS[kind]())


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_on_the_cpu(kind: str) -> None:
    model = build(kind)
    given: dict[str, Any] = {"loss": loss, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    predicted = profile(model, IMAGES, accounting="device", **given).peak_bytes
    assert predicted == measure(model, IMAGES, **given).peak_bytes


def test_a_planned_step_under_autocast() -> None:
    model, plan = build("layer"), [Checkpointing("no-bn")]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    predicted = predict_step(plan, model, IMAGES, loss=loss, optimizer=optimizer)
    step = apply(plan, model, optimizer, loss=loss)
    step(IMAGES)
    assert predicted.peak_bytes == step.measure(IMAGES).peak_bytes


@pytest.mark.parametrize(
    ("device", "kind", "kept"),
    [
        ("cpu", "layer", torch.bfloat16),
        ("cpu", "group", torch.bfloat16),
        ("cpu", "batch", torch.bfloat16),
        ("cuda", "layer", torch.float32),
        ("cuda", "group", torch.bfloat16),
        ("cuda", "batch", torch.float32),
    ],
)
def test_weights_of_16_bits(device: str, kind: str, kept: torch.dtype) -> None:
    """As in PyTorch's layer_norm_kernel.cu, group_norm.cpp and Normalization.cu."""
    model = build(kind).to(torch.bfloat16)
    trace = trace_model(
        model, IMAGES.to(torch.bfloat16), loss=lambda m, b: m(b).square().mean(), device=device
    )
    found = [op for op in trace.ops if op.name == f"aten.native_{kind}_norm"]
    assert len(found) == 2
    for op in found:
        assert [spec.dtype for spec in op.outputs] == [torch.bfloat16, kept, kept]
