"""Functions that people set on modules, in copies of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoestring as ss
from shoestring.trace.copies import copied_model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(torch.relu(self.norm(x)))


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _again(block: nn.Module) -> None:
    forward = block.forward

    def again(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False)

    block.forward = again


def checkpointed() -> nn.Module:
    """Blocks in blocks, as people wrap them for gradient checkpointing."""
    model = nn.Sequential(Stage(), Stage())
    for stage in model:
        for layer in stage.layers:
            _again(layer)
        _again(stage)
    return model


class Scaled(nn.Module):
    """With an activation that reads a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(16))
        self.activation = lambda x: torch.tanh(x) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


def hooked() -> nn.Module:
    """With hooks that read a parameter and a module elsewhere."""
    model = nn.Sequential(Stage(), Stage(), nn.Linear(16, 16))
    gate = model[2].weight
    model[0].register_forward_hook(lambda module, args, out: out @ gate)
    model[1].register_forward_pre_hook(lambda module, args: (model[2](args[0]),))
    return model


def bound() -> nn.Module:
    """With a forward pass that is a partial, and has a module as a default and in a list."""
    model = nn.Sequential(Stage(), Stage())
    others = [model[0].layers[0].linear]

    def forward(self: Any, x: torch.Tensor, *, norm: nn.Module = model[0].layers[0].norm) -> Any:
        return others[0](self.linear(norm(x)))

    block = model[1].layers[1]
    block.forward = functools.partial(forward, block)
    return model


BUILD: list[Callable[[], nn.Module]] = [checkpointed, Scaled, hooked, bound]


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("build", BUILD)
def test_a_copy_trains_itself(build: Callable[[], nn.Module]) -> None:
    model, x = build(), torch.randn(4, 16)
    made = copied_model(model)
    _loss(made, x).backward()
    assert all(p.grad is None for p in model.parameters())
    _loss(model, x).backward()
    for p, other in zip(model.parameters(), made.parameters(), strict=True):
        assert (p.grad is None) == (other.grad is None)
        assert p.grad is None or torch.equal(p.grad, other.grad)


def test_what_holds_nothing_of_the_model_stays_itself() -> None:
    model, seen = nn.Linear(4, 4), []

    def note(module: Any, args: Any, out: Any) -> None:
        seen.append(out.shape)

    def repeat(times: int) -> int:
        return times and repeat(times - 1)  # it holds itself

    model.register_forward_hook(note)
    model.repeat = repeat
    made = copied_model(model)
    assert made.repeat is repeat
    assert list(made._forward_hooks.values()) == [note]


@pytest.mark.parametrize("build", BUILD)
def test_such_models_are_planned_and_verified(build: Callable[[], nn.Module]) -> None:
    model, x = build(), torch.randn(64, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    given: dict[str, Any] = {"loss": _loss, "optimizer": optimizer}
    profile = ss.profile(model, x, accounting="device", **given)
    assert profile.peak_bytes == ss.measure(model, x, **given).peak_bytes
    plan = ss.plan(model, x, budget=int(0.9 * profile.peak_bytes), allow="lossless", **given)
    assert plan.techniques
    assert ss.verify(plan, model, [x], **given).ok
