"""The contract, for the techniques of the update and the loss, alone and in pairs with all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shoestring as ss
from shoestring.errors import InputError
from shoestring.step.apply import apply
from shoestring.step.predict import predict_step
from shoestring.techniques import Technique
from techniques.small_models import SMALL

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
    "on the host": ss.Offload(smallest=1),
    "4-bit activations": ss.ActivationBits(4, smallest=1),
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
    frozenset({"fp16", "released"}): "before precision knows",
    frozenset({"compensated", "released"}): "compensated accumulation",
}
"""Pairs that do not go together → what the refusal says."""
pytestmark = pytest.mark.filterwarnings("ignore::shoestring.errors.NoEffectWarning")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cases() -> Iterator[Any]:
    """Every one alone on every model; every pair on a model with blocks and one without."""
    for name, (alone, optimizer) in itertools.product(SMALL, itertools.product(NEW, OPTIMIZERS)):
        slow = [pytest.mark.slow] * (name in ("transformer", "residual"))
        yield pytest.param(name, (alone,), optimizer, marks=slow)
    everything = {**NEW, **OTHERS}
    for one, other in itertools.combinations(everything, 2):
        kinds = {type(everything[one]), type(everything[other])}
        if (one in NEW or other in NEW) and len(kinds) == 2:
            for name, optimizer in (("tied", "adamw"), ("mlp", "sgd"), ("cnn", "adamw")):
                if SMALL[name].has_blocks or not {one, other} & {"residual-1*"}:
                    slow = [pytest.mark.slow] * (name == "tied" or name == "cnn")
                    yield pytest.param(name, (one, other), optimizer, marks=slow)


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
