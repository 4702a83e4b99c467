"""Products of groups of rows in other types than BF16, which PyTorch cannot trace by itself."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shoestring as ss
from shoestring.trace.flops import flops_of
from shoestring.trace.grouped import grouped_product

PRODUCT = torch.ops.aten._grouped_mm.default
OFFSETS = torch.tensor([3, 6, 10], dtype=torch.int32)
SHAPES = [
    ((10, 8), (3, 8, 12), OFFSETS, 2 * 10 * 8 * 12),
    ((8, 10), (10, 12), OFFSETS, 2 * 10 * 8 * 12),
    ((3, 4, 8), (8, 10), OFFSETS, 2 * 4 * 8 * 10),
    ((3, 4, 8), (3, 8, 12), None, 2 * 3 * 4 * 8 * 12),
]


@pytest.mark.parametrize(("left", "right", "offsets", "flops"), SHAPES)
def test_shapes_are_those_of_the_real_product(left, right, offsets, flops):
    if left == (8, 10):  # columns of groups, as the gradient of weights has them
        real = [torch.randn(left[::-1]).t(), torch.randn(right)]
    else:
        real = [torch.randn(left), torch.randn(*right[:-2], right[-1], right[-2]).mT]
    try:
        expected = torch._grouped_mm(*real, offs=offsets)
    except RuntimeError as error:
        pytest.skip(f"not on this machine: {error}")
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor) for tensor in real]
    more = {} if offsets is None else {"offs": mode.from_tensor(offsets)}
    with mode:
        made = grouped_product(PRODUCT, tuple(fakes), more)
    assert (made.shape, made.stride(), made.dtype) == (
        expected.shape, expected.stride(), expected.dtype,
    )  # fmt: skip
    assert flops_of(PRODUCT, tuple(fakes), more, made) == flops


class Experts(nn.Module):
    """Each row by the expert it is for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, self.weight, offs=OFFSETS)


def test_a_mixture_of_experts_is_predicted_as_it_is_measured():
    model, batch = nn.Sequential(nn.Linear(8, 8), Experts()), torch.randn(10, 8)
    given = {"loss": lambda m, b: m(b).square().sum(), "optimizer": "sgd"}
    measured = ss.measure(model, batch, **given).peak_bytes
    assert ss.profile(model, batch, accounting="device", **given).peak_bytes == measured


def test_microbatches_of_a_mixture_of_experts_are_predicted():
    """Of several parts the first runs before anything is recorded."""
    model, batch = nn.Sequential(nn.Linear(8, 8), Experts()), torch.randn(3, 10, 8)
    given = {
        "loss": lambda m, b: sum(m(x).square().sum() for x in b),
        "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9),
    }
    plan = [ss.Microbatching(1)]
    predicted = ss.profile(model, batch, accounting="device", techniques=plan, **given)
    step = ss.apply(plan, model, given["optimizer"], loss=given["loss"])
    step(batch)
    assert predicted.peak_bytes == pytest.approx(step.measure(batch).peak_bytes, rel=0.02)
