"""Learning rates are tensors while a step runs, and numbers again outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoestring.step.rates import Rates
from shoestring.techniques import Precision
from shoestring.techniques.base import Setup

CPU = torch.device("cpu")


def optimizer(kind: Any, **settings: Any) -> torch.optim.Optimizer:
    groups = [{"params": [torch.ones(2, requires_grad=True)], "lr": lr} for lr in (0.1, 0.2)]
    made: torch.optim.Optimizer = kind(groups, **settings)
    return made


def rates_of(made: torch.optim.Optimizer, precision: str) -> Rates:
    """As a step by this precision has them."""
    model = torch.nn.ParameterList(p for group in made.param_groups for p in group["params"])
    setup = Setup(model, made, lambda b: b, lambda b: (), lambda v: None, lambda: None)
    if precision != "fp32":
        Precision(precision).apply(setup)
    return Rates(setup)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_scheduler_moves_the_same_tensor(kind: Any) -> None:
    made = optimizer(kind)
    rates, schedule = rates_of(made, "fp16"), torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
    seen = []
    for _ in range(3):
        with rates.on_device(CPU):
            held = [group["lr"] for group in made.param_groups]
            seen.append((id(held[0]), [float(rate) for rate in held]))
        assert all(isinstance(group["lr"], float) for group in made.param_groups)
        made.step()
        schedule.step()
    assert len({identity for identity, _ in seen}) == 1
    for (_, found), factor in zip(seen, (1, 0.5, 0.25), strict=True):
        assert found == pytest.approx([0.1 * factor, 0.2 * factor])


@pytest.mark.parametrize(
    ("kind", "precision", "settings"),
    [
        (torch.optim.SGD, "fp32", {}),
        (torch.optim.SGD, "bf16", {}),
        (torch.optim.SGD, "fp16", {"momentum": 0.9, "dampening": 0.1}),
        (torch.optim.RMSprop, "fp16", {}),
        (torch.optim.Adam, "fp32", {}),
    ],
)
def test_updates_that_read_numbers_get_numbers(kind: Any, precision: str, settings: Any) -> None:
    made = optimizer(kind, **settings)
    with rates_of(made, precision).on_device(CPU):
        assert [group["lr"] for group in made.param_groups] == [0.1, 0.2]


def test_an_error_leaves_numbers() -> None:
    made = optimizer(torch.optim.Adam)
    with pytest.raises(KeyError), rates_of(made, "fp16").on_device(CPU):
        raise KeyError
    assert [group["lr"] for group in made.param_groups] == [0.1, 0.2]


def test_a_rate_that_is_a_tensor_already_stays() -> None:
    made, rate = optimizer(torch.optim.Adam), torch.tensor(0.3)
    made.param_groups[0]["lr"] = rate
    with rates_of(made, "fp16").on_device(CPU):
        assert made.param_groups[0]["lr"] is rate
    assert made.param_groups[0]["lr"] is rate
