"""The `fundamental` accounting: what an ideal executor must hold (the report, Appendix B).

Forward activations live from the event that writes them to the last that reads them before they
are written again. Backward activations (gradients of activations) live from their first
contribution until the node that made the activation has passed them on; an addition passes its
gradient on unchanged, an elementwise function overwrites it, and a parameter's gradient is taken
before the input's, so an input and its gradient need not be there together. A further contribution
to a gradient is made before it is added. Gradients of parameters, the parameters and the optimizer
state are there all the time.

Departure: the report leaves out what a forward pass needs only for a moment. It is counted here
(`transient`); it never decides the peak of the report's own settings.

A tensor that a technique keeps on the host is live while the forward pass reads it. It is
live again while backward reads the one before it and then itself: two at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..trace.graph import Role, Trace
from ..trace.rules import Flow
from .nodes import ForwardGraph
from .schedule import Event, Kind, kept_away, statistics_bytes
from .storage import IndexFormat, dense_bytes, nonzero_count, sparse_bytes
from .timeline import Change, Timeline, build


@dataclass(frozen=True)
class ModelBytes:
    """Parameters and what belongs to each: the same at every instant."""

    model_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int


def parameter_bytes(trace: Trace, index_format: IndexFormat = "csr") -> ModelBytes:
    """Dense parameters by their type; sparse ones as values that share one index.

    The index is counted with the model, as in the report's storage formula (Section 3.1).
    """
    model = gradient = state = 0
    for parameter in trace.parameters:
        bits = parameter.dtype.itemsize * 8
        numel, index = parameter.numel, 0
        if parameter.density < 1.0:
            numel = nonzero_count(parameter.numel, parameter.density)
            index = sparse_bytes(parameter.shape, numel, bits, format=index_format).index_bytes
        if not parameter.on_host:
            model += dense_bytes(numel, bits) + index
        if parameter.has_gradient:
            gradient += dense_bytes(numel, bits)
        for elements in parameter.state_elements:
            held = numel if elements == parameter.numel else elements
            kept = parameter.state_dtype or parameter.dtype
            state += dense_bytes(held, kept.itemsize * 8)
    return ModelBytes(model, gradient, state)


def fundamental_timeline(trace: Trace, graph: ForwardGraph, events: list[Event]) -> Timeline:
    """Bytes by role at every event of the step."""
    resident = parameter_bytes(trace)
    changes = [
        Change(0, resident.model_bytes, Role.MODEL, ""),
        Change(0, resident.gradient_bytes, Role.GRADIENT, ""),
        Change(0, resident.optimizer_state_bytes, Role.OPTIMIZER_STATE, ""),
        Change(0, statistics_bytes(graph, events), Role.FORWARD_ACTIVATION, ""),
    ]
    away = kept_away(graph, trace.checkpoint, trace.on_host)
    changes += _forward_changes(graph, events, away)
    changes += backward_changes(graph, events)
    labels = [(graph.nodes[e.node].name, str(e.kind), graph.nodes[e.node].module) for e in events]
    return build(changes, labels)


def _forward_changes(
    graph: ForwardGraph, events: list[Event], away: frozenset[int] = frozenset()
) -> list[Change]:
    """A key is live from its writing to its last reading before it is written again.

    The batch counts from the first event that reads it; before, it is the data loader's.
    """
    lives: list[tuple[int, int, int]] = []
    first_read: dict[int, int] = {}
    last_read: dict[int, int] = {}

    def live(key: int, start: int, stop: int) -> None:
        if graph.key_bytes[key] and stop >= start:
            lives.append((key, start, stop))

    for instant in range(len(events) - 1, -1, -1):
        event = events[instant]
        dying = {k for k in event.reads if k not in last_read}
        for key in event.writes:
            stop = last_read.pop(key, None)
            if stop is None:
                continue
            start = instant
            if event.kind is not Kind.BACKWARD and graph.nodes[event.node].elementwise:
                overwritten = min(
                    (k for k in dying if graph.key_bytes[k] >= graph.key_bytes[key]),
                    key=graph.key_bytes.__getitem__,
                    default=None,
                )
                if overwritten is not None and key >= 0:
                    dying.discard(overwritten)
                    start = instant + 1
            live(key, start, stop)
        for key in event.reads:
            last_read.setdefault(key, instant)
            first_read[key] = instant
    for key, stop in last_read.items():
        live(key, first_read[key], stop)
    changes: list[Change] = []
    first_backward = next((i for i, e in enumerate(events) if e.kind is Kind.BACKWARD), len(events))
    for key, start, stop in _without_gaps(events, lives, away) if away else lives:
        role = Role.FORWARD_ACTIVATION if stop >= first_backward else Role.TRANSIENT
        size, module = graph.key_bytes[key], graph.key_module[key]
        changes.append(Change(start, size, role, module))
        changes.append(Change(stop + 1, -size, role, module))
    return changes


def _without_gaps(
    events: list[Event], lives: list[tuple[int, int, int]], away: frozenset[int]
) -> list[tuple[int, int, int]]:
    """Lives of keys, less the time between the passes of those that are on the host then."""
    turn = next((i for i, e in enumerate(events) if e.kind is not Kind.FORWARD), len(events))
    reads: dict[int, list[int]] = {key: [] for key in away}
    for instant, event in enumerate(events):
        for key in away.intersection(event.reads):
            reads[key].append(instant)
    made, back = [], []
    for key, start, stop in lives:
        if key not in away or start >= turn or stop < turn:
            made.append((key, start, stop))
            continue
        made.append((key, start, max((i for i in reads[key] if i < turn), default=start)))
        back.append((min(i for i in reads[key] if i >= turn), key, stop))
    ahead = turn
    for read, key, stop in sorted(back):
        made.append((key, ahead, stop))
        ahead = read
    return made


@dataclass
class _Buffer:
    """Memory that one or several gradients share."""

    nbytes: int
    start: int
    module: str
    owners: set[int] = field(default_factory=set)


def backward_changes(graph: ForwardGraph, events: list[Event]) -> list[Change]:
    """Gradients of activations, from first contribution to last use."""
    buffers: dict[int, _Buffer] = {}
    changes: list[Change] = []

    def release(value: int, instant: int) -> None:
        buffer = buffers.pop(value, None)
        if buffer is None:
            return
        buffer.owners.discard(value)
        if not buffer.owners and buffer.nbytes:
            role = Role.BACKWARD_ACTIVATION
            changes.append(Change(buffer.start, buffer.nbytes, role, buffer.module))
            changes.append(Change(instant + 1, -buffer.nbytes, role, buffer.module))

    for instant, event in enumerate(events):
        if event.kind is not Kind.BACKWARD:
            continue
        node = graph.nodes[event.node]
        gradient = node.gradients[event.gradient]
        last = event.gradient == len(node.gradients) - 1
        source = next((v for v in node.outputs if v in buffers), None)
        if not gradient.is_parameter:
            size = graph.key_bytes[gradient.of]
            mine = buffers.get(gradient.of)
            if mine is not None:
                if node.flow is Flow.FRESH:
                    changes.append(Change(instant, size, Role.BACKWARD_ACTIVATION, node.module))
                    changes.append(
                        Change(instant + 1, -size, Role.BACKWARD_ACTIVATION, node.module)
                    )
                if mine.owners != {gradient.of}:  # shared with a gradient not yet used: part ways
                    mine.owners.discard(gradient.of)
                    buffers[gradient.of] = _Buffer(size, instant, node.module, {gradient.of})
            else:
                given = buffers[source] if source is not None else None
                same = given is not None and given.nbytes == size and size > 0
                alone = given is not None and given.owners == {source}
                if (
                    same
                    and given is not None
                    and (node.flow is Flow.SAME or (node.flow is Flow.IN_PLACE and alone and last))
                ):
                    given.owners.add(gradient.of)
                    buffers[gradient.of] = given
                else:
                    buffers[gradient.of] = _Buffer(size, instant, node.module, {gradient.of})
        if last:
            for value in node.outputs:
                release(value, instant)
    for value in list(buffers):
        release(value, len(events))
    return changes
