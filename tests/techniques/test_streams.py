"""Whatever is copied beside the computation: every copy and every reader of it waits, and no less.

`happens_before` looks at some steps as a GPU would run them, and again without each single wait.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from torch import nn

import shoestring as ss
from happens_before import Graph, Recorder
from shoestring.techniques import gradient_release, offload
from shoestring.techniques.offload.update import StreamedUpdate

RELEASED = ss.GradientRelease()
STATE, WEIGHTS = ss.Offload(smallest=100), ss.WeightOffload(smallest=8)
SUMS = ss.GradientRelease(sum="host", smallest=100, fold=False)
PARTS = ss.Microbatching(6)

PLANS: dict[str, list[ss.Technique]] = {
    "state": [STATE],
    "all state": [ss.Offload(smallest=1)],
    "state, released": [STATE, RELEASED],
    "half of it": [ss.Offload(smallest=100, share=0.5), RELEASED],
    "state in parts": [STATE, RELEASED, PARTS],
    "sums": [SUMS, PARTS],
    "sums and state": [SUMS, PARTS, STATE],
    "weights": [WEIGHTS],
    "weights in parts": [WEIGHTS, PARTS],
    "half of the weights": [ss.WeightOffload(0.5, smallest=8), RELEASED],
    "weights and state": [WEIGHTS, STATE, RELEASED],
    "recomputed": [WEIGHTS, ss.Checkpointing("residual-1")],
    "activations": [ss.ActivationOffload("all", smallest=8)],
    "inputs of blocks": [ss.ActivationOffload(smallest=8), ss.Checkpointing("residual-1")],
    "all on the host": [
        SUMS, PARTS, STATE, WEIGHTS, ss.ActivationOffload("all", smallest=8),
    ],
}  # fmt: skip

QUICK = ("state", "state, released", "half of it", "sums", "weights and state", "activations")


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of several tensors, and tensors in several pieces."""
    for part in (offload.link, offload.update):
        monkeypatch.setattr(part, "chunk_bytes", lambda parameters: 40_000)
    monkeypatch.setattr(gradient_release.sums, "BUFFER_BYTES", 3072)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Broken(Exception):
    """In the middle of a step."""


class Training:
    """A step on some layers, and what may come between two."""

    def __init__(self, plan: list[ss.Technique], kind: Any = torch.optim.SGD) -> None:
        torch.manual_seed(0)
        self.breaks_at = -1
        self.model = nn.Sequential(nn.Linear(48, 48), Block(), Block(), nn.Linear(48, 48))
        own = kind(self.model.parameters(), lr=1e-2, momentum=0.9)
        self.step = ss.apply(plan, self.model, own, loss=self.loss)

    def loss(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.breaks_at -= 1
        if self.breaks_at == 0:
            raise Broken
        return (model(x) - x).square().mean()

    def run(self, rows: int = 16) -> None:
        self.step(torch.randn(rows, 48))

    def breaks(self) -> None:
        """In the second part, or in the first one if it is alone."""
        self.breaks_at = 2
        with suppress(Broken):
            self.run()
        self.breaks_at = -1

    def breaks_in_the_update(self) -> None:
        """Of the second chunk, where the state of chunks is streamed; it is read at once."""
        update = self.step._setup.update
        if not isinstance(update, StreamedUpdate):
            return
        inner, calls = update._update, iter(range(9))

        def broken() -> None:
            if next(calls):
                raise Broken
            inner()

        update._update = broken
        with suppress(Broken):
            self.run()
        update._update = inner
        self.looks()

    def looks(self) -> None:
        """All that lies on the host is read there."""
        for tensor in self.model.state_dict().values():
            tensor.sum()
        for state in self.step.optimizer.state.values():
            for tensor in state.values():
                tensor.sum()

    def writes(self) -> None:
        """What was fetched ahead is not the state any more."""
        for state in self.step.optimizer.state.values():
            state["momentum_buffer"].mul_(0.5)

    def evaluates(self) -> None:
        with torch.no_grad():
            self.model(torch.randn(8, 48))

    def loads(self) -> None:
        self.step.load_state_dict(self.step.state_dict())

    def waits_with_the_update(self) -> None:
        with suppress(ss.InputError):  # released gradients do not wait
            self.step(torch.randn(16, 48), update=False)
            self.run()


def faults(plan: list[ss.Technique], recorder: Recorder, patch: pytest.MonkeyPatch) -> list[str]:
    """Of first steps, other shapes, and of what else a training does."""

    def train() -> None:
        training = Training(plan)
        for between in (
            training.run, training.looks, training.waits_with_the_update, training.evaluates,
            training.breaks, training.breaks_in_the_update, training.loads, training.writes,
        ):  # fmt: skip
            training.run()
            training.run(10)
            between()
        training.run()  # it ends with copies on their way

    recorder.run(patch, train)
    return recorder.faults


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PLANS]
)
def test_every_copy_is_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults(PLANS[name], Recorder(), monkeypatch) == []


def test_state_is_fetched_ahead_once_where_chunks_are_others_than_in_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the first step guessed of SGD's state is twice of what it is: two chunks become one."""
    for part in (offload.link, offload.update):
        monkeypatch.setattr(part, "chunk_bytes", lambda parameters: 80_000)
    assert faults(PLANS["state"], Recorder(), monkeypatch) == []


@pytest.mark.parametrize("name", ["weights in parts", "sums and state", "all on the host"])
def test_what_is_there_ahead_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the loss was tested on the model itself, and all that changed was put back."""

    def losses(plan: list[ss.Technique]) -> list[torch.Tensor]:
        training = Training(plan)
        torch.manual_seed(1)
        return [training.step(torch.randn(16, 48)) for _ in range(4)]

    found, expected = (
        Recorder().run(monkeypatch, lambda plan=plan: losses(plan))
        for plan in (PLANS[name], [PARTS])
    )
    assert found == expected


# -- captured as a CUDA graph ------------------------------------------------------------------


def captured(training: Training, recorder: Recorder, batch: torch.Tensor) -> Graph:
    """As `GraphRunner` captures a step."""
    setup = training.step._setup
    for call in setup.before_graph:
        call()
    with recorder.capture() as graph, ExitStack() as stack:
        for around in setup.in_capture:
            stack.enter_context(around())
        training.step._compute(batch)
    training.step._after_update()
    return graph


def replayed(training: Training, recorder: Recorder, graph: Graph) -> None:
    for call in training.step._setup.before_graph:
        call()
    recorder.replay(graph)
    training.step._after_update()


CAPTURED = ("state", "state, released", "half of it", "sums", "sums and state")


def captured_faults(name: str, recorder: Recorder, patch: pytest.MonkeyPatch) -> list[str]:
    def train() -> None:
        training, batch = Training(PLANS[name]), torch.randn(16, 48)
        training.run()
        training.looks()
        graph = captured(training, recorder, batch)
        replayed(training, recorder, graph)
        replayed(training, recorder, graph)
        training.looks()
        training.run(10)
        replayed(training, recorder, graph)
        training.waits_with_the_update()
        replayed(training, recorder, graph)
        training.loads()  # other tensors are on the host now, and the runner captures again
        training.run()
        replayed(training, recorder, captured(training, recorder, batch))
        recorder.compute.synchronize()  # as the runner, when it goes

    recorder.run(patch, train)
    return recorder.faults


@pytest.mark.parametrize("name", CAPTURED)
def test_a_step_is_captured_and_replayed_between_eager_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases have their state on the device: that is no reason for the host to wait."""
    assert captured_faults(name, Recorder(), monkeypatch) == []


@pytest.mark.parametrize("name", ["state", "state, released", "sums", "sums and state"])
def test_a_step_that_fails_while_it_is_captured_ends_the_capture_in_good_order(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else CUDA ends it with an error about streams, and the reason is lost."""
    recorder = Recorder()

    def train() -> None:
        training, batch = Training(PLANS[name]), torch.randn(16, 48)
        training.run()
        training.run()
        training.breaks_at = 1
        with pytest.raises(Broken):
            captured(training, recorder, batch)
        training.breaks_at = -1
        training.run()
        captured(training, recorder, batch)
        recorder.compute.synchronize()

    recorder.run(monkeypatch, train)
    assert recorder.faults == []


# -- whether a wait that is missing would be found ---------------------------------------------


@pytest.mark.slow
def test_no_wait_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a single one of them something is read or written too early."""
    needed: dict[str, bool] = {}
    names = ("state", "state, released", "sums", "activations", "all on the host")
    runs = [*((faults, PLANS[name]) for name in names), *((captured_faults, n) for n in CAPTURED)]
    for run, what in runs:
        whole = Recorder()
        assert run(what, whole, monkeypatch) == []
        for line in whole.waited:
            if not needed.get(line):
                needed[line] = bool(run(what, Recorder(without=line), monkeypatch))
    assert len(needed) > 20
    assert [line for line, found in needed.items() if not found] == []
