"""`plan` and `profile` predict one step: the same plan needs the same bytes, to the byte."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoestring as ss
from shoestring.memory.work import Work
from shoestring.planning.planner import Planner
from shoestring.planning.search import Candidate
from shoestring.planning.settings import Setting
from shoestring.techniques.offers import Offer

WIDTH, WORDS = 64, 512


class Reader(nn.Module):
    """An embedding, residual layers and a large head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(),
                          nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)
        )  # fmt: skip
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def loss(model: nn.Module, words: Tensor) -> Tensor:
    """Of the words themselves."""
    return F.cross_entropy(model(words).flatten(0, 1), words.flatten())


@cache
def given() -> tuple[nn.Module, Tensor]:
    """One model and batch for all tests."""
    torch.manual_seed(0)
    return Reader(), torch.randint(WORDS, (40, 16))


@cache
def planner(accounting: str, device: str | None, optimizer: str) -> Planner:
    """It predicts what `plan` returns."""
    model, batch = given()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Planner(
            model, batch, loss=loss, optimizer=optimizer, accounting=accounting, device=device
        )


PLANS: dict[str, list[ss.Technique]] = {
    "plain": [],
    "lossless": [ss.Checkpointing("every-4")],
    "microbatches": [ss.Microbatching(10)],
    "a smaller last microbatch": [ss.Checkpointing("no-bn"), ss.Microbatching(12)],
    "offload": [ss.Offload()],
    "offload of a part": [ss.Offload(share=0.5), ss.Microbatching(20)],
    "released gradients": [ss.GradientRelease()],
    "released in parts": [ss.GradientRelease(), ss.Microbatching(10)],
    "chunked loss": [ss.ChunkedLoss()],
    "near": [ss.Precision("bf16"), ss.Microbatching(20)],
    "near with a loss scale": [ss.Precision("fp16"), ss.Checkpointing("every-4")],
    "8-bit state": [ss.Precision("bf16"), ss.OptimizerState(8), ss.ChunkedLoss()],
    "lossy": [ss.Sparsity(0.3)],
}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PLANS)
def test_the_device_accounting(name: str, device: str, optimizer: str) -> None:
    same("device", device, optimizer, PLANS[name])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_fused_update(optimizer: str) -> None:
    for others in ([], [ss.Checkpointing("every-4"), ss.Microbatching(12)]):
        same("device", "cuda", optimizer, [ss.FusedUpdate(), *others])


@pytest.mark.parametrize("name", sorted(PLANS.keys() - {"a smaller last microbatch"}))
def test_the_fundamental_accounting(name: str) -> None:
    """It refuses microbatches of different sizes."""
    same("fundamental", None, "adamw", PLANS[name])


def same(accounting: str, device: str | None, optimizer: str, techniques: list[Any]) -> None:
    """What the planner predicts for a plan, and what `profile` says of it."""
    model, batch = given()
    asked: Any = {"accounting": accounting, "device": device, "optimizer": optimizer}
    setting = Setting(tuple(Offer(technique, "") for technique in techniques))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ss.NoEffectWarning)
        found = ss.profile(model, batch, loss=loss, techniques=techniques, **asked)
        predicted = planner(accounting, device, optimizer).estimates.predict(
            Candidate(setting, None, 0, 0.0, Work())
        )
    assert predicted is not None
    assert predicted.peak_bytes == found.peak_bytes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_plan_returns(device: str) -> None:
    model, batch = given()
    asked: Any = {"loss": loss, "optimizer": "adamw", "accounting": "device", "device": device}
    plain = ss.profile(model, batch, **asked).peak_bytes
    plan = ss.plan(model, batch, **asked, budget=int(0.9 * plain), budget_of="allocated")
    assert plan.techniques
    assert plan.plain.peak_bytes == plain
    assert (
        plan.predicted.peak_bytes == ss.profile(model, batch, **asked, techniques=plan).peak_bytes
    )
