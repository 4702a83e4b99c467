"""The same call gives the same plan, however busy the machine is."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.planning import cost


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize("busy", [1.0, 3.0])
def test_a_busy_machine_has_the_rates_of_an_idle_one(
    busy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = cost.costs_of("cpu")
    plain = cost._time

    def late(run: Any, device: str) -> float:
        late.calls += 1  # type: ignore[attr-defined]
        slowed = late.calls % 2  # type: ignore[attr-defined]
        return plain(run, device) * (busy if slowed else 1.0)  # some of the time, as load comes

    late.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(cost, "_time", late)
    cost._cpu.cache_clear()
    try:
        assert cost.costs_of("cpu") == idle
    finally:
        cost._cpu.cache_clear()
    assert late.calls >= 3  # type: ignore[attr-defined]


def test_rates_snap_to_what_they_should_be() -> None:
    for factor in (0.3, 0.7, 1.0, 2.0, 3.5):
        assert cost._coarse(1e12 * factor, 1e12) == 1e12
    assert cost._coarse(1e10, 1e12) < 2e10


def test_a_plan_says_what_it_was_chosen_by() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Block() for _ in range(4))), torch.randn(512, 32)
    given: dict[str, Any] = {
        "loss": lambda m, b: m(b).square().mean(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "allow": "lossless",
    }
    plain = ss.profile(model, batch, accounting="device", **{k: given[k] for k in list(given)[:2]})
    plans = [ss.plan(model, batch, budget=int(plain.peak_bytes * 0.8), **given) for _ in range(2)]
    first, second = (json.dumps(plan.as_dict(), sort_keys=True) for plan in plans)
    assert first == second
    assert plans[0].as_dict()["rates"]["flops_per_second"]["fp32"] > 0
