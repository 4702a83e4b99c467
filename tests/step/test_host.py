"""What a step changes on the host is noticed, and put back when a capture fails."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shoestring.step.host import HostState
from shoestring.step.numbers import number_at, numbers_around
from shoestring.techniques.base import Setup


class Counting(nn.Module):
    """Counts its calls in Python and replaces a buffer, as captured steps cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.calls = 0


def setup() -> tuple[Setup, HostState]:
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.linear(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    made = Setup(
        model=model,
        optimizer=optimizer,
        run=lambda batch: model(batch),
        split=lambda batch: [(batch, 1.0)],
        backward=lambda value: value.backward(),
        update=lambda: None,
    )
    return made, HostState(made, list(model.modules()))


def count(made: Setup) -> None:
    made.model.calls += 1


def replace_buffer(made: Setup) -> None:
    made.model.mean = made.model.mean * 0.9


def replace_parameter(made: Setup) -> None:
    made.model.linear.bias = nn.Parameter(torch.ones(2))


def leave_gradient(made: Setup) -> None:
    made.model.linear.weight.grad = torch.ones(2, 3)


def move_rate(made: Setup) -> None:
    made.optimizer.param_groups[0]["lr"] *= 0.5


def count_in_state(made: Setup) -> None:
    made.optimizer.state[made.model.linear.weight]["calls"] = 1


def replace_state(made: Setup) -> None:
    state = made.optimizer.state[made.model.linear.weight]
    state["exp_avg"] = state["exp_avg"] * 1


def begin_state(made: Setup) -> None:
    made.optimizer.state[nn.Parameter(torch.ones(1))]["step"] = torch.ones(())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (count, "Counting changes its calls"),
        (replace_buffer, "Counting changes its mean"),
        (replace_parameter, "Linear changes its bias"),
        (leave_gradient, "gradients outlive"),
        (move_rate, "changes its lr"),
        (count_in_state, "keeps its calls"),
        (replace_state, "keeps its exp_avg"),
        (begin_state, "keeps its step"),
    ],
)
def test_a_change_is_named_and_undone(change: Callable[[Setup], None], said: str) -> None:
    made, host = setup()
    assert host.changed() is None
    before = [id(t) for t in (*made.model.parameters(), *made.model.buffers())]
    change(made)
    assert said in str(host.changed())
    host.restore()
    assert host.changed() is None
    assert [id(t) for t in (*made.model.parameters(), *made.model.buffers())] == before
    assert made.model.calls == 0 and made.optimizer.param_groups[0]["lr"] == 0.1
    assert len(made.optimizer.state) == 2


def test_what_is_written_in_place_is_the_devices_own() -> None:
    made, host = setup()
    with torch.no_grad():
        made.model.mean.add_(1)
        made.optimizer.state[made.model.linear.weight]["step"].add_(1)
        made.model.linear.weight.mul_(2)
    assert host.changed() is None


class Settings:
    beta, steps = 0.1, 0


class Annealed:
    """A weight that grows, as many losses have one."""

    def __init__(self) -> None:
        self.value, self.unread = 0.5, 3

    def weight(self) -> float:
        return self.value


SETTINGS, OPTIONS = Settings(), {"kl": 0.2, "other": 1.0}
THRESHOLD = 0.3


def test_numbers_that_the_loss_reads_are_found_and_those_it_does_not_read_are_not() -> None:
    scale, annealed, criterion = 1.0, Annealed(), nn.BCELoss()
    criterion.gamma = 2.0

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        terms = [model(batch).sum() * value for value in (scale, SETTINGS.beta, OPTIONS["kl"])]
        return sum(terms) * annealed.weight() + THRESHOLD * criterion.gamma

    def now() -> list[object]:
        return [number_at(place) for place in places]

    places = numbers_around([loss], [])
    assert {name for _, name in places} >= {
        "scale", "beta", "kl", "value", "THRESHOLD", "gamma",
    }  # fmt: skip
    assert not {"steps", "other", "unread"} & {name for _, name in places}
    before = now()
    scale = 2.0
    assert now() != before
    before = now()
    annealed.value += 0.1
    assert now() != before
    before = now()
    OPTIONS["kl"] = 0.4
    assert now() != before
    before = now()
    SETTINGS.beta = 0.3
    assert now() != before


def test_objects_that_know_each_other_are_looked_at_once() -> None:
    class Node:
        pass

    nodes = [Node() for _ in range(12)]
    for node in nodes:
        for number, other in enumerate(nodes):
            setattr(node, "abcdefghijkl"[number], other)
        node.value = 1.0
    top = nodes[0]

    def loss() -> object:
        t = top
        return t.a.b.c.d.e.f.g.h.i.j.k.l.value

    began = time.perf_counter()
    assert len(numbers_around([loss], [])) == 12
    assert time.perf_counter() - began < 0.5


def test_a_number_that_the_loss_counts_is_noticed_and_put_back() -> None:
    made, _ = setup()
    calls = 0

    def loss(batch: torch.Tensor) -> None:
        nonlocal calls
        calls += 1

    held = HostState(made, list(made.model.modules()), numbers_around([loss], []))
    assert held.changed() is None
    loss(torch.ones(1, 3))
    assert held.changed() == "the loss, or what it calls, changes its calls on the host"
    held.restore()
    assert calls == 0 and held.changed() is None
