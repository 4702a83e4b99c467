"""Plans that are tried on the device, here the CPU: corrected by what steps took, all put back."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.planning import trial as trials
from shoestring.planning.planner import Planner
from shoestring.planning.result import Trial


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
            for _ in range(4)
        )
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        made: torch.Tensor = self.norm(x)
        return made


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x).square().mean()


def given() -> tuple[Blocks, torch.Tensor, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Blocks()
    return model, torch.randn(512, 64), torch.optim.AdamW(model.parameters(), lr=0.1)


def planned(share: float = 0.6, allow: str = "lossless", loss: Any = loss) -> Any:
    model, x, own = given()
    peak = ss.profile(model, x, loss=loss, optimizer=own, accounting="device").peak_bytes
    about: dict[str, Any] = {"loss": loss, "optimizer": own, "budget": int(share * peak)}
    return (model, x, own), lambda **more: ss.plan(model, x, allow=allow, **about, **more)


def test_a_plan_is_tried_and_everything_is_put_back() -> None:
    (model, x, own), plan = planned()
    before = copy.deepcopy(model.state_dict())
    attributes = [set(vars(m)) for m in model.modules()]
    stream = torch.get_rng_state()
    found = plan(trial=True)
    assert found.trial is not None and found.trial.needed_bytes <= found.budget_bytes
    assert found.predicted.seconds == found.trial.seconds
    assert found.trial.needed_bytes == pytest.approx(found.predicted.needed_bytes, rel=0.02)
    assert found.as_dict()["trial"]["seconds"] == found.trial.seconds
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert not own.state and all(group["lr"] == 0.1 for group in own.param_groups)
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert torch.equal(torch.get_rng_state(), stream)
    step = ss.apply(found, model, own, loss=loss)
    step(x)
    assert step.measure(x).peak_bytes <= found.budget_bytes


def test_on_the_cpu_nothing_is_tried_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials.Trials, "run", lambda *_: pytest.fail("tried"))
    assert planned()[1]().trial is None


def test_what_did_not_hold_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first needs 10% more than predicted, the second runs out of memory."""
    tried: list[Any] = []

    def run(self: trials.Trials, plan: ss.BudgetPlan) -> Trial | None:
        tried.append(plan)
        needed = plan.predicted.needed_bytes
        if len(tried) == 2:
            return None
        return Trial(int(1.1 * needed if len(tried) == 1 else needed), 0.01, False)

    monkeypatch.setattr(trials.Trials, "run", run)
    found = planned(0.55)[1](trial=True)
    assert len(tried) == 3 == len({p.plan for p in tried}) and found.plan == tried[2].plan
    assert found.trial is not None and found.trial.needed_bytes <= found.budget_bytes


def test_of_plans_that_hold_the_fastest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best by rule takes ten times as long as predicted; others take what is predicted."""
    tried: list[Any] = []

    def run(self: trials.Trials, plan: ss.BudgetPlan) -> Trial:
        tried.append(plan)
        assert plan.predicted.seconds is not None
        slow = [t.name for t in plan.techniques] == [t.name for t in tried[0].techniques]
        return Trial(
            plan.predicted.needed_bytes, plan.predicted.seconds * (10 if slow else 1), False
        )

    monkeypatch.setattr(trials.Trials, "run", run)
    found = planned(0.55)[1](trial=True)
    assert 2 <= len(tried) <= trials.MOST and found.plan == tried[-1].plan != tried[0].plan


def test_what_never_holds_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials.Trials, "run", lambda *_: None)
    with pytest.raises(ss.BudgetError, match=r"held when its step ran|no plan fits"):
        planned(0.6)[1](trial=True)


def test_a_trial_that_fails_does_not_fail_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any) -> Trial:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(trials.Trials, "run", breaks)
    _, plan = planned()
    with pytest.warns(RuntimeWarning, match="not tried.*a kernel failed"):
        assert plan(trial=True).trial is None
    monkeypatch.setattr(trials, "_on_host", breaks)
    assert plan(trial=True).trial is None


def test_a_plan_whose_step_refuses_to_run_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan = planned()
    first = plan()
    names = {technique.name for technique in first.techniques}

    def run(_: trials.Trials, plan: ss.BudgetPlan) -> Trial:
        if {technique.name for technique in plan.techniques} == names:
            raise ss.InputError("a block has other values when recomputed")
        assert plan.predicted.seconds is not None
        return Trial(plan.predicted.needed_bytes, plan.predicted.seconds, False)

    monkeypatch.setattr(trials.Trials, "run", run)
    found = plan(trial=True)
    assert found.trial is not None and {t.name for t in found.techniques} != names
    monkeypatch.setattr(trials.Trials, "run", lambda *_: run(_[0], first))
    with pytest.warns(RuntimeWarning, match="not tried.*other values"):
        assert plan(trial=True).plan == first.plan


def test_a_loss_that_writes_elsewhere_is_not_tried() -> None:
    average = torch.zeros(64)

    def averaging(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        with torch.no_grad():
            average.lerp_(out.mean(0), 0.1)
        return (out - x).square().mean()

    (model, x, own), plan = planned()
    trial = trials.Trials.of(model, x, averaging, own)
    assert trial is not None
    with trial, pytest.raises(ss.InputError, match="writes to tensors"):
        trial.run(plan())
    assert not average.any()


def test_an_optimizer_in_use_is_not_tried() -> None:
    """Its state would be there twice."""
    (model, x, own), plan = planned()
    loss(model, x).backward()
    own.step()
    own.zero_grad()
    held = copy.deepcopy(own.state_dict())
    assert plan(trial=True).trial is None
    assert str(held) == str(own.state_dict())


def test_what_replaces_parameters_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take room for both."""
    monkeypatch.setattr(trials.Trials, "run", lambda *_: pytest.fail("tried"))
    plan = planned()[1]
    narrow = dataclasses.replace(plan(), techniques=(ss.Precision("bf16"),))
    monkeypatch.setattr(Planner, "plan", lambda *_, **__: narrow)
    found = plan(trial=True)
    assert found is narrow and found.trial is None
    assert ss.Sparsity(0.5).replaces_parameters and not ss.FusedUpdate().replaces_parameters
