"""Other people's code beside the plain model: right forms pass, wrong ones are named."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoestring.errors import InputError
from shoestring.techniques.claims import Level
from shoestring.verification.verify import verify
from techniques.small_models import Attention

torch.set_num_threads(1)


class Words(nn.Module):
    """A small language model that may checkpoint its layers."""

    def __init__(self, *, recompute: bool = False, keep_draws: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(Attention(16, 0.1) for _ in range(3))
        self.leave = nn.Linear(16, 50)
        self.recompute, self.keep_draws = recompute, keep_draws

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=self.keep_draws)
            else:
                x = layer(x)
        return self.leave(x)


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])


BATCH = torch.arange(6 * 9).reshape(6, 9) % 50


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def compared(model: nn.Module, against: Any, **others: Any) -> Any:
    given = {"optimizer": sgd(model), "loss": loss, "steps": 2, **others}
    return verify([], model, [BATCH], against=against, **given)


def test_gradient_checkpointing() -> None:
    torch.manual_seed(0)
    plain, recomputed = Words(), Words(recompute=True)  # weights are carried over
    found = compared(recomputed, plain)
    assert found.ok and found["gradients"].found is Level.EQUAL
    assert found.predicted_peak_bytes is None and "beside the model given" in str(found)
    wrong = compared(Words(recompute=True, keep_draws=False), plain)
    assert not wrong.ok and not wrong["gradients"].ok


def test_an_optimizer_of_its_own() -> None:
    torch.manual_seed(0)
    model = Words()
    other = copy.deepcopy(model)
    fused = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    slow = torch.optim.AdamW(other.parameters(), lr=1e-3, foreach=False)
    assert compared(model, (other, slow), optimizer=fused).ok
    faster = torch.optim.AdamW(other.parameters(), lr=1.1e-3)
    found = compared(model, (other, faster), optimizer=fused)
    assert found["gradients"].ok and not found["parameters"].ok


def test_a_loss_of_its_own() -> None:
    torch.manual_seed(0)
    model = Words()

    def fused(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens[:, :-1]).flatten(0, 1)
        return -logits.log_softmax(-1).gather(1, tokens[:, 1:].reshape(-1, 1)).mean()

    other = copy.deepcopy(model)
    assert compared(model, (other, sgd(other), fused)).ok

    def wrong(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return fused(model, tokens) * 1.01

    assert not compared(model, (other, sgd(other), wrong)).ok


class Wrapped(nn.Module):
    """What torch.compile and DDP do to names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.module(tokens)


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.up, self.down = nn.Linear(2, 50, bias=False), nn.Linear(16, 2, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def test_names_are_compared_without_wrappers() -> None:
    torch.manual_seed(0)
    assert compared(Wrapped(Words()), Words()).ok


def test_parameters_of_one_model_alone_are_unproven() -> None:
    torch.manual_seed(0)
    plain = Words()
    adapted = Words()
    adapted.leave = LowRank(adapted.leave)  # type: ignore[assignment]
    optimizer = torch.optim.SGD(
        [p for n, p in adapted.named_parameters() if "up" not in n and "down" not in n], lr=0.1
    )
    found = compared(adapted, plain, optimizer=optimizer, steps=1)
    assert not found.ok
    assert [c.what for c in found.comparisons if not c.ok] == ["unshared parameters"]
    assert "leave.down.weight" in found["unshared parameters"].why
    named = {"optimizer": optimizer, "steps": 1, "accept": "unshared parameters"}
    assert compared(adapted, plain, **named).ok


def test_what_cannot_be_compared() -> None:
    with pytest.raises(InputError, match="neither a model"):
        compared(Words(), ("no model",))
    with pytest.raises(InputError, match="shape"):
        narrow = Words()
        narrow.leave = nn.Linear(16, 40)
        compared(Words(), narrow)
