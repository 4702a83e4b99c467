"""Bounds for plans that are near, beside those of rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import shoestring as ss
from shoestring.techniques.emulated import Rounded
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
    near = NearBounds(pair, pair.planned.expected(pair.expected)).bounds
    rounding = noises(pair.exact, pair.expected)["parameters"]
    assert pair.noise["parameters"] == rounding
    assert all(near["parameters"].norms[n] > norm for n, norm in rounding.norms.items())


def test_counts_are_not_rounded_to_16_bits() -> None:
    """Rows of each expert, from which its kernel reads where they end."""
    chosen = torch.arange(602) % 2
    with Rounded("bf16"):
        rows = torch.histc(chosen.float(), bins=2, min=0, max=1).cumsum(0)
        third = torch.ones(3) / 3
    assert rows.tolist() == [301.0, 602.0]
    assert third[0] == torch.tensor(1 / 3, dtype=torch.bfloat16).float()


class _Residual(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(wide)
        self.up, self.down = nn.Linear(wide, 2 * wide), nn.Linear(2 * wide, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return made


class _Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(48, 32)
        self.layers = nn.ModuleList(_Residual(32) for _ in range(6))
        self.leave = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for number in (0, 2, 3, 4, 5, 2):
            x = self.layers[number](x)
        made: torch.Tensor = self.leave(x)
        return made


def test_a_second_gradient_is_of_parameters_that_moved_by_chance() -> None:
    """An element with a gradient near zero moves either way; the next squares differ by more."""
    torch.manual_seed(0)
    model, batch = _Reused(), (torch.randn(128, 48), torch.arange(128) % 5)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = ss.Plan([ss.Microbatching(64)])
    certificate = ss.verify(plan, model, [batch], loss=loss, optimizer=optimizer, steps=2)
    assert all(row.ok for row in certificate.comparisons), certificate
