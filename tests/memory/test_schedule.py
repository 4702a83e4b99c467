"""What runs again under each strategy: the tree of segments, and exact counts of operations."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shoestring.errors import InputError
from shoestring.lab.models import builtin
from shoestring.memory.nodes import ForwardGraph, forward_graph
from shoestring.memory.schedule import Kind, Segment, recompute_flops, schedule, segments
from shoestring.trace.tracing import trace_model

BATCH = 10


@cache
def wrn_28_2() -> ForwardGraph:
    model = builtin("wrn-28-2")
    with FakeTensorMode(allow_non_fake_inputs=True):
        network, data = model.build(), model.batch(BATCH)
    return forward_graph(trace_model(network, data, loss=model.loss))


@cache
def mlp(layers: int = 6) -> ForwardGraph:
    """Linear and ReLU in turns, the loss a sum: no repeated block."""
    parts = [part for _ in range(layers) for part in (nn.Linear(4, 4), nn.ReLU())]
    return forward_graph(
        trace_model(nn.Sequential(*parts), torch.zeros(2, 4), loss=lambda m, b: m(b).sum())
    )


def shape(segment: Segment) -> object:
    """Number of parts at each level: 1 for a leaf."""
    return [shape(child) for child in segment.children] if segment.children else 1


def leaves(segment: Segment) -> list[Segment]:
    if not segment.children:
        return [segment]
    return [leaf for child in segment.children for leaf in leaves(child)]


# -- floating-point operations ---------------------------------------------------------------------

# One block of WRN-28-2: (input channels, output channels, input side, output side).
BLOCKS = [
    (c_in if i == 0 else c_out, c_out, side_in if i == 0 else side_out, side_out)
    for c_in, c_out, side_in, side_out in [(16, 32, 32, 32), (32, 64, 32, 16), (64, 128, 16, 8)]
    for i in range(4)
]


def convolution(c_in: int, c_out: int, side_out: int) -> int:
    """A multiplication and an addition for each of 9 taps."""
    return 2 * BATCH * c_out * side_out**2 * c_in * 9


def norm_and_relu(channels: int, side: int) -> int:
    """Run again with its statistics cached: a multiply-add, and one comparison."""
    return 3 * BATCH * channels * side**2


STEM = convolution(3, 16, 32)


def conv1(block: tuple[int, int, int, int]) -> int:
    return convolution(block[0], block[1], block[3])


def conv2(block: tuple[int, int, int, int]) -> int:
    return convolution(block[1], block[1], block[3])


def norm1(block: tuple[int, int, int, int]) -> int:
    return norm_and_relu(block[0], block[2])


def norm2(block: tuple[int, int, int, int]) -> int:
    return norm_and_relu(block[1], block[3])


def addition(block: tuple[int, int, int, int]) -> int:
    return BATCH * block[1] * block[3] ** 2


TAIL = norm_and_relu(128, 8)


def again(strategy: str) -> int:
    return recompute_flops(wrn_28_2(), schedule(wrn_28_2(), strategy))


def test_none_runs_nothing_again() -> None:
    assert again("none") == 0
    kinds = {event.kind for event in schedule(wrn_28_2(), "none")}
    assert kinds == {Kind.FORWARD, Kind.BACKWARD}


def test_no_bn_runs_every_norm_and_relu_once_and_no_convolution() -> None:
    assert again("no-bn") == sum(norm1(b) + norm2(b) for b in BLOCKS) + TAIL


def test_residual_1_runs_all_but_the_last_convolution_of_a_block() -> None:
    # What the second convolution makes is read by the addition, which needs it for no gradient.
    assert again("residual-1") == STEM + sum(conv1(b) + norm1(b) + norm2(b) for b in BLOCKS)


def test_residual_2_runs_all_but_the_last_convolution_of_a_pair() -> None:
    expected = STEM
    for first, second in zip(BLOCKS[::2], BLOCKS[1::2], strict=True):
        expected += conv1(first) + conv2(first) + addition(first) + conv1(second)
        expected += norm1(first) + norm2(first) + norm1(second) + norm2(second)
    assert again("residual-2") == expected


def test_residual_1_star_runs_norms_once_more() -> None:
    # conv1 is made again by way of the first norm, whose output is dropped until conv1's gradient
    # reads it.
    expected = STEM + sum(conv1(b) + 2 * norm1(b) + norm2(b) for b in BLOCKS) + TAIL
    assert again("residual-1*") == expected


def test_residual_2_star_runs_first_convolutions_of_first_blocks_twice() -> None:
    # A pair once for the input of its second block: all of the first block. Then each block on
    # its own, as in residual-1*. The stem belongs to the first block of the first pair.
    expected = 2 * STEM + TAIL
    for first, second in zip(BLOCKS[::2], BLOCKS[1::2], strict=True):
        expected += conv1(first) + conv2(first) + norm1(first) + norm2(first) + addition(first)
        for block in (first, second):
            expected += conv1(block) + 2 * norm1(block) + norm2(block)
    assert again("residual-2*") == expected


def test_a_gradient_is_taken_once_whatever_the_strategy() -> None:
    graph = wrn_28_2()
    backward = [
        (node.index, position)
        for node in reversed(graph.nodes)
        for position in range(len(node.gradients))
    ]
    for strategy in ("none", "no-bn", "every-3", "residual-2", "residual-2*", "residual-5*"):
        events = schedule(graph, strategy)
        assert [(e.node, e.gradient) for e in events if e.kind is Kind.BACKWARD] == backward
        forward = [e.node for e in events if e.kind is Kind.FORWARD]
        assert forward == list(range(len(graph.nodes)))


# -- segments --------------------------------------------------------------------------------------


def test_one_segment_where_nothing_is_cut() -> None:
    graph = wrn_28_2()
    assert segments(graph, "none") == Segment(0, len(graph.nodes), recompute=False)
    assert segments(graph, "no-bn") == Segment(
        0, len(graph.nodes), recompute=False, drop_cheap=True
    )


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("residual-1", [1] * 13),
        ("residual-2", [1] * 7),
        ("residual-12", [1, 1]),
        ("residual-99", [1, 1]),
        ("residual-1*", [1] * 13),
        ("residual-2*", [[1, 1]] * 6 + [1]),
        ("residual-5*", [[1] * 5, [1] * 5, [1] * 2, 1]),
        ("residual-11*", [[1] * 11, 1, 1]),
    ],
)
def test_twelve_blocks_and_a_tail(strategy: str, expected: object) -> None:
    root = segments(wrn_28_2(), strategy)
    assert shape(root) == expected
    parts = leaves(root)
    assert [p.start for p in parts] == [0, *(p.stop for p in parts[:-1])]
    assert parts[-1].stop == len(wrn_28_2().nodes)
    assert [p.recompute for p in root.children] == [True] * (len(root.children) - 1) + [False]
    assert all(p.drop_cheap == strategy.endswith("*") for p in parts)


def test_a_cut_stands_behind_the_addition_of_a_block() -> None:
    graph = wrn_28_2()
    for part in segments(graph, "residual-1").children[:-1]:
        assert graph.nodes[part.stop - 1].name == "aten.add"
        assert len({n.block for n in graph.nodes[part.start : part.stop]} - {-1}) == 1


@pytest.mark.parametrize(
    ("size", "starts"),
    [(1, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]), (5, [0, 5, 10]), (12, [0]), (100, [0])],
)
def test_every_m_counts_nodes_whose_gradients_read_something(size: int, starts: list[int]) -> None:
    # Twelve nodes that read something; the sum at the end reads nothing and joins the last part.
    root = segments(mlp(), f"every-{size}")
    assert [part.start for part in root.children] == starts
    assert root.children[-1].stop == 13
    assert all(part.recompute and not part.drop_cheap for part in root.children)


@pytest.mark.parametrize(
    "strategy",
    ["", "all", "None", "none ", "every", "every-0", "every-01", "every--1", "every-2*",
     "every-1.5", "residual", "residual-", "residual-0", "residual-0*", "residual-2**", "bn"],
)  # fmt: skip
def test_unknown_strategies(strategy: str) -> None:
    with pytest.raises(InputError, match="unknown checkpointing strategy") as caught:
        segments(wrn_28_2(), strategy)
    assert caught.value.hint is not None and "residual-M" in caught.value.hint
    with pytest.raises(InputError):
        schedule(wrn_28_2(), strategy)


@pytest.mark.parametrize("strategy", ["residual-1", "residual-2*"])
def test_no_blocks_to_cut_at(strategy: str) -> None:
    assert mlp().blocks == 0
    with pytest.raises(InputError, match="no repeated blocks") as caught:
        schedule(mlp(), strategy)
    assert caught.value.hint is not None and "every-M" in caught.value.hint
