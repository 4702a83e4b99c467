"""The contract, over every technique and every pair of them, on six small models."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shoestring.errors import InputError, NoEffectWarning
from shoestring.step.apply import apply
from shoestring.step.predict import predict_step
from shoestring.step.step import Step
from shoestring.techniques import Checkpointing, Microbatching, Precision, Sparsity, Technique
from techniques.small_models import SMALL

TOLERANCE = 0.02
"""Between the predicted and the measured peak on the CPU."""

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
}
SINGLES: dict[str, Technique] = {
    "density 0.3": Sparsity(0.3),
    "fp16": Precision("fp16"),
    "bf16": Precision("bf16"),
    "microbatch 2": Microbatching(2),
    "compensated": Microbatching(2, accumulate="compensated"),
    "no-bn": Checkpointing("no-bn"),
    "every-2": Checkpointing("every-2"),
    "residual-2*": Checkpointing("residual-2*"),
}
PER_BLOCK = {
    "residual": Checkpointing("per-block", schedule=("[[cheap], keep]", "cheap", "recompute")),
    "transformer": Checkpointing("per-block", schedule=("keep", "[cheap, [keep], cheap]")),
    "tied": Checkpointing("per-block", schedule=("[keep*2]", "cheap")),
}
FOR_ADAM = ("density 0.3", "fp16", "bf16", "microbatch 2", "every-2", "residual-2*")
NEUTRAL: dict[str, Technique] = {
    "density 1": Sparsity(1.0),
    "fp32": Precision("fp32"),
    "microbatch of the batch": Microbatching(6),
    "no checkpointing": Checkpointing("none"),
}
pytestmark = pytest.mark.filterwarnings("ignore::shoestring.errors.NoEffectWarning")


def pairs(name: str) -> list[tuple[str, ...]]:
    """Each pair of kinds once a model, the settings in turn from model to model."""
    turn = list(SMALL).index(name)
    checkpointing = ("residual-2*" if turn % 2 else "residual-1") if SMALL[name].has_blocks else (
        "no-bn" if turn % 2 else "every-2"
    )  # fmt: skip
    kinds = ("density 0.3", ("fp16", "bf16")[turn % 2], checkpointing, "microbatch 2")
    return list(itertools.combinations(kinds, 2))


def cases() -> Iterator[Any]:
    """(model, techniques, optimizer)."""
    for name, small in SMALL.items():
        for optimizer, singles in (("sgd", tuple(SINGLES)), ("adam", FOR_ADAM)):
            for single in singles:
                if small.has_blocks or not single.startswith("residual"):
                    yield case(name, (single,), optimizer)
        for pair in pairs(name):
            yield case(name, pair, "sgd")
        if name in PER_BLOCK:
            yield case(name, ("per-block",), "adam")
            yield case(name, ("fp16", "per-block"), "sgd")


def case(name: str, settings: tuple[str, ...], optimizer: str) -> Any:
    """All of the quick models are quick; of the others, each setting once."""
    slow = name in ("transformer", "tied") and (optimizer == "adam" or len(settings) > 1)
    slow |= name == "residual" and optimizer == "adam"
    slow |= name == "tied" and settings[0] not in ("density 0.3", "residual-2*")
    marks = [pytest.mark.slow] * slow
    identity = "-".join((name, *settings, optimizer))
    return pytest.param(name, settings, optimizer, id=identity, marks=marks)


def technique(setting: str, name: str) -> Technique:
    if setting == "per-block":
        return PER_BLOCK[name]
    return SINGLES.get(setting) or Checkpointing(setting)


@pytest.mark.parametrize(("name", "settings", "optimizer"), list(cases()))
def test_the_predicted_peak_is_measured(
    name: str, settings: tuple[str, ...], optimizer: str
) -> None:
    small = SMALL[name]
    torch.manual_seed(0)
    model, batch = small.build(), small.batch()
    own = OPTIMIZERS[optimizer](model)
    chosen = [technique(setting, name) for setting in settings]
    predicted = predict_step(chosen, model, batch, loss=small.loss, optimizer=own).peak_bytes
    step = apply(chosen, model, own, loss=small.loss)
    step(batch)
    assert predicted == pytest.approx(step.measure(batch).peak_bytes, rel=TOLERANCE)


def test_a_prediction_changes_nothing() -> None:
    small = SMALL["transformer"]
    model, batch = small.build(), small.batch()
    optimizer = OPTIMIZERS["sgd"](model)
    before = everything(model, optimizer)
    predict_step(list(SINGLES.values())[:2], model, batch, loss=small.loss, optimizer=optimizer)
    assert_same(before, everything(model, optimizer))


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and buffers by name, what each module is, optimizer state, random streams."""
    return {
        "model": copy.deepcopy(dict(model.state_dict())),
        "modules": {n: (type(m), m.__dict__.get("forward")) for n, m in model.named_modules()},
        "parameters": {name: id(p) for name, p in model.named_parameters()},
        "hooks": {n: len(p._post_accumulate_grad_hooks or ()) for n, p in model.named_parameters()},
        "gradients": {n: copy.deepcopy(p.grad) for n, p in model.named_parameters()},
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "streams": (torch.get_rng_state(), random.getstate()),
    }


def assert_same(expected: Any, found: Any) -> None:
    """Equal to the bit, whatever it is."""
    if isinstance(expected, torch.Tensor):
        assert expected.dtype == found.dtype and torch.equal(expected, found)
    elif isinstance(expected, dict):
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert_same(value, found[key])
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            assert_same(one, other)
    else:
        assert expected == found


def train(name: str, chosen: list[Technique], optimizer: str) -> tuple[Step, list[torch.Tensor]]:
    small = SMALL[name]
    torch.manual_seed(0)
    model, batch = small.build(), small.batch()
    step = apply(chosen, model, OPTIMIZERS[optimizer](model), loss=small.loss)
    return step, [step(batch) for _ in range(3)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("setting", [*NEUTRAL, "all of them"])
@pytest.mark.parametrize("name", SMALL)
def test_a_neutral_setting_changes_no_bit(name: str, setting: str, optimizer: str) -> None:
    small = SMALL[name]
    torch.manual_seed(0)
    model, batch = small.build(), small.batch()
    own = OPTIMIZERS[optimizer](model)
    losses = []
    for _ in range(3):
        loss = small.loss(model, batch)
        loss.backward()
        own.step()
        own.zero_grad()
        losses.append(loss.detach())
    stream = torch.get_rng_state()
    chosen = list(NEUTRAL.values()) if setting == "all of them" else [NEUTRAL[setting]]
    step, found = train(name, chosen, optimizer)
    assert_same(losses, found)
    assert_same(stream, torch.get_rng_state())
    assert_same(dict(model.state_dict()), dict(step.model.state_dict()))
    assert_same(own.state_dict(), step.optimizer.state_dict())


class Plain(nn.Module):
    """One parameter that nothing but an optimizer has a use for."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@pytest.mark.parametrize(
    ("model", "chosen"),
    [
        (Plain(), Sparsity(0.5)),
        (nn.BatchNorm1d(3), Sparsity(0.5)),
        (nn.BatchNorm1d(3), Precision("fp16")),
        (nn.BatchNorm1d(3), Precision("bf16")),
        (Plain(), Microbatching(2, simulated=True)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("error::shoestring.errors.NoEffectWarning")
def test_a_setting_that_matches_nothing_warns(model: nn.Module, chosen: Technique) -> None:
    with pytest.warns(NoEffectWarning) as said:
        apply([chosen], model, OPTIMIZERS["sgd"](model), loss=lambda m, b: m(b).sum())
    assert len(said) == 1


def warmed_up(name: str, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """With optimizer state and moved running statistics."""
    step, _ = train(name, [], optimizer)
    return step.model, step.optimizer


FAILING = [Checkpointing("residual-1", blocks=("nowhere",)), Checkpointing("residual-9*")]


@pytest.mark.parametrize("first", [Sparsity(0.3), Precision("fp16")], ids=str)
@pytest.mark.parametrize("name", ["cnn", "lstm", "mlp"])
def test_what_cannot_be_applied_changes_nothing(name: str, first: Technique) -> None:
    """Checked before anything is changed: an unknown block, no block at all."""
    model, optimizer = warmed_up(name, "sgd")
    before = everything(model, optimizer)
    for failing in FAILING:
        with pytest.raises(InputError, match=r"no module 'nowhere'|no repeated blocks"):
            apply([first, failing], model, optimizer, loss=SMALL[name].loss)
        assert_same(before, everything(model, optimizer))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", SMALL)
def test_what_fails_on_the_way_is_undone(
    name: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of four techniques raises after the other three are in place."""
    small = SMALL[name]
    model, own = warmed_up(name, optimizer)
    before = everything(model, own)

    def interrupted(self: Any, setup: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Microbatching, "apply", interrupted)
    checkpointing = Checkpointing("residual-2*" if small.has_blocks else "every-2")
    chosen = [Sparsity(0.3), Precision("fp16"), checkpointing, Microbatching(2)]
    with pytest.raises(KeyboardInterrupt):
        apply(chosen, model, own, loss=small.loss)
    assert_same(before, everything(model, own))
    monkeypatch.undo()

    expected, expected_own = warmed_up(name, optimizer)
    for trained, with_own in ((model, own), (expected, expected_own)):
        torch.manual_seed(3)
        apply([], trained, with_own, loss=small.loss)(small.batch())
    assert_same(dict(expected.state_dict()), dict(model.state_dict()))
    assert_same(expected_own.state_dict(), own.state_dict())
