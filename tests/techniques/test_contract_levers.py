"""The contract, for the techniques of the update and the loss, alone and in pairs with all."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shoestring as ss
from shoestring.errors import InputError
from shoestring.step.apply import apply
from shoestring.step.predict import predict_step
from shoestring.techniques import Technique
from techniques.small_models import SMALL as ALL_SMALL
from techniques.small_models import Language

SMALL = {**ALL_SMALL, "tied": replace(ALL_SMALL["tied"], build=lambda: Language(layers=2))}
"""Two layers are blocks as well as three, and every operation of every pair is traced."""
TOLERANCE = 0.01
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
}
NEW: dict[str, Technique] = {
    "chunked loss": ss.ChunkedLoss(8),
    "8-bit state": ss.OptimizerState(8, smallest=1),
    "4-bit state": ss.OptimizerState(4, smallest=1),
    "released": ss.GradientRelease(),
    "summed on the host": ss.GradientRelease(sum="host", smallest=1),
    "on the host": ss.Offload(smallest=1),
    "weights on the host": ss.WeightOffload(smallest=1),
    "4-bit activations": ss.ActivationBits(4, smallest=1),
    "activations on the host": ss.ActivationOffload("all", smallest=1),
    "inputs on the host": ss.ActivationOffload(smallest=1),
}
OTHERS: dict[str, Technique] = {
    "density 0.3": ss.Sparsity(0.3),
    "fp16": ss.Precision("fp16"),
    "bf16": ss.Precision("bf16"),
    "microbatch 2": ss.Microbatching(2),
    "compensated": ss.Microbatching(2, accumulate="compensated"),
    "no-bn": ss.Checkpointing("no-bn"),
    "every-2": ss.Checkpointing("every-2"),
    "residual-1*": ss.Checkpointing("residual-1*"),
}
REFUSED: dict[frozenset[str], str] = {
    frozenset({"density 0.3", "8-bit state"}): "sparsity moves",
    frozenset({"density 0.3", "4-bit state"}): "sparsity moves",
    frozenset({"density 0.3", "on the host"}): "sparsity moves",
    frozenset({"density 0.3", "weights on the host"}): "sparsity moves",
    frozenset({"fp16", "released"}): "before precision knows",
    frozenset({"fp16", "summed on the host"}): "before precision knows",
    frozenset({"compensated", "released"}): "compensated accumulation",
    frozenset({"compensated", "summed on the host"}): "compensated accumulation",
}
"""Pairs that do not go together → what the refusal says."""
pytestmark = pytest.mark.filterwarnings("ignore::shoestring.errors.NoEffectWarning")


def cases() -> Iterator[Any]:
    """Every one alone on every model; every pair on a model with blocks and one without."""
    for name, (alone, optimizer) in itertools.product(SMALL, itertools.product(NEW, OPTIMIZERS)):
        slow = [pytest.mark.slow] * (name in ("transformer", "residual"))
        yield case(name, (alone,), optimizer, slow)
    everything = {**NEW, **OTHERS}
    for one, other in itertools.combinations(everything, 2):
        kinds = {type(everything[one]), type(everything[other])}
        if (one in NEW or other in NEW) and len(kinds) == 2:
            for name, optimizer in (("tied", "adamw"), ("mlp", "sgd"), ("cnn", "adamw")):
                if SMALL[name].has_blocks or not {one, other} & {"residual-1*"}:
                    slow = [pytest.mark.slow] * (name == "tied" or name == "cnn")
                    yield case(name, (one, other), optimizer, slow)


def case(name: str, settings: tuple[str, ...], optimizer: str, marks: list[Any]) -> Any:
    """With a name that does not change when others are added."""
    named = f"{name}-{'+'.join(settings)}-{optimizer}".replace(" ", "_")
    return pytest.param(name, settings, optimizer, marks=marks, id=named)


@pytest.mark.parametrize(("name", "settings", "optimizer"), list(cases()))
def test_the_predicted_peak_is_measured(
    name: str, settings: tuple[str, ...], optimizer: str
) -> None:
    small = SMALL[name]
    torch.manual_seed(0)
    model, batch = small.build(), small.batch()
    own = OPTIMIZERS[optimizer](model)
    chosen = [{**NEW, **OTHERS}[setting] for setting in settings]
    given: dict[str, Any] = {"loss": small.loss, "optimizer": own}
    if why := REFUSED.get(frozenset(settings)):
        with pytest.raises(InputError, match=why):
            apply(chosen, model, own, loss=small.loss)
        return
    predicted = predict_step(chosen, model, batch, **given).peak_bytes
    step = apply(chosen, model, own, loss=small.loss)
    first = step(batch)
    assert predicted == pytest.approx(step.measure(batch).peak_bytes, rel=TOLERANCE)
    assert step.loss is not None and torch.isfinite(step.loss) and torch.isfinite(first)


@pytest.mark.parametrize("setting", [*NEW, *OTHERS])
def test_a_step_that_is_dropped_leaves_nothing(setting: str) -> None:
    """The collector does not see what hooks of parameters hold."""
    small = SMALL["residual"]
    model, batch = small.build(), small.batch()
    own = OPTIMIZERS["adamw"](model)
    step = apply([{**NEW, **OTHERS}[setting]], model, own, loss=small.loss)
    step(batch)
    left = [weakref.ref(held) for held in (model, own, next(model.parameters()), step._setup)]
    del model, own, step
    gc.collect()
    assert [held() for held in left] == [None] * 4


@pytest.mark.parametrize("setting", ["no-bn", "every-2", "residual-1*", "4-bit activations"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_step_that_fails_leaves_none_of_its_activations(setting: str, backward: bool) -> None:
    """Nodes that save their own output, and what the failed backward pass had not run yet."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if not backward and armed:
                raise torch.OutOfMemoryError("no more")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            if armed:
                raise torch.OutOfMemoryError("no more")
            return gradient

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm, self.two = nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = torch.sigmoid(self.norm(self.one(x))) * torch.tanh(self.one(x))
            return x + Fails.apply(self.two(torch.exp(-made)))

    armed = False
    model = nn.Sequential(*(Block() for _ in range(4)))
    step = apply(
        [{**NEW, **OTHERS}[setting]],
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, x: model(x).square().mean(),
    )
    x = torch.randn(512, 8)
    step(x)
    armed, made = True, Made()
    with made, pytest.raises(torch.OutOfMemoryError):
        step(x)
    gc.collect()
    assert made.left(512 * 8 * 4, model) == []


class Made(TorchDispatchMode):
    """Notes every tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[StorageWeakRef, int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._noted.append((StorageWeakRef(storage), storage.nbytes(), str(func)))
        return out

    def left(self, least: int, model: nn.Module) -> list[str]:
        """Operations whose outputs are still there, of so many bytes, and are not the model's."""
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        return [
            name
            for storage, nbytes, name in self._noted
            if nbytes >= least and not storage.expired() and storage.cdata not in own
        ]
