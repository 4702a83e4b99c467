"""Bounds for plans that are near, beside those of rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import shoestring as ss
from shoestring.verification.near import NearBounds
from shoestring.verification.noise import noises
from shoestring.verification.pair import Pair


def test_bounds_of_near_plans_leave_those_of_rounding() -> None:
    """Adam moves a parameter wherever its gradient is rounding; that is near, not rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters())
    plan = ss.Plan([ss.OptimizerState(8, smallest=1)])
    given: list[Any] = [torch.randn(8, 16)]

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    pair = Pair(plan, model, optimizer, loss, given, lambda: None, None)
    assert pair.exact is not None
    near = NearBounds(pair).of(pair.planned.expected(pair.expected))
    rounding = noises(pair.exact, pair.expected)["parameters"]
    assert pair.noise["parameters"] == rounding
    assert all(near["parameters"].norms[n] > norm for n, norm in rounding.norms.items())
