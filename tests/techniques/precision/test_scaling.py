"""The loss scale: overflow is skipped bit for bit, counted, and never waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoestring.techniques import Microbatching, Precision
from shoestring.techniques.precision.scaling import LossScale
from techniques.precision.precision_helpers import (
    OPTIMIZERS,
    NoSync,
    assert_same,
    everything,
    make_step,
    own_state,
)
from techniques.small_models import SMALL

torch.set_num_threads(1)


class Sometimes:
    """A loss whose gradient can be made to overflow."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return SMALL["cnn"].loss(model, batch).float() * self.factor


@pytest.mark.parametrize("optimizer", [o for o in OPTIMIZERS if o != "sgd-damped"])
@pytest.mark.parametrize("first", [True, False])
def test_an_overflow_changes_nothing_but_the_scale(optimizer, first):
    torch.manual_seed(0)
    small, loss = SMALL["cnn"], Sometimes()
    model, batch = small.build(), small.batch()
    step = make_step(model, OPTIMIZERS[optimizer](model.parameters()), loss, Precision("fp16"))
    for _ in range(0 if first else 5):
        step(batch)
    before, counts = everything(step), own_state(step)
    loss.factor = 1e30
    step(batch)
    after = everything(step)
    kept = {k: v for k, v in after.items() if k in before or v.any()}
    moving = {k for k in before if "running" in k or "tracked" in k}  # the forward pass did run
    assert_same(
        {k: v for k, v in before.items() if k not in moving},
        {k: v for k, v in kept.items() if k not in moving},
    )
    now = own_state(step)
    assert now["skipped_steps"] == counts["skipped_steps"] + 1
    assert now["scale"] == counts["scale"] / 2
    assert now["good_steps"] == 0
    loss.factor = 1.0
    assert step(batch).isfinite()
    assert not torch.equal(before["model.0.weight"], model[0].weight)


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "RAdam", "Adamax"])
def test_after_an_overflow_the_first_update_is_still_the_first(name):
    settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.5}
    settings |= {"momentum": 0.9, "dampening": 0.5} if name == "SGD" else {}

    def moved(factors: list[float]) -> torch.Tensor:
        model = nn.Linear(4, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = getattr(torch.optim, name)(model.parameters(), **settings)
        step = make_step(
            model,
            optimizer,
            lambda m, b: (m(b[0]).float() * b[1].float()).sum(),
            Precision("fp16", initial_scale=8.0),
        )
        for factor in factors:
            step((torch.ones(1, 4), torch.full((1, 1), factor)))
        return model.weight.detach()

    assert torch.equal(moved([6e4, 0.25]), moved([0.25]))


def test_the_scale_doubles_after_good_steps_and_stops_at_the_largest():
    small = SMALL["mlp"]
    model, batch = small.build(), small.batch()
    technique = Precision("fp16", initial_scale=2.0**10, growth_interval=3)
    step = make_step(model, OPTIMIZERS["sgd"](model.parameters()), small.loss, technique)
    scales = []
    for _ in range(24):
        step(batch)
        scales.append(own_state(step)["scale"].item())
    assert scales[:7] == [2.0**10] * 2 + [2.0**11] * 3 + [2.0**12] * 2
    assert scales[-1] == 2.0**15  # of an FP16 loss; one more would overflow by itself
    assert own_state(step)["skipped_steps"] == 0


def test_a_scale_too_large_is_found_out():
    small = SMALL["mlp"]
    model, batch = small.build(), small.batch()
    technique = Precision("fp16", initial_scale=2.0**20)
    step = make_step(model, OPTIMIZERS["sgd"](model.parameters()), small.loss, technique)
    for _ in range(10):
        value = step(batch)
    assert value.isfinite() and own_state(step)["skipped_steps"] >= 1
    assert own_state(step)["scale"] <= 2.0**15


def test_the_loss_shown_is_not_scaled():
    torch.manual_seed(0)
    small = SMALL["mlp"]
    model, batch = small.build(), small.batch()
    expected = small.loss(model, batch).item()
    for technique in ((Precision("fp16"),), (Precision("fp16"), Microbatching(4))):
        twin = small.build()
        twin.load_state_dict(model.state_dict())
        step = make_step(twin, OPTIMIZERS["sgd"](twin.parameters()), small.loss, *technique)
        assert step(batch).item() == pytest.approx(expected, rel=2e-3)


def test_small_gradients_arrive_thanks_to_the_scale():
    """A gradient of 1e-8 is zero in FP16."""

    def moved(scale: float) -> float:
        model = nn.Linear(1, 1, bias=False)
        model.weight.data.zero_()
        made = torch.optim.SGD(model.parameters(), lr=1e6)
        technique = Precision("fp16", initial_scale=scale)
        step = make_step(model, made, lambda m, b: (m(b) * 1e-4).float().sum() * 1e-4, technique)
        step(torch.ones(1, 1))
        return -model.weight.item()

    assert moved(1.0) == 0.0
    assert moved(2.0**15) == pytest.approx(1e-2, rel=1e-2)


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_value_is_read_on_the_host(optimizer, rounding, kind):
    small = SMALL["lstm"]
    model, batch = small.build(), small.batch()
    made = OPTIMIZERS[optimizer](model.parameters())
    step = make_step(model, made, small.loss, Precision(kind, rounding=rounding))
    if optimizer == "sgd-damped":
        step(batch)  # on the CPU a first update is looked at
    with NoSync():
        for _ in range(3):
            step(batch)


def test_no_value_is_read_by_microbatches_either(monkeypatch):
    monkeypatch.setattr("shoestring.techniques.microbatching._is_zero", lambda w: False)  # a GPU's
    monkeypatch.setattr("shoestring.techniques.splitting.units.readable", lambda t: False)
    small = SMALL["mlp"]
    model, (inputs, labels) = small.build(), small.batch()
    technique = Microbatching(4, weight=lambda b: (b[1] >= 0).sum(), accumulate="compensated")
    step = make_step(
        model, OPTIMIZERS["adam"](model.parameters()), small.loss, technique, Precision("fp16")
    )
    with NoSync():
        step((inputs, labels))


def test_not_a_number_counts_as_overflow_too():
    scale = LossScale(torch.device("cpu"), 8.0, 2)
    for bad in (torch.nan, torch.inf, -torch.inf):
        scale.look_for_overflow([torch.ones(3), torch.tensor([1.0, bad]).half()])
        assert scale.found_inf == 1
    scale.look_for_overflow([torch.ones(3), torch.ones(2).half()])
    assert scale.found_inf == 0
