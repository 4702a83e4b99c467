"""The report's simulation gives the numbers of true microbatching."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from shoestring.errors import InputError, NoEffectWarning
from shoestring.step.apply import apply
from shoestring.techniques import Checkpointing, Microbatching
from techniques.small_models import SMALL

torch.set_num_threads(1)


def trained(name: str, *techniques: Any, momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    small = SMALL[name]
    model = small.build().double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = momentum
    inputs, labels = small.batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = apply(techniques, model, optimizer, loss=small.loss)
    for _ in range(3):
        step((inputs.double(), labels))
    return model


def same(a: nn.Module, b: nn.Module, tolerance: float) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.allclose(x.double(), y.double(), rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
def test_simulated_is_true_microbatching(size, momentum):
    true = trained("residual", Microbatching(size), momentum=momentum)
    simulated = trained("residual", Microbatching(size, simulated=True), momentum=momentum)
    same(true, simulated, 1e-10)
    plain = trained("residual", momentum=momentum)
    with pytest.raises(AssertionError):
        same(true, plain, 1e-3)


@pytest.mark.parametrize("strategy", ["residual-1", "residual-2*", "every-2", "no-bn"])
def test_simulated_under_checkpointing(strategy):
    technique = Microbatching(4, simulated=True)
    same(
        trained("residual", technique),
        trained("residual", technique, Checkpointing(strategy)),
        1e-10,
    )


@pytest.mark.parametrize("strategy", ["residual-1", "residual-2*", "every-2", "no-bn"])
@pytest.mark.parametrize("accumulate", ["parameter", "compensated"])
def test_true_under_checkpointing(strategy, accumulate):
    technique = Microbatching(4, accumulate=accumulate)
    same(
        trained("residual", technique),
        trained("residual", technique, Checkpointing(strategy)),
        1e-12,
    )


def test_running_statistics_move_once_per_microbatch():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3).double()
    x = torch.randn(10, 3, dtype=torch.float64)
    expected = norm.running_mean.clone()
    for start in (0, 4, 8):
        expected = 0.9 * expected + 0.1 * x[start : start + 4].mean(0)
    for simulated in (False, True):
        model = copy.deepcopy(norm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        technique = Microbatching(4, simulated=simulated)
        apply([technique], model, optimizer, loss=lambda m, b: m(b).square().mean())(x)
        assert torch.allclose(model.running_mean, expected, rtol=1e-12)
        assert model.num_batches_tracked == 3


def test_outside_of_a_step_the_model_is_itself():
    torch.manual_seed(0)
    small = SMALL["cnn"]
    model, (inputs, labels) = small.build(), small.batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    twin = copy.deepcopy(model)
    step = apply([Microbatching(2, simulated=True)], model, optimizer, loss=small.loss)
    assert torch.equal(model(inputs), twin(inputs))
    step((inputs, labels))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(inputs), twin(inputs))
    assert torch.equal(model.eval()(inputs), twin.eval()(inputs))


def test_rows_that_belong_to_no_example_are_refused():
    model = nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = apply(
        [Microbatching(2, simulated=True)], model, optimizer, loss=lambda m, b: m(b[:-1]).mean()
    )
    with pytest.raises(InputError, match="sees 4 rows of 5 examples"):
        step(torch.randn(5, 3))


def test_a_model_without_batch_norm_is_told():
    small = SMALL["mlp"]
    model = small.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(NoEffectWarning, match="no BatchNorm"):
        apply([Microbatching(2, simulated=True)], model, optimizer, loss=small.loss)


def test_a_failure_later_leaves_the_model_as_it_was():
    small = SMALL["cnn"]
    model = small.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    from shoestring.techniques.base import Setup
    from shoestring.techniques.microbatching.simulate import GroupedNormalization

    setup = Setup(model, optimizer, lambda b: b, lambda b: [(b, 1.0)], lambda v: None, lambda: None)
    GroupedNormalization(setup, 2)
    assert "forward" in model[1].__dict__
    for undo in reversed(setup.undo):
        undo()
    assert "forward" not in model[1].__dict__


def test_a_pickled_model_normalizes_whole_batches():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = apply([Microbatching(2, simulated=True)], model, optimizer, loss=lambda m, b: m(b).sum())
    batch = torch.randn(4, 3)
    step(batch)
    copied = pickle.loads(pickle.dumps(model))
    assert torch.equal(copied(batch), model(batch))
    assert torch.equal(copied[1].running_var, model[1].running_var)
