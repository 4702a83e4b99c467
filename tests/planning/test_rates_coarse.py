"""The same call gives the same plan, however busy the machine is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

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


def test_a_busy_machine_has_the_rates_of_an_idle_one() -> None:
    """Real load: three processes a core that compute all the time."""
    idle, threads = cost._cpu.__wrapped__(), torch.get_num_threads()
    spin = [sys.executable, "-c", "while True: pass"]
    load = [subprocess.Popen(spin) for _ in range(3 * (os.cpu_count() or 1))]
    try:
        for _ in range(3):
            assert cost._cpu.__wrapped__() == idle
    finally:
        for process in load:
            process.kill()
            process.wait()
    assert torch.get_num_threads() == threads


def test_no_16_bit_rate_is_above_its_nominal_one() -> None:
    rates, nominal = cost.costs_of("cpu").flops_per_second, cost.NOMINAL["cpu"].flops_per_second
    assert rates["fp32"] == nominal["fp32"]
    assert all(rates[name] <= nominal[name] for name in nominal)


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
