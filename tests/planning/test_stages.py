"""What a schedule needs and costs, against counts made by hand."""

from __future__ import annotations

import pytest

from shoestring.memory.work import Work
from shoestring.techniques.checkpointing.stages import (
    Chain,
    Option,
    Stage,
    between,
    evaluate,
    plain,
)


def stage(name: str, tape: int, *, out: int = 10, cheap: int | None = None) -> Stage:
    """A block of 100 operations that takes twice as many backward, and 60 when it ends a region."""

    def option(kept: int, more: int) -> Option:
        return Option(
            kept_bytes=kept + out,
            forward_bytes=kept + out + 5,
            backward_bytes=kept + 2 * out,
            again_bytes=kept + 2 * out + 1,
            forward=Work(100, 7, 3),
            again=Work(60, 4, 2),
            backward=Work(200 + more, 14, 6),
        )

    options = {"keep": option(tape, 0)}
    if cheap is not None:
        options["cheap"] = option(cheap, 8)
    return Stage(name, options, out, out + 5, out, parameter_gradient_bytes=2)


def chain(blocks: int = 3) -> Chain:
    inner = tuple(stage(f"b{i}", 100, cheap=40) for i in range(blocks))
    return Chain(stage("", 0), inner, stage("", 20), fixed_bytes=1000)


def test_keeping_everything_peaks_at_the_end_of_the_forward_pass() -> None:
    found = plain(chain())
    # Head 10, three blocks of 110, then the tail's backward: 20 + 2 * 10.
    assert found.peak_bytes == 1000 + 10 + 3 * 110 + 40
    assert found.cost == found.plain_cost == 5 * 300
    assert found.extra_cost == 0 and found.again == Work()


def test_cheap_leaves_keep_less_and_cost_what_they_make_again() -> None:
    found = evaluate(chain(), ("cheap",) * 3)
    # The tail's backward, beside three blocks of 40 + 10.
    assert found.peak_bytes == 1000 + 10 + 3 * 50 + 40
    assert found.extra_cost == 3 * 8 and found.again == Work(24, 0, 0)


def test_regions_of_one_block_keep_their_input_and_stop_early() -> None:
    found = evaluate(chain(), (("keep",),) * 3)
    # Block 3 runs again: the head's 10, outputs of blocks 1 and 2, what the tail's gradients are.
    assert found.peak_bytes == 1000 + 10 + 2 * 10 + 2 + 121
    assert found.extra_cost == 3 * 60 and found.again == Work(180, 12, 6)


def test_the_blocks_of_a_region_run_again_but_for_the_end_of_the_last() -> None:
    found = evaluate(chain(), (("keep", "keep", "keep"),))
    assert found.extra_cost == 100 + 100 + 60
    # When block 3 runs again, 1 and 2 have kept 110 each and the gradient of block 3 is in its own.
    assert found.peak_bytes == 1000 + 10 + 220 + 2 + 121


def test_a_region_inside_runs_once_more() -> None:
    found = evaluate(chain(), (("keep", ("keep",), "keep"),))
    # Again: block 1, block 2 without keeping, block 3; then block 2 once more.
    assert found.extra_cost == 100 + 100 + 60 + 60
    assert found.peak_bytes == 1000 + 10 + 110 + 10 + 2 + 121
    # At the end of a region, one inside costs and saves nothing: running again stops before it.
    flat, nested = (evaluate(chain(), (("keep", "keep", x),)) for x in ("keep", ("keep",)))
    assert (flat.cost, flat.peak_bytes) == (nested.cost, nested.peak_bytes)


def test_the_update_can_be_the_peak() -> None:
    given = chain()
    high = Chain(given.head, given.blocks, given.tail, given.fixed_bytes, floor_bytes=5000)
    assert plain(high).peak_bytes == 5000


def test_sizes_between_two_batches() -> None:
    small, large = chain(), Chain(stage("", 0), tuple(
        stage(f"b{i}", 300, out=30, cheap=120) for i in range(3)
    ), stage("", 60), fixed_bytes=1400)  # fmt: skip
    middle = between(small, large, 0.5)
    assert middle.fixed_bytes == 1200
    assert middle.blocks[0].options["keep"].kept_bytes == (110 + 330) / 2
    assert middle.blocks[0].joins is True and middle.blocks[0].name == "b0"
    items = ("keep", ("cheap",), "keep")
    ends = evaluate(small, items).peak_bytes, evaluate(large, items).peak_bytes
    assert evaluate(middle, items).peak_bytes == pytest.approx(sum(ends) / 2, abs=2)
