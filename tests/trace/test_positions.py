"""A tensor that indexes rows of its own batch is named, and not cut with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from shoestring.trace.positions import index_like
from shoestring.trace.tracing import trace_model

ROWS = 16
Loss = Callable[[nn.Module, Any], torch.Tensor]
POSITIONS: dict[str, Loss] = {
    "index": lambda m, b: (m(b[0]) - m(b[0])[b[1]]).square().mean(),
    "index_select": lambda m, b: m(b[0]).index_select(0, b[1].flip(0)).square().mean(),
    "gather": lambda m, b: m(b[0]).gather(0, b[1][:, None].expand(-1, 8)).square().mean(),
    "index_add": lambda m, b: torch.zeros(ROWS, 8).index_add(0, b[1], m(b[0])).square().mean(),
}
LABELS: dict[str, Loss] = {
    "cross entropy": lambda m, b: F.cross_entropy(m(b[0]), b[1] % 8),
    "gather": lambda m, b: m(b[0]).log_softmax(-1).gather(1, b[1][:, None] % 8).mean(),
    "picked": lambda m, b: m(b[0])[torch.arange(len(b[0])), b[1] % 8].mean(),
    "embedding": lambda m, b: (m(b[0]) * m.table(b[1])).mean(),
    "masked": lambda m, b: m(b[0]).masked_select((b[1] > 3)[:, None]).mean(),
    "indexed by a mask": lambda m, b: m(b[0])[b[1] > 3].mean(),
    "sorted by it": lambda m, b: m(b[0])[b[1].argsort()].square().mean(),
    "sorted along": lambda m, b: m(b[0]).index_select(0, b[1].sort()[1]).square().mean(),
    "the first few": lambda m, b: m(b[0])[b[1].topk(3).indices].square().mean(),
    "one hot": lambda m, b: F.mse_loss(m(b[0]), F.one_hot(b[1] % 8, 8).float()),
}


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
        self.table = nn.Embedding(ROWS, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[2](self[1](self[0](x)))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, 8), torch.randperm(ROWS)


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_are_found(name: str) -> None:
    assert index_like(trace_model(Model(), batch(), loss=POSITIONS[name]), ROWS) == [1]


@pytest.mark.parametrize("name", LABELS)
def test_labels_and_tokens_are_not(name: str) -> None:
    assert index_like(trace_model(Model(), batch(), loss=LABELS[name]), ROWS) == []


def test_a_plan_names_them_and_does_not_cut() -> None:
    model, data = Model(), batch()
    given: dict[str, Any] = {
        "loss": POSITIONS["index"], "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)
    }  # fmt: skip
    plain = ss.profile(model, data, accounting="device", **given).peak_bytes
    with pytest.warns(RuntimeWarning, match=r"tensor 1 of the batch \(int64, shape \(16,\)\)"):
        try:
            plan = ss.plan(model, data, budget=int(plain * 0.9), allow="lossless", **given)
        except ss.BudgetError:
            return
    assert plan.get("microbatching") is None
