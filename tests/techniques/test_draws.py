"""Recomputation from noted places draws what PyTorch's own bookkeeping draws, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from shoestring.step.apply import apply
from shoestring.step.step import Step
from shoestring.techniques import Checkpointing, Microbatching
from shoestring.techniques.checkpointing.regions import region
from shoestring.techniques.draws import RngRecorder, RngReplay, observed_by, observer
from techniques.small_models import SMALL


def position() -> bytes:
    return bytes(torch.get_rng_state().tolist())


@contextmanager
def at(place: bytes) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(torch.tensor(list(place), dtype=torch.uint8))
        yield


def started(strategy: str, microbatch: int) -> tuple[Step, Any]:
    torch.manual_seed(0)
    small = SMALL["transformer"]
    model, batch = small.build(), small.batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    chosen = [Checkpointing(strategy), Microbatching(microbatch)]
    return apply(chosen, model, optimizer, loss=small.loss), batch


def state(step: Step) -> list[torch.Tensor]:
    return [*(p.detach().clone() for p in step.model.parameters()), torch.get_rng_state()]


@pytest.mark.parametrize("strategy", ["residual-1", "residual-2", "residual-2*"])
@pytest.mark.parametrize("microbatch", [6, 2, 4])
def test_the_places_of_one_step_serve_the_next(strategy: str, microbatch: int) -> None:
    plain, batch = started(strategy, microbatch)
    torch.manual_seed(3)
    wanted = [(plain(batch), state(plain)) for _ in range(2)]

    placed, _ = started(strategy, microbatch)
    torch.manual_seed(3)
    starts = RngRecorder(position)
    with observed_by(starts):
        assert torch.equal(placed(batch), wanted[0][0])
    again = RngRecorder(position)  # where they are in the second step, as its base moved
    probe, _ = started(strategy, microbatch)
    torch.manual_seed(3)
    probe(batch)
    with observed_by(again):
        probe(batch)
    assert [s is None for s in starts.found] == [s is None for s in again.found]
    assert any(again.found)
    torch.set_rng_state(wanted[0][1][-1])
    places = RngReplay(again.found, at)
    with observed_by(places):
        assert torch.equal(placed(batch), wanted[1][0])
    assert places.all_used
    for one, other in zip(state(placed), wanted[1][1], strict=True):
        assert torch.equal(one, other)


def test_without_its_places_recomputation_draws_other_numbers() -> None:
    layer, gradients = nn.Dropout(0.5), []
    for chosen in (nullcontext(), observed_by(RngReplay([None], at))):
        torch.manual_seed(0)
        x = torch.ones(1000, requires_grad=True)
        with chosen:
            region(lambda y: (layer(y) * y).square(), layer, x).sum().backward()
        gradients.append(x.grad)
    assert not torch.equal(*gradients)


def test_a_region_that_draws_nothing_has_no_place() -> None:
    starts, layer = RngRecorder(position), nn.Tanh()
    x = torch.ones(3, requires_grad=True)
    with observed_by(starts):
        region(lambda y: layer(y).exp(), layer, x).sum().backward()
    assert starts.found == [None] and observer() is None


def test_more_recomputation_than_was_noted_is_an_error() -> None:
    layer = nn.Tanh()
    with observed_by(RngReplay([], at)):
        out = region(lambda y: layer(y).exp(), layer, torch.ones(3, requires_grad=True))
        with pytest.raises(RuntimeError, match="recomputes more often"):
            out.sum().backward()


def test_an_error_leaves_nobody_observers() -> None:
    with pytest.raises(KeyError), observed_by(RngRecorder(position)):
        raise KeyError
    assert observer() is None
