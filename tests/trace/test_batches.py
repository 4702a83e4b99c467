"""Batches of every kind, and when one can stand in for another."""

from __future__ import annotations

import enum
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import shoestring as ss
from shoestring.step.apply import apply
from shoestring.techniques import Microbatching
from shoestring.trace.batches import form_of, map_tensors, tensors_of

Pair = namedtuple("Pair", "x y")


class Encoding(dict[str, Any]):
    """As collators and models return them."""


@dataclass(frozen=True)
class Record:
    x: Tensor
    y: Tensor
    name: str = ""


class Kind(enum.Enum):
    ONE = 1


X, Y = torch.arange(12.0).view(6, 2), torch.arange(6)
BATCHES: dict[str, Any] = {
    "tuple": (X, Y),
    "named": Pair(X, Y),
    "nested": [X, {"y": (Y, None)}],
    "ordered": OrderedDict(x=X, y=Y),
    "dict": Encoding(x=X, y=Y),
    "user dict": UserDict(x=X, y=Y),
    "dataclass": Record(X, Y),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_every_tensor_is_found_and_the_batch_stays_what_it_is(batch: Any) -> None:
    assert [t.shape for t in tensors_of(batch)] == [X.shape, Y.shape]
    made = map_tensors(lambda tensor: tensor + 1, batch)
    assert type(made) is type(batch)
    assert torch.equal(tensors_of(made)[0], X + 1) and torch.equal(tensors_of(batch)[0], X)
    assert form_of(made) == form_of(batch)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_microbatches_cut_it(batch: Any) -> None:
    model, seen = torch.nn.Linear(2, 1), []

    def loss(model: torch.nn.Module, part: Any) -> Tensor:
        x, y = tensors_of(part)
        seen.append((len(x), len(y)))
        return model(x).mean()

    step = apply([Microbatching(2)], model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    step(batch)
    assert seen == [(2, 2)] * 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"x": X, "y": X}, {"y": X, "x": X}),
        ((X, 1), (X, 2)),
        ((X, 1), (X, 1.0)),
        ((X, Y), [X, Y]),
        (UserDict(x=X), {"x": X}),
        (UserDict(a=X), UserDict(b=X)),
        ((X, np.zeros(2000)), (X, np.zeros(2000))),
        ((X, Kind.ONE), (X, 1)),
        ((X,), (X.double(),)),
        ((X,), (X[:3],)),
    ],
)
def test_what_is_not_alike_has_another_form(one: Any, other: Any) -> None:
    assert form_of(one) != form_of(other)


def test_forms_can_be_looked_up() -> None:
    batch = {"x": X, "more": [UserDict(y=Y), None, "text", 3, torch.float16, Kind.ONE]}
    assert {form_of(batch): 1}[form_of(map_tensors(torch.clone, batch))] == 1


def test_what_a_batch_holds_is_counted_wherever_it_lies() -> None:
    model = torch.nn.Linear(2, 3)
    batch = UserDict(x=X, unused=torch.zeros(50_000))
    given = {"loss": lambda m, b: m(b["x"]).square().mean(), "optimizer": "sgd"}
    counted = ss.profile(model, batch, accounting="device", **given).peak_bytes
    assert ss.measure(model, batch, **given).peak_bytes == counted > 200_000


@pytest.mark.parametrize(
    "odd",
    [X.to_sparse(), torch.nested.nested_tensor([X[:2], X, X[:4]], layout=torch.jagged)],
    ids=["sparse_coo", "jagged"],
)
def test_what_is_not_dense_is_not_cut(odd: Tensor, request: pytest.FixtureRequest) -> None:
    model = torch.nn.Linear(2, 1)
    step = apply([Microbatching(2)], model, torch.optim.SGD(model.parameters(), lr=0.1),
                 loss=lambda m, b: m(b[0]).mean())  # fmt: skip
    with pytest.raises(ss.InputError, match=f"torch.{request.node.callspec.id} tensors"):
        step((X, odd))
