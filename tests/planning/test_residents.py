"""The peak of an update in 16 bits, for optimizers of every kind."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shoestring as ss
from shoestring.planning.cost import NOMINAL
from shoestring.planning.planner import Planner
from shoestring.techniques import offload
from tiers import slow_but

BATCH = torch.randn(4, 192)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(192, 192, bias=False) for _ in range(6)))


def planner(model: nn.Module, optimizer: Any, device: str = "cpu", **more: Any) -> Planner:
    costs = NOMINAL[device]
    return Planner(model, BATCH, loss=loss, optimizer=optimizer, device=device, costs=costs, **more)


@pytest.mark.parametrize("name", slow_but(1, ["Adafactor", "Muon", "Rprop"]))
def test_updates_of_whole_tensors_in_16_bits_hold(name: str) -> None:
    """They do not cut tensors, and Adafactor's state has other shapes."""
    model = deep()
    optimizer = getattr(torch.optim, name)(model.parameters())
    planned = planner(model, optimizer)
    plan = planned.plan(int(0.95 * planned.estimates.plain.peak_bytes))
    assert plan.precision is not None
    step = ss.apply(plan, model, optimizer, loss=loss)
    step(BATCH)
    step(BATCH)
    assert step.measured is not None
    assert step.measured.peak_bytes <= plan.budget_bytes
    assert step.measured.peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.07)


def test_a_model_that_cannot_train_in_16_bits_is_planned_without() -> None:
    class Tabled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.unused = deep(), nn.Embedding(4, 4, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    model = Tabled()
    optimizer = torch.optim.Rprop(model.parameters())
    planned = planner(model, optimizer)
    update = planned.estimates._update((ss.Precision("bf16"),))
    assert 0 < update.gradient_bytes <= planned.estimates._update(()).gradient_bytes


@pytest.mark.slow
def test_kernels_on_cuda_need_no_copies() -> None:
    with FakeTensorMode():
        model = deep()
    narrow = (ss.Precision("fp16"),)
    usual = torch.optim.Adam(model.parameters())
    assert planner(model, usual, "cuda").estimates._update(narrow).passing_bytes == 0
    for optimizer in (torch.optim.Adam(model.parameters(), amsgrad=True), "rmsprop"):
        assert planner(model, optimizer, "cuda").estimates._update(narrow).passing_bytes > 0
    assert planner(model, usual, "cpu").estimates._update(narrow).passing_bytes > 0


def test_sparse_weights_have_gradients_and_state() -> None:
    model = deep()
    planned = planner(model, torch.optim.Adam(model.parameters()), allow="sparsity")
    dense = planned.estimates._update(())
    sparse = planned.estimates._update((ss.Sparsity(0.5),))
    assert dense.gradient_bytes == 6 * 192 * 192 * 4
    assert sparse.gradient_bytes == pytest.approx(dense.gradient_bytes / 2, rel=0.01)
    assert sparse.state_bytes == pytest.approx(dense.state_bytes / 2, rel=0.01)


class Deep(nn.Module):
    """A large embedding, which may be the head, too, around blocks that keep as much."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16_000, 256)
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))
        self.head = nn.Linear(256, 16_000, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).sin().cos()
        return self.head(x[:8]).square().mean()


@pytest.mark.parametrize("tied", [True, False])
def test_what_stays_through_the_passes_where_they_update_is_estimated(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers of state on the host; the head's gradient, which meets all activations, and waits
    for the embedding's where they are one."""
    for part in (offload.update, offload):
        monkeypatch.setattr(part, "chunk_bytes", lambda parameters: 10_000)
    tokens = torch.zeros(4000, dtype=torch.int64)
    found = Planner(
        Deep(tied=tied), tokens, loss=lambda model, batch: model(batch), optimizer="adamw",
        device="cuda", costs=NOMINAL["cuda"], budget_of="allocated",
    )  # fmt: skip
    wanted = {"fused_update", "gradient_release", "offload"}
    [setting] = [
        s for s in found._settings(found.allowed)
        if {t.name for t in s.techniques} == wanted and offload.Offload() in s.techniques
    ]  # fmt: skip
    candidate = found.estimates.best(setting, 10**9)
    assert candidate is not None
    predicted = found.estimates.predict(candidate)
    assert predicted is not None
    assert candidate.peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.07)
    assert found.estimates.least_bytes(setting) <= predicted.peak_bytes


def test_reserved_bytes_have_the_state_once_where_updates_run_in_the_backward_pass() -> None:
    """The trace of such a step has the state already."""
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(6)))
    found = Planner(
        model, torch.randn(4, 2048), loss=loss, optimizer="adamw", device="cuda",
        costs=NOMINAL["cuda"],
    )  # fmt: skip
    both = {"fused_update", "gradient_release"}
    setting = next(s for s in found._settings(found.allowed) if set(s.names) == both)
    candidate = found.estimates.best(setting, 10**12)
    assert candidate is not None
    predicted = found.estimates.predict(candidate)
    assert predicted is not None
    state_bytes = 2 * sum(p.nbytes for p in model.parameters())
    assert predicted.reserved_bytes - predicted.peak_bytes < state_bytes / 4


def test_what_lies_on_the_host_is_not_narrowed_again() -> None:
    """Weights in 16 bits that are not there took a megabyte off what was."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    planned = Planner(
        model, torch.randn(4, 256), loss=loss, optimizer="adamw", allow="near", device="cpu",
        costs=NOMINAL["cpu"],
    )  # fmt: skip
    some = planned._settings(planned.allowed)
    narrow = [s for s in some if {"precision", "weight_offload"} <= {t.name for t in s.techniques}]
    assert narrow
    estimates = planned.estimates
    assert min(estimates._resident_bytes(setting) for setting in narrow) > 0  # type: ignore[union-attr]
