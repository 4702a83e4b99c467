"""The fast accounting against a slow machine, against tables by hand, and against the report."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from reference.step_by_step import simulate
from shoestring.lab.models import builtin
from shoestring.lab.models.wide_resnet import ResidualBlock
from shoestring.memory.fundamental import fundamental_timeline
from shoestring.memory.model import MemoryProfile, memory_profile
from shoestring.memory.nodes import ForwardGraph, Gradient, Node, forward_graph, record_key
from shoestring.memory.schedule import recompute_flops, schedule
from shoestring.step.profiling import profile
from shoestring.techniques import Checkpointing, Precision, Sparsity
from shoestring.trace.graph import Role, Trace
from shoestring.trace.rules import Flow
from shoestring.trace.tracing import trace_model
from shoestring.units import format_size

STRATEGIES = (
    "none",
    "no-bn",
    *(f"every-{size}" for size in (1, 2, 3, 4)),
    *(f"residual-{size}" for size in (1, 2, 3)),
    *(f"residual-{size}*" for size in (1, 2, 3)),
)
WITHOUT_PARAMETERS = Trace(
    ops=(), values=(), storages=(), parameters=(), modules=(), inputs=(), loss=0,
    device="cpu", optimizer="none",
)  # fmt: skip

Pick = Callable[[int, int], int]
"""A whole number between two, both included."""


# -- random graphs ---------------------------------------------------------------------------------


class GraphMaker:
    """Draws a small forward graph, node by node."""

    def __init__(self, pick: Pick) -> None:
        self.pick = pick
        self.graph = ForwardGraph()
        self.with_gradient: set[int] = set()
        self.values: list[int] = []
        self.block, self.started = -1, -1
        for _ in range(pick(1, 2)):
            key = self._value(producer=None)
            if self._one_in(6):
                self.with_gradient.add(key)

    def make(self) -> ForwardGraph:
        kinds = (
            self._linear, self._linear, self._normalization, self._activation, self._activation,
            self._addition, self._addition, self._product, self._dropout, self._split,
            self._without_gradient, self._anything, self._anything,
        )  # fmt: skip
        for _ in range(self.pick(3, 14)):
            self._next_block()
            kinds[self.pick(0, len(kinds) - 1)]()
        if self.started < 0:
            self.graph.nodes[0] = Node(**{**vars(self.graph.nodes[0]), "block": 0})
            self.started = 0
        self.graph.blocks = self.started + 1
        return self.graph

    def _one_in(self, count: int) -> bool:
        return self.pick(1, count) == 1

    def _next_block(self) -> None:
        """Stay, begin the next block, or go on outside of any."""
        choice = self.pick(0, 5)
        if choice == 0:
            self.block = -1
        elif choice <= 2:
            self.started += 1
            self.block = self.started

    def _value(self, producer: int | None, nbytes: int | None = None) -> int:
        key = len(self.graph.key_bytes) + 100
        self.graph.key_bytes[key] = self.pick(1, 5) * 8 if nbytes is None else nbytes
        self.graph.key_module[key] = ""
        if producer is not None:
            self.graph.producer[key] = producer
        self.values.append(key)
        return key

    def _parameter(self) -> int:
        key = len(self.graph.key_bytes) + 100
        self.graph.key_bytes[key] = 0
        self.graph.key_module[key] = ""
        return key

    def _inputs(self, count: int) -> list[int]:
        """The newest value, or one before it, or one of long ago."""
        chosen: list[int] = []
        for _ in range(count):
            reach = (1, 2, 4, len(self.values))[self.pick(0, 3)]
            back = self.pick(1, min(reach, len(self.values)))
            if self.values[-back] not in chosen:
                chosen.append(self.values[-back])
        return chosen

    def _record(self, nbytes: int) -> int:
        index = len(self.graph.nodes)
        key = record_key(index)
        self.graph.key_bytes[key] = nbytes
        self.graph.key_module[key] = ""
        self.graph.producer[key] = index
        return key

    def _outputs(self, *sizes: int | None) -> list[int]:
        return [self._value(len(self.graph.nodes), nbytes) for nbytes in sizes]

    def _node(
        self,
        inputs: list[int],
        outputs: list[int],
        reads: dict[int, tuple[int, ...]],
        *,
        parameter: int | None = None,
        parameter_reads: tuple[int, ...] = (),
        flow: Flow = Flow.FRESH,
        cheap: bool = False,
        elementwise: bool = False,
        record: int = 0,
        statistics: int = 0,
    ) -> None:
        gradients = [Gradient(parameter, parameter_reads, True)] if parameter is not None else []
        gradients += [
            Gradient(k, reads[k], False) for k in inputs if k in reads and k in self.with_gradient
        ]
        if gradients:
            self.with_gradient.update(outputs)
        flops = self.pick(1, 9)
        self.graph.nodes.append(
            Node(
                index=len(self.graph.nodes),
                name="node",
                module="",
                block=self.block,
                inputs=(*inputs, parameter) if parameter is not None else tuple(inputs),
                outputs=tuple(outputs),
                gradients=tuple(gradients),
                flow=flow,
                cheap=cheap,
                wide=False,
                elementwise=elementwise,
                record=record,
                statistics_bytes=statistics,
                flops=flops,
                recompute_flops=10 ** self.pick(0, 3) * flops,
            )
        )

    def _linear(self) -> None:
        x = self._inputs(1)
        weight = self._parameter()
        self._node(x, self._outputs(None), {x[0]: ()}, parameter=weight, parameter_reads=(x[0],))

    def _normalization(self) -> None:
        x = self._inputs(1)
        self._node(
            x, self._outputs(self.graph.key_bytes[x[0]]), {x[0]: (x[0],)},
            parameter=self._parameter(), parameter_reads=(x[0],), flow=Flow.IN_PLACE, cheap=True,
            statistics=self.pick(0, 3),
        )  # fmt: skip

    def _activation(self) -> None:
        x = self._inputs(1)
        outputs = self._outputs(self.graph.key_bytes[x[0]])
        record = self._record(self.pick(1, 3)) if self._one_in(2) else 0
        kept = record or (x + outputs)[self.pick(0, 1)]
        self._node(
            x, outputs, {x[0]: (kept,)},
            flow=Flow.IN_PLACE, cheap=True, elementwise=True, record=record,
        )  # fmt: skip

    def _addition(self) -> None:
        terms = self._inputs(2)
        largest = max(self.graph.key_bytes[k] for k in terms)
        self._node(
            terms, self._outputs(largest), {k: () for k in terms}, flow=Flow.SAME, elementwise=True
        )

    def _product(self) -> None:
        factors = self._inputs(2)
        others = {k: tuple(o for o in factors if o != k) or (k,) for k in factors}
        if self._one_in(2):
            self._node(factors, self._outputs(None), others)
        else:
            largest = max(self.graph.key_bytes[k] for k in factors)
            self._node(
                factors, self._outputs(largest), others, flow=Flow.IN_PLACE, elementwise=True
            )

    def _dropout(self) -> None:
        x = self._inputs(1)
        record = self._record(self.pick(1, 3))
        self._node(
            x, self._outputs(self.graph.key_bytes[x[0]]), {x[0]: (record,)},
            flow=Flow.IN_PLACE, elementwise=True, record=record,
        )  # fmt: skip

    def _split(self) -> None:
        x = self._inputs(1)
        outputs = self._outputs(None, None)
        self._node(x, outputs, {x[0]: (outputs[1],) if self._one_in(2) else ()})

    def _without_gradient(self) -> None:
        self._node(
            self._inputs(self.pick(1, 2)), self._outputs(None), {}, elementwise=self._one_in(2)
        )

    def _anything(self) -> None:
        inputs = self._inputs(self.pick(1, 3))
        outputs = self._outputs(*[None] * self.pick(1, 3))
        record = self._record(self.pick(1, 3)) if self._one_in(2) else 0
        keys = inputs + outputs + ([record] if record else [])
        reads = {
            k: tuple(key for key in keys if self._one_in(3)) for k in inputs if not self._one_in(4)
        }
        weight = self._parameter() if self._one_in(3) else None
        self._node(
            inputs, outputs, reads,
            parameter=weight, parameter_reads=tuple(key for key in keys if self._one_in(3)),
            flow=tuple(Flow)[self.pick(0, 2)], cheap=self._one_in(2),
            elementwise=self._one_in(2), record=record, statistics=self.pick(0, 2),
        )  # fmt: skip


def check_against_the_machine(graph: ForwardGraph) -> None:
    for strategy in STRATEGIES:
        events = schedule(graph, strategy)
        timeline = fundamental_timeline(WITHOUT_PARAMETERS, graph, events)
        slow = simulate(graph, strategy)
        assert timeline.totals.tolist() == slow.live_bytes, strategy
        assert int(timeline.totals[timeline.peak_instant]) == slow.peak_bytes, strategy
        assert recompute_flops(graph, events) == slow.recomputed_flops, strategy


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_drawn_graphs_agree_with_the_machine(data: st.DataObject) -> None:
    check_against_the_machine(GraphMaker(lambda a, b: data.draw(st.integers(a, b))).make())


@pytest.mark.parametrize("seed", range(8))
def test_random_graphs_agree_with_the_machine(seed: int) -> None:
    generator = random.Random(seed)
    for _ in range(50):
        check_against_the_machine(GraphMaker(generator.randint).make())


# -- tables by hand --------------------------------------------------------------------------------


def activation_bytes(model: nn.Module, batch: object, loss: Callable, strategy: str) -> list[int]:
    """Live bytes at every instant, without the parameters and their gradients."""
    trace = trace_model(model, batch, loss=loss)
    graph = forward_graph(trace)
    events = schedule(graph, strategy)
    table = fundamental_timeline(trace, graph, events)
    parameters = sum(p.numel() for p in model.parameters()) * 4
    assert table.roles_at(0)[Role.MODEL] == table.roles_at(0)[Role.GRADIENT] == parameters
    assert table.totals[table.peak_instant] == max(table.totals)
    assert simulate(graph, strategy).live_bytes == [n - 2 * parameters for n in table.totals]
    return [int(n) - 2 * parameters for n in table.totals]


def mlp() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], Callable]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    batch = torch.zeros(10, 4), torch.zeros(10, 2)
    return model, batch, lambda m, b: nn.functional.mse_loss(m(b[0]), b[1])


def test_three_layers_by_hand() -> None:
    # 10 rows of FP32: x 160 bytes, hidden 320 and 640, scores and targets 80; the signs of the two
    # ReLUs 10 and 20. A ReLU writes over its input. The loss itself (4 bytes) is read by nobody.
    x, h1, s1, h2, s2, y, t = 160, 320, 10, 640, 20, 80, 80
    assert activation_bytes(*mlp(), strategy="none") == [
        x + h1,                             # linear 1
        x + h1 + s1,                        # relu 1, in place
        x + h1 + s1 + h2,                   # linear 2
        x + h1 + s1 + h2 + s2,              # relu 2, in place
        x + h1 + s1 + h2 + s2 + y,          # linear 3
        x + h1 + s1 + h2 + s2 + y + t,      # loss
        x + h1 + s1 + h2 + s2 + y + t + y,  # loss → its gradient by the scores
        x + h1 + s1 + h2 + s2 + y,          # linear 3: bias
        x + h1 + s1 + h2 + s2 + y,          # weight, the last to read the hidden layer
        x + h1 + s1 + s2 + y + h2,          # input: its gradient takes the hidden layer's place
        x + h1 + s1 + s2 + h2,              # relu 2, in place
        x + h1 + s1 + h2,                   # linear 2: bias
        x + h1 + s1 + h2,                   # weight
        x + s1 + h2 + h1,                   # input
        x + s1 + h1,                        # relu 1
        x + h1,                             # linear 1: bias
        x + h1,                             # weight; the batch takes no gradient
    ]  # fmt: skip


def test_three_layers_in_two_segments_by_hand() -> None:
    # every-4: the gradients of linear, ReLU, linear, ReLU read something, linear 3 begins the
    # second segment. Its inputs are kept, the hidden layer h2; the first keeps x and is run again.
    x, h1, s1, h2, s2, y, t = 160, 320, 10, 640, 20, 80, 80
    assert activation_bytes(*mlp(), strategy="every-4") == [
        x + h1,                  # linear 1
        x + h1,                  # relu 1
        x + h1 + h2,             # linear 2
        x + h2,                  # relu 2
        x + h2 + y,              # linear 3
        x + h2 + y + t,          # loss
        x + h2 + y + t,          # the scores were not kept: linear 3 again
        x + h2 + y + t + y,      # loss → gradient
        x + h2 + y, x + h2 + y,  # linear 3: bias, weight
        x + y + h2,              # input
        # The first segment again, beside a gradient of the size of h2: linear, relu, linear, and
        # relu for its signs alone.
        x + h1 + h2, x + h1 + s1 + h2, x + h1 + s1 + 2 * h2, x + h1 + s1 + 2 * h2 + s2,
        x + h1 + s1 + s2 + h2,   # relu 2
        x + h1 + s1 + h2, x + h1 + s1 + h2, x + s1 + h2 + h1,
        x + s1 + h1,
        x + h1, x + h1,
    ]  # fmt: skip


A, SIGNS = 2 * 8 * 4 * 4 * 4, 2 * 8 * 4 * 4 // 8
"""An activation of the block below (1,024 bytes) and the signs of one."""


def wrn_block(strategy: str) -> list[int]:
    images = torch.zeros(2, 8, 4, 4, requires_grad=True)
    return activation_bytes(ResidualBlock(8, 8), images, lambda m, b: m(b).sum(), strategy)


def test_one_block_by_hand() -> None:
    # Each BatchNorm first counts its batches and makes an empty tensor: no bytes.
    assert wrn_block("none") == [
        0, 0,                          # the batch comes in with its first reader
        2 * A,                         # bn1: x, y1
        2 * A + SIGNS,                 # relu1 over y1
        3 * A + SIGNS,                 # conv1: x, a1, c1
        3 * A + SIGNS, 3 * A + SIGNS,  # nothing
        4 * A + SIGNS,                 # bn2: y2 beside x, a1, c1
        4 * A + 2 * SIGNS,             # relu2 over y2
        5 * A + 2 * SIGNS,             # conv2: x, a1, c1, a2, c2
        5 * A + 2 * SIGNS,             # the sum, over c2: x is still needed
        5 * A + 2 * SIGNS,             # loss
        5 * A + 2 * SIGNS,             # gradient g of the sum, beside x, a1, c1, a2
        5 * A + 2 * SIGNS,             # the sum gives g to x
        5 * A + 2 * SIGNS,             # and to c2
        5 * A + 2 * SIGNS,             # conv2 weight: reads a2
        5 * A + 2 * SIGNS,             # conv2 input: x, a1, c1, g and a gradient of its own
        5 * A + 2 * SIGNS,             # relu2 in place; g stays for x
        5 * A + SIGNS, 5 * A + SIGNS,  # bn2 weight, bias
        5 * A + SIGNS,                 # bn2 input, in place, reads c1
        4 * A + SIGNS,                 # conv1 weight: x, a1, g, gradient of c1
        4 * A + SIGNS,                 # conv1 input: x, g, gradients of c1 and a1
        3 * A + SIGNS,                 # relu1
        3 * A, 3 * A,                  # bn1 weight, bias
        3 * A,                         # bn1 input, added to g
    ]  # fmt: skip


def test_one_block_without_norms_kept_by_hand() -> None:
    # x and c1 are all that stays, and for each BatchNorm 4 floats for each of its 8 channels.
    statistics = 2 * 4 * 8 * 4
    assert wrn_block("no-bn") == [
        statistics + n
        for n in (
            0, 0,
            2 * A, 2 * A, 3 * A,               # bn1, relu1, conv1: x, a1, c1
            2 * A, 2 * A,                      # a1 is gone
            3 * A, 3 * A, 4 * A,               # bn2, relu2, conv2: x, c1, a2, c2
            3 * A, 3 * A,                      # sum, loss
            3 * A, 3 * A, 3 * A,               # gradient g; to x and to c2
            4 * A, 4 * A + SIGNS,              # bn2 and relu2 again: x, c1, g, a2
            4 * A + SIGNS, 4 * A + SIGNS,      # conv2 weight, input
            4 * A + SIGNS, 4 * A, 4 * A, 4 * A,  # relu2, bn2
            4 * A, 4 * A + SIGNS,              # bn1 and relu1 again: x, g, gradient of c1, a1
            4 * A + SIGNS, 4 * A + SIGNS,      # conv1 weight, input
            3 * A + SIGNS, 3 * A, 3 * A, 3 * A,  # relu1, bn1
        )
    ]  # fmt: skip


# -- the report's numbers --------------------------------------------------------------------------


def profiled(name: str, batch: int, *techniques: object) -> MemoryProfile:
    model = builtin(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        network, data = model.build(), model.batch(batch)
    return profile(
        network, data, loss=model.loss, optimizer=model.default_optimizer, techniques=techniques
    )


@cache
def traced(name: str, batch: int) -> Trace:
    model = builtin(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        network, data = model.build(), model.batch(batch)
    return trace_model(network, data, loss=model.loss, optimizer=model.default_optimizer)


def predicted(name: str, batch: int, *techniques: object) -> MemoryProfile:
    """What `profile` says, with the trace of an earlier one."""
    trace = traced(name, batch)
    for technique in techniques:
        trace = technique.predict(trace)
    return memory_profile(trace)


def test_wide_resnet_to_the_byte() -> None:
    found = profiled("wrn-28-2", 100)
    assert found.peak_bytes == 404_810_296
    roles = found.bytes_by_role
    for role in (Role.MODEL, Role.GRADIENT, Role.OPTIMIZER_STATE):
        assert roles[role] == 1_456_858 * 4 == 5_827_432
    # Inputs of every convolution, BatchNorm and the linear layer; the signs; one gradient.
    assert found.activation_bytes == (945_280 * 4 + 475_136 // 8 + 8_192 * 4) * 100
    assert found.stored_activation_bytes >= (945_280 * 4 + 475_136 // 8) * 100
    # At that instant the linear layer's input has given way to its gradient, of the same size.
    assert roles[Role.BACKWARD_ACTIVATION] == (8_192 + 128) * 4 * 100
    assert found.recompute_flops == 0
    assert not found.warnings


@pytest.mark.parametrize(
    ("density", "microbatch", "size"),
    [
        (1.0, 100, "42.6 MB"),
        (1.0, 10, "12.2 MB"),
        (0.3, 10, "6.7 MB"),
        (0.2, 10, "5.6 MB"),
        (0.2, 4, "3.6 MB"),
        (0.1, 4, "2.5 MB"),
    ],
)
def test_wide_resnet_rows(density: float, microbatch: int, size: str) -> None:
    techniques = Sparsity(density), Precision("fp16"), Checkpointing("residual-2*")
    assert format_size(profiled("wrn-28-2", microbatch, *techniques).peak_bytes) == size


def test_without_norms_kept_activations_are_halved_at_little_cost() -> None:
    plain = predicted("wrn-28-2", 100)
    found = predicted("wrn-28-2", 100, Checkpointing("no-bn"))
    saved = 1 - found.stored_activation_bytes / plain.stored_activation_bytes
    assert 0.45 <= saved <= 0.52
    assert 0 < found.recompute_flops < 0.01 * (plain.forward_flops + plain.backward_flops)


def test_residual_2_star_cuts_activations_for_less_than_a_forward_pass() -> None:
    plain = predicted("wrn-28-2", 100)
    found = predicted("wrn-28-2", 100, Checkpointing("residual-2*"))
    assert 5.7 <= plain.activation_bytes / found.activation_bytes <= 5.8
    step = plain.forward_flops + plain.backward_flops
    assert 0.27 <= found.recompute_flops / step <= 0.33
    elements = found.activation_bytes / 4 / 100
    assert 169_100 * 0.99 <= elements <= 169_500 * 1.01


@pytest.mark.parametrize(
    ("precision", "density", "megabytes"),
    [
        ("fp32", 1.0, 662), ("fp32", 0.5, 380), ("fp32", 0.4, 315), ("fp32", 0.3, 249),
        ("fp16", 1.0, 331), ("fp16", 0.5, 201), ("fp16", 0.4, 166), ("fp16", 0.3, 131),
    ],
)  # fmt: skip
def test_translation_rows(precision: str, density: float, megabytes: int) -> None:
    techniques = Sparsity(density), Precision(precision), Checkpointing("residual-1")
    found = predicted("dc-transformer", 250, *techniques)
    assert found.peak_bytes / 1e6 == pytest.approx(megabytes, rel=0.05)


def test_profile_is_what_these_rows_were_predicted_with() -> None:
    techniques = Sparsity(0.3), Precision("fp16"), Checkpointing("residual-2*")
    through_profile = profiled("wrn-28-2", 100, *techniques)
    assert predicted("wrn-28-2", 100, *techniques).as_dict() == through_profile.as_dict()
