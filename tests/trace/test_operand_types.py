"""16-bit plans that could not run are not chosen, and fake tensors refuse what real ones do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from shoestring.errors import InputError
from shoestring.trace.tracing import trace_model

NARROW = torch.bfloat16
MIXED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda x: F.linear(x, torch.ones(3, 8)),
    "matmul": lambda x: x @ torch.ones(8, 3),
    "bias": lambda x: F.linear(x, torch.ones(3, 8, dtype=NARROW), torch.ones(3)),
    "batched": lambda x: torch.bmm(x[None], torch.ones(1, 8, 2)),
    "convolution": lambda x: F.conv1d(x[None], torch.ones(1, 4, 3)),
    "index_add": lambda x: torch.zeros(4, 8).index_add(0, torch.tensor([0, 1, 2, 3]), x),
    "index_put": lambda x: torch.zeros(4, 8).index_put((torch.tensor([1]),), x[:1]),
    "cross entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.zeros(4, 8)),
    "addition": lambda x: x + torch.ones(8),
}


@pytest.mark.parametrize("name", MIXED)
def test_fake_tensors_refuse_what_real_ones_refuse(name: str) -> None:
    model, batch = nn.Linear(8, 8).to(NARROW), torch.randn(4, 8, dtype=NARROW)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return MIXED[name](model(batch)).float().mean()

    try:
        loss(model, batch)
    except RuntimeError:
        with pytest.raises(InputError, match="type"):
            trace_model(model, batch, loss=loss)
    else:
        assert name == "addition"
        trace_model(model, batch, loss=loss)


@pytest.mark.filterwarnings("ignore:left out")
def test_a_network_in_fp32_beside_the_model() -> None:
    torch.manual_seed(0)
    teacher = nn.Linear(64, 64).requires_grad_(False)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
    batch = torch.randn(8, 64)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(teacher(model(batch)), torch.zeros(len(batch), 64))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = ss.profile(model, batch, loss=loss, optimizer=optimizer, accounting="device").peak_bytes
    try:
        plan = ss.plan(model, batch, loss=loss, optimizer=optimizer, budget=int(plain * 0.9))
    except ss.BudgetError:
        return
    ss.apply(plan, model, optimizer, loss=loss)(batch)
