"""Modules whose state a forward pass changes: how often they run counts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.trace.blocks import writers
from shoestring.trace.tracing import trace_model


class Taught(nn.Module):
    """A teacher of parameters, not buffers, follows the student in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
            for slow, fast in pairs:
                slow.lerp_(fast, 0.1)
        return (self.student(x) - self.teacher(x + 1)).square().mean(1)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()


def test_parameters_that_a_forward_pass_moves_are_seen() -> None:
    model, batch = Taught(), torch.randn(256, 16)
    assert writers(trace_model(model, batch, loss=loss)) == {"teacher.0", "teacher.2"}
    plain = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    assert not writers(trace_model(plain, batch, loss=loss))


@pytest.mark.slow
def test_a_step_that_moves_a_teacher_is_not_cut_as_lossless() -> None:
    model, batch = Taught(), torch.randn(256, 16)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    peak = ss.profile(model, batch, loss=loss, optimizer=optimizer, accounting="device").peak_bytes
    try:
        plan = ss.plan(model, batch, loss=loss, optimizer=optimizer, budget=int(0.5 * peak),
                       allow="lossless")  # fmt: skip
    except ss.BudgetError:
        return
    assert "microbatching" not in {t.name for t in plan.techniques}
