"""What more memory would buy, and what less would cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoestring as ss
from cli.calling import call
from shoestring.planning.prices import step_bytes


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(20_000_000_000, 2_000_000_000), (24_000_000_000, 2_000_000_000), (80_000_000_000, 5 * 10**9),
     (13_000_000, 1_000_000), (999, 50), (7, 1)],
)  # fmt: skip
def test_steps_are_round(budget: int, expected: int) -> None:
    assert step_bytes(budget) == expected


def network() -> tuple[nn.Module, torch.Tensor, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) - x).square().mean()

    return model, torch.randn(256, 64), {"loss": loss, "optimizer": "adamw"}


@pytest.mark.slow
def test_prices_are_the_plans_of_those_budgets() -> None:
    """From what too little gets to what a plain step needs, each as if it was asked for."""
    model, x, given = network()
    plain = ss.plan(model, x, budget="1 GB", **given).predicted.needed_bytes
    plan = ss.plan(model, x, budget=int(0.95 * plain), prices=True, allow="lossless", **given)
    assert len(plan.prices) == 4
    for price in plan.prices:
        own = ss.plan(model, x, budget=price.budget_bytes, allow="lossless", **given)
        assert price.plan == own.plan and price.seconds == own.predicted.seconds
        assert price.needed_bytes <= price.budget_bytes
    seconds = [p.seconds for p in plan.prices]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    assert plan.prices[-1].plan.techniques == ()
    text = str(plan)
    assert "with more or less memory:" in text and text.endswith("plain")
    assert "(-" in text and "(+" in text
    assert [p["budget_bytes"] for p in plan.as_dict()["prices"]] == [
        p.budget_bytes for p in plan.prices
    ]
    assert not ss.plan(model, x, budget="1 GB", **given).prices


def test_prices_are_of_one_batch() -> None:
    model, x, given = network()
    with pytest.raises(ss.InputError, match="prices are of one batch"):
        ss.plan(model, x, budget="1 MB", batches=[x], prices=True, **given)


@pytest.mark.slow
def test_too_little_says_what_the_smallest_is() -> None:
    model, x, given = network()
    with pytest.raises(ss.BudgetError) as error:
        ss.plan(model, x, budget="1 KB", allow="lossless", **given)
    smallest = error.value.smallest_bytes
    assert smallest is not None
    plan = ss.plan(model, x, budget=smallest, prices=True, allow="lossless", **given)
    assert plan.prices[0].plan is None and plan.prices[0].needed_bytes <= 1.01 * smallest
    assert len(plan.prices) == 3  # two steps less is less than too little
    assert "nothing fits; the smallest is" in str(plan)


@pytest.mark.slow
def test_the_smallest_does_not_depend_on_the_budget() -> None:
    """A plan for CUDA, whose floor is left out where it fits."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)))
    _, _, given = network()
    found = set()
    for budget in ("30 MB", "40 MB"):
        with pytest.raises(ss.BudgetError) as error:
            x = torch.randn(512, 2048)
            ss.plan(model, x, budget=budget, allow="lossless", device="cuda", **given)
        found.add(error.value.smallest_bytes)
    assert len(found) == 1


def test_the_command_line_and_the_page(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    words = ["plan", "wrn-10-1", "--batch", "8", "--budget", "5 MB"]
    done = call(*words, "--prices", "--html", str(page))
    assert done.status == 0, done.err
    assert "with more or less memory:" in done.out
    text = page.read_text()
    assert "<h2>With more or less memory</h2>" in text and "wrn-10-1 in 5.0 MB" in text
    assert text.count("<tr>") >= 6
    found = json.loads(call(*words, "--prices", "--json").out)
    assert len(found["prices"]) == 4
    assert json.loads(call(*words, "--json").out)["prices"] == []
