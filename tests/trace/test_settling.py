"""State that grows over the first steps: a step is predicted as later ones are."""

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.step.predict import predict_step


class Bank(nn.Module):
    """Compares with what earlier batches left."""

    def __init__(self, kind: str, most: int = 12) -> None:
        super().__init__()
        self.kind, self.most = kind, most
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64))
        self.bank: Any = deque(maxlen=most) if kind == "deque" else []
        self.mean: Any = None
        self.register_buffer("queue", torch.zeros(0, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.net(x)
        kept = h.detach()
        if self.kind == "mean":  # the first pass takes another way
            self.mean = kept.repeat(1, 8) if self.mean is None else 0.9 * self.mean + kept.sum()
            return h * self.mean[:, :64]
        if self.kind == "buffer":
            made = h @ torch.cat([self.queue, kept]).T
            self.queue = torch.cat([self.queue, kept])[-32 * self.most :]
            return made
        made = h @ torch.cat([*self.bank, kept]).T
        if self.kind == "list" and len(self.bank) == self.most:
            self.bank.pop(0)
        self.bank.append(kept)
        return made


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("kind", ["deque", "list", "buffer", "mean"])
def test_a_fresh_model_is_predicted_as_it_will_be(kind: str) -> None:
    model, x = Bank(kind), torch.randn(32, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"loss": loss, "optimizer": optimizer}
    predicted = ss.profile(model, x, accounting="device", **given).peak_bytes
    plan = ss.plan(model, x, budget=2 * predicted, allow="lossless", **given)
    assert plan.plain.peak_bytes == predicted
    for _ in range(15):
        loss(model, x).backward()
    # What `measure` puts back afterwards, it keeps: the entry that goes.
    spare = 32 * 64 * 4 if kind in ("deque", "list") else 0
    assert ss.measure(model, x, **given).peak_bytes - spare == predicted


def test_state_that_does_not_stop_to_grow_is_told() -> None:
    model, x = Bank("deque", most=100), torch.randn(32, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(ss.UnprovenWarning, match="keeps more with every step"):
        ss.plan(model, x, loss=loss, optimizer=optimizer, budget="100 MB", allow="lossless")


def test_features_that_hooks_collect() -> None:
    """Those of the part before are there until the next part's take their place."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
    model, x = nn.Sequential(*layers), torch.randn(256, 64)
    kept: dict[int, torch.Tensor] = {}
    for number in (1, 2, 3):
        model[number].register_forward_hook(lambda m, a, out, n=number: kept.update({n: out}))

    def total(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() + sum(h.square().mean() for h in kept.values())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = [ss.Microbatching(32)]
    predicted = predict_step(plan, model, x, loss=total, optimizer=optimizer).peak_bytes
    step = ss.apply(plan, model, optimizer, loss=total)
    step(x)
    assert step.measure(x).peak_bytes == pytest.approx(predicted, abs=100)
