"""State of which a part lies on the host: the rest is state in traces, as rules for ranks ask."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.step.predict import predict_step
from shoestring.step.trace_step import trace_plan
from shoestring.techniques.plan import Plan
from shoestring.trace.graph import Role


@pytest.mark.parametrize("release", [False, True], ids=["kept", "released"])
def test_what_stays_on_the_device_is_state(release: bool) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    plan = Plan([ss.FusedUpdate(), ss.Offload("state", share=0.5)])
    trace = trace_plan(
        plan.but(ss.GradientRelease()) if release else plan, model, torch.randn(4, 256),
        loss=lambda m, x: m(x).square().mean(), optimizer="adamw", device="cuda",
    )  # fmt: skip
    state = sum(s.nbytes for s in trace.storages if s.role is Role.OPTIMIZER_STATE)
    assert state == pytest.approx(4 * 2 * 4 * 256 * 256, rel=0.01)  # two moments of four layers


@pytest.mark.parametrize("release", [False, True], ids=["kept", "released"])
def test_the_state_of_sgd_that_stays_is_predicted(release: bool) -> None:
    """Also that of tensors too small to leave; each is made by an update of its own."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given = {"loss": lambda m, x: m(x).square().mean(), "optimizer": own}
    plan = [ss.Offload(smallest=100, share=0.5), *[ss.GradientRelease()] * release]
    predicted = predict_step(plan, model, x := torch.randn(4, 64), **given).peak_bytes
    step = ss.apply(plan, model, own, loss=given["loss"])
    step(x)
    assert step.measure(x).peak_bytes == predicted
