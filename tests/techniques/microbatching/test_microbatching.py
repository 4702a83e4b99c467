"""Microbatched gradients are those of the whole batch, or of its groups under BatchNorm."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoestring.errors import InputError, NoEffectWarning
from shoestring.step.apply import apply
from shoestring.techniques import Microbatching, microbatching
from shoestring.techniques.base import Technique
from shoestring.trace.tracing import trace_model
from techniques.small_models import SMALL

torch.set_num_threads(1)
TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-12}


def gradients(
    model: nn.Module, batch: Any, loss: Any, *techniques: Technique
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one step, seen by the optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[str, torch.Tensor] = {}

    def look(*_: Any) -> None:
        seen.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    optimizer.register_step_pre_hook(look)
    return apply(techniques, model, optimizer, loss=loss)(batch), seen


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys() and a
    scale = max(g.abs().max().item() for g in a.values())
    for name in a:
        assert (a[name] - b[name]).abs().max() <= tolerance * max(scale, 1.0), name


def floating(batch: Any, dtype: torch.dtype) -> Any:
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in batch)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 4, 5])
@pytest.mark.parametrize("accumulate", ["parameter", "compensated"])
@pytest.mark.parametrize("name", ["tied", "lstm", "mlp"])
def test_gradients_are_those_of_the_whole_batch(name, accumulate, size, dtype):
    torch.manual_seed(0)
    small = SMALL[name]
    model, batch = small.build().to(dtype), floating(small.batch(), dtype)
    twin = copy.deepcopy(model)
    whole = gradients(model, batch, small.loss)
    parts = gradients(twin, batch, small.loss, Microbatching(size, accumulate=accumulate))
    assert torch.allclose(whole[0], parts[0], rtol=TOLERANCES[dtype] * 10)
    close(whole[1], parts[1], TOLERANCES[dtype])


def test_a_transformer_of_pytorch_itself():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    batch = {"x": torch.randn(7, 5, 8, dtype=torch.float64), "mask": torch.ones(7, 5).bool()}
    twin = copy.deepcopy(model)

    def loss(m: nn.Module, b: Any) -> torch.Tensor:
        return m(b["x"], src_key_padding_mask=~b["mask"]).square().mean()

    close(
        gradients(model, batch, loss)[1], gradients(twin, batch, loss, Microbatching(3))[1], 1e-12
    )


@pytest.mark.parametrize("size", [6, 7, 100])
@pytest.mark.parametrize("accumulate", ["parameter", "compensated"])
@pytest.mark.parametrize("simulated", [False, True])
def test_a_microbatch_that_is_the_batch_changes_no_bit(size, accumulate, simulated):
    if simulated and accumulate == "compensated":
        pytest.skip("refused")
    torch.manual_seed(0)
    small = SMALL["cnn"]
    model, batch = small.build(), small.batch()
    twin = copy.deepcopy(model)
    plain = apply([], model, torch.optim.Adam(model.parameters()), loss=small.loss)
    technique = Microbatching(size, accumulate=accumulate, simulated=simulated)
    tried = apply([technique], twin, torch.optim.Adam(twin.parameters()), loss=small.loss)
    for _ in range(3):
        assert torch.equal(plain(batch), tried(batch))
    for (name, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def token_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-1)


def token_batch(kind: type = dict) -> Any:
    tokens = torch.arange(6 * 7).reshape(6, 7) % 50
    labels = tokens.clone()
    for row, length in enumerate([7, 1, 3, 2, 7, 5]):
        labels[row, length:] = -1
    return kind({"tokens": tokens, "labels": labels, "name": "six sentences", "scale": 2.0})


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_loss_averaged_over_tokens_is_weighted_by_tokens(kind, as_tensor):
    torch.manual_seed(0)
    model = SMALL["tied"].build().double()
    twins = copy.deepcopy(model), copy.deepcopy(model)
    batch = token_batch(kind)

    def units(part: Any) -> Any:
        count = (part["labels"] != -1).sum()
        assert part["name"] == "six sentences"
        return count if as_tensor else count.item()

    whole = gradients(model, batch, token_loss)
    by_tokens = gradients(twins[0], batch, token_loss, Microbatching(4, units=units))
    assert torch.allclose(whole[0], by_tokens[0], rtol=1e-12)
    close(whole[1], by_tokens[1], 1e-12)
    by_examples = gradients(twins[1], batch, token_loss, Microbatching(4, units="examples"))
    assert not torch.allclose(whole[0], by_examples[0], rtol=1e-3)


@pytest.mark.parametrize("counted", ["number", "tensor", "on a device"])
def test_a_part_without_units_adds_nothing(counted, monkeypatch):
    if counted == "on a device":  # a tensor whose value is not asked for
        monkeypatch.setattr(microbatching, "readable", lambda tensor: False)
        monkeypatch.setattr("shoestring.techniques.splitting.units.readable", lambda tensor: False)
    torch.manual_seed(0)
    model = SMALL["tied"].build().double()
    twin = copy.deepcopy(model)
    batch = token_batch()
    batch["labels"][2:4] = -1

    def units(part: Any) -> Any:
        count = (part["labels"] != -1).sum()
        return count.item() if counted == "number" else count

    technique = Microbatching(2, weight=units)
    whole, parts = (
        gradients(model, batch, token_loss),
        gradients(twin, batch, token_loss, technique),
    )
    assert torch.allclose(whole[0], parts[0], rtol=1e-12)
    close(whole[1], parts[1], 1e-12)
    batch["labels"][:] = -1
    if counted == "on a device":
        assert gradients(twin, batch, token_loss, technique)[0].isnan()
        return
    with pytest.raises(InputError, match="add up to 0"):
        gradients(twin, batch, token_loss, technique)


def test_nested_batches_are_cut_and_scalars_passed_along():
    seen = []
    model = nn.Linear(2, 1)

    def loss(m: nn.Module, b: Any) -> torch.Tensor:
        (x, extra), words, factor = b
        seen.append((x.shape[0], extra["y"].shape[0], words, factor.item()))
        return m(x).mean()

    batch = ((torch.randn(5, 2), {"y": torch.zeros(5)}), "words", torch.tensor(3.0))
    gradients(model, batch, loss, Microbatching(2, units="examples"))
    assert seen == [(2, 2, "words", 3.0), (2, 2, "words", 3.0), (1, 1, "words", 3.0)]
    with pytest.raises(InputError, match="differ in their first dimension"):
        gradients(model, (torch.zeros(5, 2), torch.zeros(4)), loss, Microbatching(2))


def grouped_reference(
    model: nn.Module, batch: Any, loss: Any, size: int
) -> dict[str, torch.Tensor]:
    """One sum of losses, group by group: autograd adds, weights are written out."""
    inputs, labels = batch
    total = sum(
        loss(model, (inputs[i : i + size], labels[i : i + size])) * len(labels[i : i + size])
        for i in range(0, len(labels), size)
    )
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(total / len(labels), parameters), strict=True))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ["cnn", "residual"])
def test_batch_norm_sees_the_statistics_of_each_group(name, size):
    torch.manual_seed(0)
    small = SMALL[name]
    model, batch = small.build().double(), floating(small.batch(), torch.float64)
    twin = copy.deepcopy(model)
    expected = grouped_reference(model, batch, small.loss, size)
    _, seen = gradients(twin, batch, small.loss, Microbatching(size))
    close(expected, seen, 1e-12)
    for (key, a), b in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b), key


def test_predictions_still_ask_for_whole_microbatches():
    batch = (torch.zeros(10, 2), torch.zeros(10))
    assert Microbatching(5).prepare(batch)[0].shape == (5, 2)
    assert Microbatching(5, simulated=True).prepare(batch)[0].shape == (10, 2)
    with pytest.raises(InputError, match="a batch of 10 does not divide into microbatches of 4"):
        Microbatching(4).prepare(batch)


def test_compensation_is_counted():
    small = SMALL["mlp"]
    trace = trace_model(small.build(), small.batch(), loss=small.loss, optimizer="sgd")
    assert Microbatching(2).predict(trace) is trace
    more = Microbatching(2, accumulate="compensated").predict(trace)
    for before, after in zip(trace.parameters, more.parameters, strict=True):
        assert after.state_elements == (*before.state_elements, before.numel)


@pytest.mark.parametrize(
    "settings",
    [
        {"size": 0}, {"size": True}, {"size": 2.0}, {"size": 2, "weight": "to kens"},
        {"size": 2, "units": 3},
        {"size": 2, "accumulate": "double"},
        {"size": 2, "accumulate": "compensated", "simulated": True},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(InputError):
        Microbatching(**settings)


def test_a_batch_that_cannot_be_cut_is_named_once() -> None:
    class Pair:
        def __init__(self) -> None:
            self.inputs = torch.randn(8, 3)

    model = nn.Linear(3, 1)
    step = apply(
        [Microbatching(2)], model, torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda m, pair: m(pair.inputs).mean(),
    )  # fmt: skip
    with pytest.warns(NoEffectWarning, match="a batch of type Pair has no tensor with a first"):
        step(Pair())
    step(Pair())
