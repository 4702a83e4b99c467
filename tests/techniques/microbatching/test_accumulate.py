"""Kahan's correction: what it wins in FP16, and that it leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoestring.techniques import Microbatching
from shoestring.train.apply import apply

torch.set_num_threads(1)


def sum_of(parts: torch.Tensor, dtype: torch.dtype, accumulate: str) -> torch.Tensor:
    """The gradient of Σ parts·w, one row at a time, with the weights taken back."""
    model = nn.Linear(parts.shape[1], 1, bias=False).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.clone()))

    def loss(m: nn.Module, b: Any) -> torch.Tensor:
        return m(b).float().sum() * len(parts)

    apply([Microbatching(1, accumulate=accumulate)], model, optimizer, loss=loss)(parts.to(dtype))
    return seen[0][0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_compensated_sums_are_as_good_as_their_type(dtype):
    torch.manual_seed(0)
    parts = torch.rand(256, 500).to(dtype)
    exact = parts.double().sum(0)
    errors = {
        kind: ((sum_of(parts, dtype, kind).double() - exact).abs() / exact).mean().item()
        for kind in ("parameter", "compensated")
    }
    assert errors["compensated"] < errors["parameter"] / 5
    assert errors["compensated"] < torch.finfo(dtype).eps


def test_gradients_outside_of_a_step_are_left_alone():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(m: nn.Module, b: Any) -> torch.Tensor:
        if b.isnan().any():
            raise RuntimeError("stop")
        return m(b).mean()

    step = apply([Microbatching(1, accumulate="compensated")], model, optimizer, loss=loss)
    batch = torch.randn(4, 3)
    step(batch)
    assert model.weight.grad is None
    loss(model, batch).backward()
    assert model.weight.grad is not None
    optimizer.zero_grad()

    broken = batch.clone()
    broken[2] = torch.nan
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="stop"):
        step(broken)
    step(batch)  # nothing of the broken step is in it
    expected = before - 0.1 * batch.mean(0)
    assert torch.allclose(model.weight[0], expected[0], atol=1e-6)


def test_a_parameter_without_gradient_stays_without():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    before = model.unused.weight.detach().clone()
    step = apply(
        [Microbatching(2, accumulate="compensated")],
        model,
        optimizer,
        loss=lambda m, b: m(b).mean(),
    )
    step(torch.randn(5, 3))
    assert torch.equal(before, model.unused.weight)
