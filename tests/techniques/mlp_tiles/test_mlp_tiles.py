"""MLPs in tiles: which are found, that they compute the same, and what they take."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.errors import InputError, NoEffectWarning
from shoestring.step.predict import predict_step
from shoestring.techniques.mlp_tiles.find import positionwise

WIDE = 16


class Gated(nn.Module):
    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDE, 4 * WIDE), nn.Linear(WIDE, 4 * WIDE, bias=False)
        self.down, self.between = nn.Linear(4 * WIDE, WIDE), between or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(torch.nn.functional.silu(self.gate(x)) * self.up(x)))


class Mixes(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0))


class Attends(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down((self.gate(x) @ self.up(x).transpose(-1, -2)).softmax(-1) @ self.up(x))


class Turns(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).roll(1, 0))


class WritesOver(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.relu_(x))


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDE), mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDE, 4 * WIDE), nn.GELU(), nn.Linear(4 * WIDE, WIDE))


def network(make: Any = Gated, blocks: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(make()) for _ in range(blocks)))


def batch(rows: int = 64) -> torch.Tensor:
    return torch.randn(4, rows, WIDE, generator=torch.Generator().manual_seed(1))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.flip(-1)).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("make", [Gated, plain], ids=["gated", "plain"])
def test_mlps_are_found_by_what_they_compute(make: Any) -> None:
    model = network(make)
    assert [path for path, _ in positionwise(model)] == ["0.mlp", "1.mlp", "2.mlp"]
    model.eval()
    list(positionwise(model))
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize(
    "make",
    [
        Mixes, Attends, Turns, WritesOver, lambda: Gated(nn.Dropout(0.1)),
        lambda: Gated(nn.BatchNorm1d(4 * WIDE)), lambda: Gated(nn.Softmax(0)),
        lambda: nn.Linear(WIDE, WIDE),
        lambda: nn.Sequential(nn.Linear(WIDE, 4), nn.Linear(4, WIDE)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("training", [True, False])
def test_modules_that_mix_rows_or_draw_are_left_alone(make: Any, training: bool) -> None:
    model = network(make).train(training)
    assert list(positionwise(model)) == []
    with pytest.warns(NoEffectWarning, match="no module of the model"):
        ss.apply([ss.TiledMLP(16)], model, adamw(model), loss=loss)


def test_hooks_see_the_whole() -> None:
    model = network()
    model[0].mlp.up.register_forward_hook(lambda *_: None)
    assert [path for path, _ in positionwise(model)] == ["1.mlp", "2.mlp"]
    model[0].mlp.up._forward_hooks.clear()
    step = ss.apply([ss.TiledMLP(16)], model, adamw(model), loss=loss)
    seen = []
    model[0].mlp.up.register_forward_hook(lambda *given: seen.append(given[2].shape))
    step(batch())
    assert seen == [(4, 64, 4 * WIDE)]


@pytest.mark.parametrize("rows", [1, 60, 64, 200])
def test_loss_and_gradients_are_those_of_the_whole(rows: int) -> None:
    model, x = network().double(), batch().double()
    model[1].mlp.up.weight.requires_grad_(False)
    other = copy.deepcopy(model)
    step = ss.apply(
        [ss.TiledMLP(rows)], model, torch.optim.SGD(model.parameters(), lr=0.0), loss=loss
    )
    found = step(x, update=False)
    expected = loss(other, x)
    expected.backward()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0.0)
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-9, atol=1e-14)


PLANS: dict[str, list[ss.Technique]] = {
    "alone": [],
    "recomputed": [ss.Checkpointing("residual-1")],
    "by recipe": [ss.Checkpointing("no-bn")],
    "cheap": [ss.Checkpointing("residual-1*")],
    "every": [ss.Checkpointing("every-2")],
    "microbatched": [ss.Microbatching(2)],
    "bf16": [ss.Precision("bf16")],
    "released": [ss.GradientRelease()],
    "8-bit state": [ss.OptimizerState(8, smallest=1)],
    "4-bit activations": [ss.ActivationBits(4, smallest=1)],
    "activations on the host": [ss.ActivationOffload("all", smallest=1)],
    "sparse": [ss.Sparsity(0.5)],
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.filterwarnings("ignore::shoestring.errors.NoEffectWarning")
def test_the_predicted_peak_is_measured(name: str) -> None:
    model, x = network(), batch()
    own, chosen = adamw(model), [ss.TiledMLP(16), *PLANS[name]]
    predicted = predict_step(chosen, model, x, loss=loss, optimizer=own).peak_bytes
    step = ss.apply(chosen, model, own, loss=loss)
    step(x)
    assert predicted == pytest.approx(step.measure(x).peak_bytes, rel=0.01)


@pytest.mark.parametrize("name", ["alone", "recomputed", "cheap", "microbatched"])
def test_verify_certifies_it(name: str) -> None:
    plan = [ss.TiledMLP(16), *PLANS[name]]
    model = network()
    assert ss.verify(plan, model, [batch()], loss=loss, optimizer=adamw(model)).ok


def test_the_inside_exists_for_one_tile() -> None:
    model, x = network(), batch(1024)
    plans = ([ss.Checkpointing("residual-1")], [ss.Checkpointing("residual-1"), ss.TiledMLP(256)])
    whole, tiles = (
        predict_step(p, model, x, loss=loss, optimizer=adamw(model)).peak_bytes for p in plans
    )
    assert whole - tiles > 3 * 4096 * 4 * WIDE * 4  # of five: two products, two factors, a gradient


def test_it_can_be_taken_back() -> None:
    model = network()
    with pytest.raises(InputError):
        ss.apply([ss.TiledMLP(16), ss.Microbatching(2, accumulate="compensated"),
                  ss.GradientRelease()], model, adamw(model), loss=loss)  # fmt: skip
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_settings() -> None:
    assert ss.TiledMLP(0) == ss.TiledMLP() and ss.TiledMLP(8).short() == "MLPs in tiles of 8"
    with pytest.raises(InputError, match="not a whole number from 1"):
        ss.TiledMLP(-1)


class DropsWeights(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped = nn.functional.dropout(self.up.weight, 0.5, self.training)
        return self.down(torch.tanh(x @ dropped.t()))


def test_weights_that_are_drawn_at_random_are_seen() -> None:
    assert list(positionwise(network(DropsWeights).eval())) == []


@pytest.mark.slow
def test_it_is_planned_where_mlps_are_the_peak() -> None:
    """Not where there is room; where nothing else fits."""
    model, x = network(blocks=4), batch(2048)
    how: dict[str, Any] = {"loss": loss, "optimizer": "adamw", "allow": "lossless"}
    best = ss.plan(model, x, budget="1 GB", **how)
    assert "mlp_tiles" not in {technique.name for technique in best.techniques}
    x = x.reshape(1, -1, WIDE)  # one example: nothing to cut
    with pytest.raises(ss.BudgetError) as error:
        ss.plan(model, x, budget=100_000, **how)
    assert error.value.smallest_bytes is not None
    tight = ss.plan(model, x, budget=int(error.value.smallest_bytes * 1.05), **how)
    assert "mlp_tiles" in {technique.name for technique in tight.techniques}
