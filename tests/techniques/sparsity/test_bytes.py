"""Measured bytes of model, gradients and optimizer state against the report's formula."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.errors import InputError, NoEffectWarning
from shoestring.lab.models.wide_resnet import wide_resnet
from shoestring.memory.fundamental import parameter_bytes
from shoestring.step.apply import apply
from shoestring.step.predict import predict_step
from shoestring.techniques import Sparsity
from shoestring.techniques.sparsity import sparse_tensors
from shoestring.trace.graph import Trace
from shoestring.trace.tracing import trace_model
from tiers import slow_but

from .small_models import CASES, OPTIMIZERS, build


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


BATCH = torch.randn(2, 3, 32, 32), torch.tensor([1, 2])


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trace_model(wide_resnet(28, 2), BATCH, loss=loss, optimizer="sgd")


def held_bytes(tensors: list[Tensor]) -> int:
    """By storages, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("density", [0.5, 0.3, 0.2, 0.1])
def test_no_more_than_the_report_s_formula(density: float, trace: Trace) -> None:
    model = wide_resnet(28, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    settings = Sparsity(density, schedule=((9, 1),), threshold=0.02)
    step = apply([settings], model, optimizer, loss=loss)
    step(BATCH)
    loss(model, BATCH).backward()
    parameters = list(model.parameters())
    index = [tensor.index for tensor in sparse_tensors(model).values()]
    predicted = parameter_bytes(settings.predict(trace))
    gradients = [p.grad for p in parameters if p.grad is not None]
    momentum = [s["momentum_buffer"] for s in optimizer.state.values()]
    assert held_bytes(gradients) == predicted.gradient_bytes
    assert held_bytes(momentum) == predicted.optimizer_state_bytes
    assert held_bytes([*parameters, *index]) <= predicted.model_bytes
    smallest = parameter_bytes(settings.predict(trace), "smallest")
    assert held_bytes([*parameters, *index]) == smallest.model_bytes


def test_predict_takes_the_names(trace: Trace) -> None:
    chosen = ("group1.0.conv1.weight", "linear.weight")
    predicted = Sparsity(0.5, tensors=chosen).predict(trace)
    assert {p.name for p in predicted.parameters if p.density < 1} == set(chosen)
    with pytest.raises(InputError, match="no parameter 'x'"):
        Sparsity(0.5, tensors=("x",)).predict(trace)
    with pytest.warns(NoEffectWarning):
        Sparsity(0.5, tensors=()).predict(trace)
    assert Sparsity(1.0).predict(trace) == trace


@pytest.mark.parametrize("density", slow_but(1, [0.3, 0.02]))
@pytest.mark.parametrize("case", CASES)
def test_the_predicted_peak_is_the_measured_one(case: str, density: float) -> None:
    """On fake tensors how many nonzeros lie in a chunk is a guess; these tensors are one chunk."""
    _, batch_of, loss = CASES[case]
    model, batch = build(case), batch_of(0)
    optimizer = OPTIMIZERS["adam"](model)
    predicted = predict_step([Sparsity(density)], model, batch, loss=loss, optimizer=optimizer)
    step = apply([Sparsity(density)], model, optimizer, loss=loss)
    step(batch)
    assert step.measure(batch).peak_bytes == predicted.peak_bytes


def test_the_predicted_peak_of_larger_tensors() -> None:
    model = wide_resnet(10, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    predicted = predict_step([Sparsity(0.3)], model, BATCH, loss=loss, optimizer=optimizer)
    step = apply([Sparsity(0.3)], model, optimizer, loss=loss)
    step(BATCH)
    assert step.measure(BATCH).peak_bytes == pytest.approx(predicted.peak_bytes, rel=1e-3)
