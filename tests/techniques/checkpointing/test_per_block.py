"""A schedule for every block: it runs as it is written, and needs what the chain says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from chains import chain_of
from shoestring.cli.main import app
from shoestring.errors import InputError
from shoestring.lab.models import builtin
from shoestring.memory.items import LEAVES, Item, leaves, part, read, write
from shoestring.memory.model import memory_profile
from shoestring.step.apply import apply
from shoestring.step.predict import predict_step
from shoestring.techniques import Checkpointing, Microbatching, Precision
from shoestring.techniques.checkpointing.solve import front
from shoestring.techniques.checkpointing.stages import evaluate
from shoestring.techniques.claims import Level
from shoestring.techniques.plan import Plan
from shoestring.trace.blocks import block_levels
from shoestring.trace.tracing import trace_model
from shoestring.verification.verify import verify
from techniques.small_models import SMALL
from tiers import slow_but

FOUR = [
    ("keep*4",),
    ("cheap", "recompute", "keep", "[cheap]"),
    ("[keep, cheap, recompute]", "cheap"),
    ("[[keep*2], keep]", "keep"),
    ("keep", "[lean, [keep, cheap]]"),
    ("[[recompute, cheap], cheap, keep]",),
]
CASES = [("residual", schedule) for schedule in FOUR]
CASES += [("transformer", schedule) for schedule in FOUR[1::2]]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("case", slow_but(3, CASES), ids=str)
def test_training_is_plain_training_and_the_peak_is_the_predicted_one(
    case: tuple[str, tuple[str, ...]],
) -> None:
    name, schedule = case
    small = SMALL[name]
    torch.manual_seed(0)
    model, batch = small.build(), small.batch()
    chosen = [Checkpointing("per-block", schedule=schedule)]
    found = verify(chosen, model, [batch], loss=small.loss, optimizer=sgd(model), steps=1)
    assert found.ok, str(found)
    assert all(c.found <= Level.EQUAL for c in found.comparisons)
    assert found.predicted_peak_bytes == pytest.approx(found.measured_peak_bytes, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("other", [Precision("bf16"), Microbatching(2)], ids=str)
def test_it_combines_with_the_other_techniques(other: Any) -> None:
    small = SMALL["transformer"]
    torch.manual_seed(0)
    model, batch = small.build(), small.batch()
    chosen = [other, Checkpointing("per-block", schedule=("[keep, [cheap], keep]", "cheap"))]
    found = verify(chosen, model, [batch], loss=small.loss, optimizer=sgd(model), steps=1)
    assert found.ok, str(found)


def products(run: Any) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        run().backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("name", slow_but(1, ["wrn-16-1", "tied"]))
def test_a_chain_says_what_every_schedule_needs(name: str) -> None:
    """Peaks of executed steps within 0.2%, and never above the chain's by more."""
    if name in SMALL:
        small: Any = SMALL[name]
        model, batch, loss = small.build(), small.batch(), small.loss
    else:
        known = builtin(name)
        model, batch, loss = known.build(), known.batch(2), known.loss
    optimizer = sgd(model)
    chain = chain_of([], model, batch, loss=loss, optimizer=optimizer)
    names = tuple(block.name for block in chain.blocks)
    points = front(chain)
    assert points[0].peak_bytes < 0.8 * points[-1].peak_bytes
    for point in points[:: max(1, len(points) // 2)]:
        chosen = [Checkpointing.of(point.items, names)]
        predicted = predict_step(chosen, model, batch, loss=loss, optimizer=optimizer)
        assert point.peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.002)
    step = apply([Checkpointing.of(points[0].items)], model, optimizer, loss=loss)
    step(batch)
    assert step.measure(batch).peak_bytes == pytest.approx(points[0].peak_bytes, rel=0.002)


@pytest.mark.slow
def test_the_step_recomputes_what_the_chain_counts() -> None:
    """To the product: the last of a block's do not run again."""
    known = builtin("wrn-16-1")
    model, batch = known.build(), known.batch(2)
    chain = chain_of([], model, batch, loss=known.loss, optimizer="sgd")
    plain = products(lambda: known.loss(model, batch))
    for items in [(("keep",),) * 6, (("keep", ("keep",), "keep"), "keep", ("keep", "keep"))]:
        ours = copy.deepcopy(model)
        step = apply([Checkpointing.of(items)], ours, sgd(ours), loss=known.loss)
        extra = products(lambda step=step: step._setup.run(batch)) - plain
        counted = evaluate(chain, items).again.flops
        assert extra < counted < extra * 1.05  # the counter knows no normalizations


def test_blocks_that_something_else_reads_do_not_share_a_region() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for i in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.layers[0](x)
            y = self.layers[2](self.layers[1](first)) * 2
            return self.layers[3](y + first)

    model, batch = Skipping(), torch.randn(3, 8)
    chain = chain_of([], model, batch, loss=lambda m, b: m(b).sum(), optimizer="sgd")
    assert [block.joins for block in chain.blocks] == [False, True, False, False]


@pytest.mark.slow
def test_blocks_are_as_small_as_they_hand_on_their_output() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    class Twice(Stage):
        """Its input is read again at the end, so that its last layer does not hand on."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.layers[0](self.layers[1](x))

    batch: dict[str, Any] = {"loss": lambda m, b: m(b).sum(), "optimizer": "sgd"}
    model = nn.Sequential(*(Stage() for _ in range(3)))
    assert [len(level) for level in block_levels(model)] == [3, 6]
    assert len(chain_of([], model, torch.randn(3, 8), **batch).blocks) == 6
    model = nn.Sequential(*(Twice() for _ in range(3)))
    assert len(chain_of([], model, torch.randn(3, 8), **batch).blocks) == 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(torch.relu(self.one(x)))


@pytest.mark.parametrize(
    ("schedule", "same_as"),
    [("keep*6", "none"), ("recompute*6", "residual-1"), ("[cheap]*6", "residual-1*"),
     ("[keep*2]*3", "residual-2"), ("[[cheap]*2]*3", "residual-2*")],
)  # fmt: skip
def test_the_fundamental_accounting_reads_schedules(schedule: str, same_as: str) -> None:
    known = builtin("wrn-16-1")
    trace = trace_model(known.build(), known.batch(2), loss=known.loss, optimizer="sgd")
    ours = memory_profile(Checkpointing("per-block", schedule=(schedule,)).predict(trace))
    named = memory_profile(Checkpointing(same_as).predict(trace))
    # With a star the strategies make the normalization behind the blocks again too.
    assert ours.peak_bytes == pytest.approx(named.peak_bytes, rel=1e-3 if "*" in same_as else 0)
    assert ours.recompute_flops == pytest.approx(named.recompute_flops, rel=0.01)


def test_the_fundamental_accounting_of_a_mixed_schedule_lies_between() -> None:
    known = builtin("wrn-16-1")
    trace = trace_model(known.build(), known.batch(2), loss=known.loss, optimizer="sgd")

    def profile(text: str) -> tuple[int, int]:
        found = memory_profile(Checkpointing("per-block", schedule=(text,)).predict(trace))
        return found.peak_bytes, found.recompute_flops

    nothing, flat = profile("keep*6"), profile("[keep*4], keep*2")
    nested = profile("[keep, [keep*2], keep], keep*2")
    assert nested[0] < flat[0] < nothing[0]
    assert nested[1] > flat[1] > nothing[1] == 0


items = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.lists(inner, min_size=1, max_size=4).map(tuple),
    max_leaves=12,
)


@given(st.lists(items, min_size=1, max_size=6).map(tuple))
def test_a_schedule_is_read_as_it_was_written(schedule: tuple[Item, ...]) -> None:
    assert read(write(schedule)) == schedule
    assert Plan.from_dict(Plan.of([Checkpointing.of(schedule)]).to_dict()).checkpointing == (
        Checkpointing.of(schedule)
    )
    assert part(schedule, 0, leaves(schedule)) == schedule
    assert leaves(part(schedule, 1, leaves(schedule))) == leaves(schedule) - 1


def test_people_can_write_it() -> None:
    assert read("keep*2, [cheap , keep]*2, recompute") == (
        "keep", "keep", ("cheap", "keep"), ("cheap", "keep"), ("keep",),
    )  # fmt: skip
    assert Checkpointing.parse("[cheap]*2") == Checkpointing.of((("cheap",), ("cheap",)))
    assert Checkpointing.parse("residual-2*") == Checkpointing("residual-2*")
    assert write(read("recompute*3, [keep*2, [cheap*2]]")) == ("recompute*3", "[keep*2, [cheap*2]]")


def test_the_command_line_takes_it() -> None:
    ran = CliRunner().invoke(app, ["profile", "wrn-10-1", "--checkpoint", "[cheap], [keep*2]"])
    assert ran.exit_code == 0
    assert "sgd · [cheap], [keep*2]" in ran.stdout


@pytest.mark.parametrize(
    ("text", "why"),
    [("keep*0", "0 times"), ("kept", "'kept' is not an item"), ("[keep", "']' is missing"),
     ("keep]", "too many"), ("keep,,keep", "is not an item"), ("", "an item is missing"),
     ("keep*9999999", "9999999 times"), ("keep?", "at '?'"), ("[]", "is not an item")],
)  # fmt: skip
def test_what_cannot_be_read_is_named(text: str, why: str) -> None:
    with pytest.raises(InputError, match="cannot read the schedule") as said:
        read(text)
    assert why in said.value.message


def test_a_schedule_belongs_to_per_block_and_fits_the_model() -> None:
    with pytest.raises(InputError, match="per-block without a schedule"):
        Checkpointing("per-block")
    with pytest.raises(InputError, match="residual-1 with a schedule"):
        Checkpointing("residual-1", schedule=("keep",))
    small = SMALL["residual"]
    model = small.build()
    with pytest.raises(InputError, match="for 3 blocks, the model has 4"):
        apply([Checkpointing("per-block", schedule="keep*3")], model, sgd(model), loss=small.loss)
