"""The update as it is late in training; Adagrad's state, which is there before any step."""

from typing import Any

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.step.predict import predict_step
from shoestring.trace.fakes import LATE, late_in_training


class Partly(nn.Module):
    """Uses one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("named", [True, False])
def test_state_of_unused_parameters_counts(named: bool) -> None:
    model, batch = Partly(), torch.randn(4, 8)
    made = torch.optim.Adagrad(model.parameters())
    optimizer: Any = "adagrad" if named else made
    predicted = ss.profile(model, batch, loss=_loss, optimizer=optimizer, accounting="device")
    measured = ss.measure(model, batch, loss=_loss, optimizer=optimizer)
    assert predicted.peak_bytes == measured.peak_bytes
    planned = predict_step((), model, batch, loss=_loss, optimizer=made)
    assert planned.peak_bytes == measured.peak_bytes


class Rectified(torch.optim.Optimizer):
    """Uses a copy of the gradient on every tenth step, which it counts by itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            p.sub_(p.grad * 0.1 + p.grad * 0.1 if state["step"] % 10 == 0 else p.grad)


@pytest.mark.parametrize("kind", [torch.optim.RAdam, Rectified])
def test_a_later_update_that_takes_more_is_predicted(kind: Any) -> None:
    """RAdam rectifies from its sixth step on."""
    model, batch = nn.Linear(64, 64), torch.randn(2, 64)
    optimizer = kind(model.parameters())
    predicted = ss.profile(model, batch, loss=_loss, optimizer=optimizer, accounting="device")
    assert ss.measure(model, batch, loss=_loss, optimizer=optimizer) == ss.measure(
        model, batch, loss=_loss, optimizer=optimizer, warmup_steps=9
    )
    assert ss.verify([], model, [batch], loss=_loss, optimizer=optimizer).ok
    step = ss.apply([], model, optimizer, loss=_loss)
    peaks = [step.measure(batch).peak_bytes for _ in range(10)]
    assert predicted.peak_bytes == peaks[-1] > peaks[1]


def test_a_step_for_one_parameter_looks_at_its_state_alone() -> None:
    """Released gradients have a step for each: all states in each of them would take long."""
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([one, other])
    one.grad, other.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    optimizer.param_groups[0]["params"] = [one]
    late_in_training(optimizer)
    assert optimizer.state[one]["step"] == LATE - 1
    assert optimizer.state[other]["step"] == 1
