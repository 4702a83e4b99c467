"""What is refused before anything changes, and what is put back after a failure."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from shoestring.errors import InputError, NoEffectWarning
from shoestring.memory.storage import nonzero_count
from shoestring.step.apply import apply
from shoestring.techniques import Checkpointing, Sparsity
from shoestring.techniques.sparsity import sparse_tensors

from .small_models import CASES, OPTIMIZERS, build


@pytest.mark.parametrize("case", CASES)
def test_a_later_failure_undoes_it(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, batch_of, loss = CASES[case]
    model = build(case)
    optimizer = OPTIMIZERS["adam"](model)
    loss(model, batch_of(0)).backward()
    optimizer.step()  # gradients stay: they too must come back
    state, held = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    objects = {n: id(p) for n, p in model.named_parameters()}
    classes = [type(m) for m in model.modules()]

    def fail(self: Any, setup: Any) -> None:
        assert sparse_tensors(setup.model)
        raise ArithmeticError

    monkeypatch.setattr(Checkpointing, "apply", fail)
    with pytest.raises(ArithmeticError):
        apply([Sparsity(0.2), Checkpointing("every-1")], model, optimizer, loss=loss)
    assert [type(m) for m in model.modules()] == classes
    assert {n: id(p) for n, p in model.named_parameters()} == objects
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(model.state_dict()[n], t) for n, t in state.items())
    after = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert all(torch.equal(after[n], g) for n, g in gradients.items())
    now = optimizer.state_dict()["state"]
    for number, expected in held["state"].items():
        assert all(torch.equal(now[number][key], t) for key, t in expected.items())
    loss(model, batch_of(1)).backward()
    optimizer.step()


def test_what_is_wrong_is_said_before_anything_changes() -> None:
    loss = CASES["tied"][2]
    model = build("tied")
    optimizer = OPTIMIZERS["sgd"](model)
    with pytest.raises(InputError, match=r"no parameter 'nowhere\.weight'"):
        apply([Sparsity(0.2, tensors=("nowhere.weight",))], model, optimizer, loss=loss)
    with pytest.raises(InputError, match=r"tied to 'embed\.weight'"):
        apply([Sparsity(0.2, tensors=("output.weight",))], model, optimizer, loss=loss)
    norm = nn.LayerNorm(4)
    with pytest.warns(NoEffectWarning, match="no tensor to sparsify"):
        apply([Sparsity(0.2)], norm, torch.optim.SGD(norm.parameters()), loss=loss)
    limited = nn.Embedding(5, 5, max_norm=1.0)
    with pytest.raises(InputError, match="max_norm"):
        apply([Sparsity(0.2)], limited, torch.optim.SGD(limited.parameters()), loss=loss)
    with pytest.raises(InputError, match="Muon"):
        layer = nn.Linear(4, 4, bias=False)
        apply([Sparsity(0.2)], layer, torch.optim.Muon(layer.parameters()), loss=loss)
    apply([Sparsity(0.2)], model, optimizer, loss=loss)
    with pytest.raises(InputError, match="sparse already"):
        apply([Sparsity(0.2)], model, optimizer, loss=loss)


@pytest.mark.parametrize(
    "settings",
    [
        {"density": 0.0},
        {"density": 0.5, "method": "magic"},
        {"density": 0.5, "tensors": "weight"},
        {"density": 0.5, "frequency_multiplier": -1},
        {"density": 0.5, "schedule": ((100, 10), (50, 10))},
        {"density": 0.5, "schedule": ((100, 0),)},
    ],
)
def test_settings_that_mean_nothing(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Sparsity(**settings)


def test_only_the_tensors_named_and_any_of_them() -> None:
    """A bias and a normalization can be named too: they fall back to a dense tensor."""
    loss = CASES["convolutions"][2]
    model = build("convolutions")
    names = ("stem.weight", "stem.bias", "layers.0.bn1.weight", "head.weight")
    settings = Sparsity(0.5, tensors=names)
    step = apply([settings], model, OPTIMIZERS["sgd"](model), loss=loss)
    assert set(sparse_tensors(model)) == set(names)
    for tensor in sparse_tensors(model).values():
        assert tensor.nonzeros == nonzero_count(tensor.numel, 0.5)
    step(CASES["convolutions"][1](0))


def test_nothing_dense_is_kept_for_undoing() -> None:
    model = build("tied")
    dense = weakref.ref(model.embed.weight.data.untyped_storage())  # type: ignore[union-attr]
    step = apply([Sparsity(0.2)], model, OPTIMIZERS["sgd"](model), loss=CASES["tied"][2])
    assert dense() is None
    assert step.model is model
