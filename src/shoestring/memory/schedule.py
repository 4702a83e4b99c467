"""Recomputation strategies as schedules: which node runs when, forward, again, and backward.

A schedule is a list of events, each reading and writing keys. What a strategy keeps needs no list
of its own: a key lives from the event that writes it to the last event that reads it before it is
written again (`memory.fundamental`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from ..errors import InputError
from ..trace.blocks import block_of
from .items import LEAVES, Item, leaves, read
from .nodes import ForwardGraph, Gradient, Node


class Kind(StrEnum):
    """The kinds of events."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Event:
    """One node run forward or again, or one of its gradients taken."""

    kind: Kind
    node: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    gradient: int = -1
    """Position among the node's gradients; -1 when the node runs forward."""


@dataclass
class Segment:
    """A run of nodes treated as one: kept whole, or recomputed before its backward pass."""

    start: int
    stop: int
    children: list[Segment] = field(default_factory=list)
    recompute: bool = True
    drop_cheap: bool = False
    """Outputs of normalizations and activation functions are recomputed when read."""
    drop_wide: bool = False
    """So are products much larger than what they read."""

    def drops(self, node: Node) -> bool:
        """Whether the node's output is recomputed when read."""
        return (self.drop_cheap and node.cheap) or (self.drop_wide and node.wide)


STRATEGIES = "none, no-bn, every-M, residual-M, residual-M* (M a whole number from 1), per-block"


def segments(graph: ForwardGraph, strategy: str) -> Segment:
    """The tree of segments a strategy of the report makes (Section 3.4), or a text of items."""
    count = len(graph.nodes)
    if strategy == "none":
        return Segment(0, count, recompute=False)
    if strategy == "no-bn":
        return Segment(0, count, recompute=False, drop_cheap=True)
    match = re.fullmatch(r"(every|residual)-([1-9]\d*)(\*?)", strategy)
    if match is None and strategy.startswith((*LEAVES, "recompute", "[")):
        return Segment(0, count, _by_items(graph, read(strategy)))
    if match is None or (match[1] == "every" and match[3]):
        raise InputError(
            f"unknown checkpointing strategy {strategy!r}", hint=f"one of {STRATEGIES}"
        )
    size = int(match[2])
    if match[1] == "every":
        return Segment(0, count, _every(graph, size))
    if graph.blocks == 0:
        raise InputError(
            f"{strategy}: no repeated blocks were found in the model",
            hint="blocks are numbered children of a Sequential or ModuleList; or use every-M",
        )
    return Segment(0, count, _by_blocks(graph, size, bool(match[3])))


def _every(graph: ForwardGraph, size: int) -> list[Segment]:
    cuts, counted = [0], 0
    for node in graph.nodes:
        if any(g.reads for g in node.gradients):
            if counted and counted % size == 0 and cuts[-1] != node.index:
                cuts.append(node.index)
            counted += 1
    cuts.append(len(graph.nodes))
    return [Segment(a, b) for a, b in pairwise(cuts) if a < b]


def _by_blocks(graph: ForwardGraph, size: int, nested: bool) -> list[Segment]:
    """Cut after every `size` blocks; what comes between two blocks joins the later one."""
    ends: dict[int, int] = {}
    for node in graph.nodes:
        if node.block >= 0:
            ends[node.block] = node.index + 1
    boundaries = [0, *(ends[b] for b in sorted(ends))]
    blocks = [Segment(a, b, drop_cheap=nested) for a, b in pairwise(boundaries)]
    found = []
    for first in range(0, len(blocks), size):
        part = blocks[first : first + size]
        if len(part) == 1 or not nested:
            found.append(Segment(part[0].start, part[-1].stop, drop_cheap=nested))
        else:
            found.append(Segment(part[0].start, part[-1].stop, part))
    if boundaries[-1] < len(graph.nodes):
        # After the last block the backward pass follows at once: nothing to gain by running again.
        found.append(Segment(boundaries[-1], len(graph.nodes), recompute=False, drop_cheap=nested))
    return found


def _by_items(graph: ForwardGraph, items: tuple[Item, ...]) -> list[Segment]:
    """A segment for each block, what comes before it included, nested as the items are."""
    known, ends = set(graph.block_paths), dict.fromkeys(graph.block_paths, 0)
    for node in graph.nodes:
        path = block_of(node.module, known)
        if path is not None:
            ends[path] = node.index + 1
    boundaries = [0, *sorted(ends.values())]
    if leaves(items) != len(ends):
        raise InputError(
            f"the schedule is for {leaves(items)} blocks, the model has {len(ends)}",
            hint="one item for each block; keep*3 stands for three",
        )

    def made(items: tuple[Item, ...], at: int) -> list[Segment]:
        found = []
        for item in items:
            start, at = boundaries[at], at + leaves(item)
            if isinstance(item, str):
                found.append(
                    Segment(start, boundaries[at], [], False, item != "keep", item == "lean")
                )
            else:
                inner = made(item, at - leaves(item))
                found.append(Segment(start, boundaries[at], inner))
        return found

    tail = Segment(boundaries[-1], len(graph.nodes), recompute=False)
    return [*made(items, 0), *([tail] if tail.start < tail.stop else [])]


def schedule(graph: ForwardGraph, strategy: str) -> list[Event]:
    """All events of one forward and backward pass under a strategy."""
    builder = _Builder(graph)
    builder.forward()
    root = segments(graph, strategy)
    builder.hold(root)
    builder.backward(root)
    return builder.events


def kept_away(graph: ForwardGraph, strategy: str, what: str) -> frozenset[int]:
    """Keys that are on the host between the passes: "inputs" of what is recomputed, or "all"."""
    if what == "all":
        return frozenset(graph.producer)
    if not what:
        return frozenset()
    root, builder = segments(graph, strategy), _Builder(graph)
    outer = [segment for segment in root.children or [root] if segment.recompute]
    given = (key for segment in outer for key in builder._from_outside(segment))
    return frozenset(key for key in given if key in graph.producer)


class _Builder:
    def __init__(self, graph: ForwardGraph) -> None:
        self.graph = graph
        self.events: list[Event] = []
        self.available: set[int] = set()

    def forward(self) -> None:
        for node in self.graph.nodes:
            self._run(node, Kind.FORWARD)

    def hold(self, root: Segment) -> None:
        """Keys that can be read after the forward pass without recomputing anything."""
        for segment in root.children or [root]:
            if segment.recompute:
                self.available.update(self._from_outside(segment))
            else:
                self._hold_all(segment)

    def _hold_all(self, segment: Segment) -> None:
        for node in self.graph.nodes[: segment.stop]:
            if segment.start == 0 or node.index >= segment.start:
                if not segment.drops(node):
                    self.available.update(self._writes(node))
        self.available.update(self._from_outside(segment))

    def backward(self, segment: Segment) -> None:
        if segment.children:
            wanted: set[int] = set()
            kept: set[int] = set()
            for child in segment.children:
                wanted.update(k for k in self._from_outside(child) if self._inside(k, segment))
                if not child.recompute:
                    wanted.update(self._needed(child))
                    kept.update(range(child.start, child.stop))
            self._materialize(wanted, kept)
            for child in reversed(segment.children):
                self.backward(child)
            return
        nodes = self.graph.nodes[segment.start : segment.stop]
        if segment.recompute:
            self._materialize(self._needed(segment))
        for node in reversed(nodes):
            for position, gradient in enumerate(node.gradients):
                self._take(node, position, gradient)

    def _needed(self, segment: Segment) -> set[int]:
        """Keys made in the segment that its backward reads, those it recomputes left out."""
        nodes = self.graph.nodes[segment.start : segment.stop]
        read = {key for node in nodes for g in node.gradients for key in g.reads}
        needed = {key for key in read if self._inside(key, segment)}
        return needed - {k for node in nodes if segment.drops(node) for k in self._writes(node)}

    def _take(self, node: Node, position: int, gradient: Gradient) -> None:
        self._materialize(gradient.reads)
        self.events.append(Event(Kind.BACKWARD, node.index, gradient.reads, (), position))

    def _materialize(self, keys: Iterable[int], recording: Container[int] | None = None) -> None:
        """Recompute, in forward order, all that these keys need.

        Records written on the way are held too, except of nodes that will be recomputed: given
        `recording`, all others.
        """
        wanted = [k for k in keys if k in self.graph.producer and k not in self.available]
        if not wanted:
            return
        rerun: set[int] = set()
        queue = list(wanted)
        while queue:
            node = self.graph.nodes[self.graph.producer[queue.pop()]]
            if node.index in rerun:
                continue
            rerun.add(node.index)
            queue.extend(
                k for k in node.inputs if k in self.graph.producer and k not in self.available
            )
        for index in sorted(rerun):
            node = self.graph.nodes[index]
            self._run(node, Kind.RECOMPUTE)
            if node.record and (recording is None or index in recording):
                self.available.add(node.record)
        self.available.update(wanted)

    def _run(self, node: Node, kind: Kind) -> None:
        reads = tuple(k for k in node.inputs if self.graph.key_bytes[k])
        self.events.append(Event(kind, node.index, reads, self._writes(node)))

    @staticmethod
    def _writes(node: Node) -> tuple[int, ...]:
        return (*node.outputs, node.record) if node.record else node.outputs

    def _inside(self, key: int, segment: Segment) -> bool:
        producer = self.graph.producer.get(key, -1)
        return segment.start <= producer < segment.stop

    def _from_outside(self, segment: Segment) -> set[int]:
        """Keys made before the segment that it reads, forward or backward."""
        keys: set[int] = set()
        for node in self.graph.nodes[segment.start : segment.stop]:
            keys.update(node.inputs)
            keys.update(k for g in node.gradients for k in g.reads)
        return {k for k in keys if self.graph.producer.get(k, segment.start) < segment.start}


def statistics_bytes(graph: ForwardGraph, events: Iterable[Event]) -> int:
    """Batch statistics cached for every normalization that is recomputed."""
    again = {e.node for e in events if e.kind is Kind.RECOMPUTE}
    return sum(graph.nodes[index].statistics_bytes for index in again)


def recompute_flops(graph: ForwardGraph, events: Iterable[Event]) -> int:
    """Floating-point operations of everything that is recomputed."""
    return sum(graph.nodes[e.node].recompute_flops for e in events if e.kind is Kind.RECOMPUTE)
