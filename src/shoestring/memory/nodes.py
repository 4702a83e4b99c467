"""The forward pass as a memory model sees it: nodes that read, write and need tensors again.

A node is one operation, or one call of a custom autograd function. What can be kept is a *key*: a
value of the trace (its index, >= 0), or the compressed record a node writes for its own gradient
(negative, one per node). Views are the value they look at.

Example, `Linear(4, 8) → ReLU → Linear(8, 2) → sum` without biases on 3 × 4 numbers. Values 0 and 1
are the two weights, 2 the batch, and then each result in turn:

    node  operation  reads   writes     its gradients, and what each of them reads
    0     mm         2, 0    3          of 0 reads 2
    1     relu       3       4, bits    of 3 reads bits
    2     mm         4, 1    5          of 1 reads 4; of 4 reads nothing that must be kept
    3     sum        5       6          of 5 reads nothing

    key       2     3     4     bits (-2)    5     6     weights 0, 1
    bytes    48    96    96     3           24     4     0: counted as the model's

So plain training keeps the batch, the bits (one for each of 24 numbers) and value 4 until backward
reads them, and drops 3 and 5 in the forward pass. `schedule.py` puts the nodes in order, both ways.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..trace.blocks import block_of, find_blocks
from ..trace.graph import Op, Role, Trace
from ..trace.rules import (
    CACHED_FLOATS_PER_CHANNEL,
    FALLBACK,
    OVERWRITING,
    RECOMPUTED_NORM_FLOPS_PER_ELEMENT,
    UNDIFFERENTIATED,
    Flow,
    Rule,
    rule_for,
)
from .storage import dense_bytes

_FREE_ROLES = (Role.MODEL, Role.BUFFER, Role.OPTIMIZER_STATE, Role.GRADIENT)


@dataclass(frozen=True)
class Gradient:
    """One gradient a node computes in the backward pass."""

    of: int
    """The value it is the gradient of."""
    reads: tuple[int, ...]
    """Keys of the forward pass it needs."""
    is_parameter: bool


@dataclass(frozen=True)
class Node:
    """One operation of the forward pass."""

    index: int
    name: str
    module: str
    block: int
    """Which occurrence of a repeated block it runs in; -1 for none."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    gradients: tuple[Gradient, ...]
    """Parameters first: their gradient is taken while the input is still there."""
    flow: Flow
    cheap: bool
    wide: bool
    """A product much larger than what it reads."""
    elementwise: bool
    record: int
    """Key of its compressed record, 0 for none."""
    statistics_bytes: int
    """Cached when the node is recomputed (BatchNorm)."""
    flops: int
    recompute_flops: int


@dataclass
class ForwardGraph:
    """All nodes in the order they run, and what each key costs to hold."""

    nodes: list[Node] = field(default_factory=list)
    key_bytes: dict[int, int] = field(default_factory=dict)
    key_module: dict[int, str] = field(default_factory=dict)
    producer: dict[int, int] = field(default_factory=dict)
    """Key → the node that writes it; keys of the batch have none."""
    blocks: int = 0
    block_paths: tuple[str, ...] = ()
    """Modules that count as blocks, in the order they run."""
    unknown: tuple[str, ...] = ()


def record_key(node: int) -> int:
    """The key of a node's compressed record."""
    return -(node + 1)


def forward_graph(trace: Trace) -> ForwardGraph:
    """Group the forward operations into nodes and apply the rules."""
    graph = ForwardGraph(block_paths=trace.checkpoint_blocks or find_blocks(trace))
    parameters = {p.storage for p in trace.parameters}
    blocks = find_blocks(trace)
    density = _densities(trace)
    unknown: dict[str, None] = {}
    last_block, occurrence = None, -1
    for group in _groups(trace):
        index = len(graph.nodes)
        first, last = group[0], group[-1]
        members = {op.index for op in group}
        read = dict.fromkeys(
            s.value for op in group for name, s in op.inputs if not _overwritten(op, name)
        )
        written = dict.fromkeys(s.value for op in group for s in op.outputs)
        inputs = tuple(v for v in read if trace.values[v].producer not in members)
        outputs = tuple(v for v in written if trace.values[v].producer in members)
        rule = _rule(group, unknown)
        block = block_of(first.module, blocks)
        if block != last_block:
            last_block = block
            if block is not None:
                occurrence += 1
        for value in (*inputs, *outputs):
            _cost(trace, graph, value)
        for value in outputs:
            graph.key_module[value] = first.module
            if graph.key_bytes[value]:
                graph.producer[value] = index
        record = 0
        differentiable = any(op.differentiable for op in group) or last.saved != ()
        if rule.bits and differentiable:
            record = record_key(index)
            graph.key_bytes[record] = dense_bytes(first.outputs[0].numel, rule.bits)
            graph.key_module[record] = first.module
            graph.producer[record] = index
        gradients = _gradients(trace, group, rule, inputs, outputs, record, parameters)
        flops = int(sum(op.flops * density.get(op.index, 1.0) for op in group))
        statistics, recompute = 0, flops
        if rule.normalization:
            channels = first.inputs[0][1].shape[1] if len(first.inputs[0][1].shape) > 1 else 1
            statistics = dense_bytes(channels * CACHED_FLOATS_PER_CHANNEL, 32)
            recompute = RECOMPUTED_NORM_FLOPS_PER_ELEMENT * first.outputs[0].numel
        graph.nodes.append(
            Node(
                index=index,
                name=first.name if len(group) == 1 else "custom function",
                module=first.module,
                block=occurrence if block is not None else -1,
                inputs=inputs,
                outputs=outputs,
                gradients=gradients,
                flow=rule.flow,
                cheap=rule.cheap,
                wide=len(group) == 1 and is_wide(first),
                elementwise=rule.elementwise,
                record=record,
                statistics_bytes=statistics,
                flops=flops,
                recompute_flops=recompute,
            )
        )
    _number_residual_blocks(graph)
    _drop_dead_gradients(graph, trace.loss)
    graph.unknown = tuple(unknown)
    return graph


WIDE = 2
"""A product is wide if its output has so many times the elements of what it reads."""

_READS = {"aten.convolution": 0, "aten.mm": 0, "aten.addmm": 1}


def is_wide(op: Op) -> bool:
    """Whether it is a product much larger than what it reads."""
    position = _READS.get(op.name)
    return position is not None and op.outputs[0].numel >= WIDE * op.inputs[position][1].numel


def _overwritten(op: Op, argument: str) -> bool:
    """Written without being read: what was there before does not matter."""
    return argument in op.mutates and op.name.partition(".")[2] in OVERWRITING


def _drop_dead_gradients(graph: ForwardGraph, loss: int) -> None:
    """A branch that never reaches the loss has no gradient and keeps nothing for it."""
    reached = {loss}
    for node in reversed(graph.nodes):
        if reached.isdisjoint(node.outputs):
            graph.nodes[node.index] = replace(node, gradients=())
        else:
            reached.update(g.of for g in node.gradients)


def _number_residual_blocks(graph: ForwardGraph) -> None:
    """Cut every repeated layer after its residual additions: one block per residual connection.

    A transformer's layer has two or three, WideResNet's block has one. A cut stands behind the
    addition and the normalization or activation that follows it, where a single tensor made in
    the layer is read later on; a layer without such a place is one block.
    """
    last_use: dict[int, int] = {}
    for node in graph.nodes:
        for key in node.inputs:
            last_use[key] = node.index
    number, layer_before = -1, -1
    fresh = True
    open_keys: dict[int, int] = {}
    renumbered: list[Node] = []
    after_addition = False
    for position, node in enumerate(graph.nodes):
        if node.block < 0:
            renumbered.append(node)
            layer_before = -1
            continue
        if node.block != layer_before:
            fresh, layer_before, after_addition = True, node.block, False
            open_keys = {}
        if fresh:
            number, fresh = number + 1, False
        renumbered.append(replace(node, block=number))
        for key in node.outputs:
            if graph.key_bytes[key] and last_use.get(key, -1) > position:
                open_keys[key] = last_use[key]
        open_keys = {k: use for k, use in open_keys.items() if use > position}
        joins = [k for k in node.inputs if graph.key_bytes[k]]
        is_addition = node.name in ("aten.add", "aten.add_") and len(joins) > 1
        after_addition = is_addition or (after_addition and node.cheap)
        following = graph.nodes[position + 1] if position + 1 < len(graph.nodes) else None
        continues = following is not None and following.cheap and following.block == node.block
        if after_addition and len(open_keys) == 1:
            stays = (
                continues and following is not None and _only_reader(graph, open_keys, following)
            )
            fresh = not stays
    graph.nodes[:] = renumbered
    graph.blocks = number + 1


def _only_reader(graph: ForwardGraph, keys: Iterable[int], reader: Node) -> bool:
    """Nobody but this node reads these keys after it has run."""
    later = graph.nodes[reader.index + 1 :]
    return not any(key in node.inputs for key in keys for node in later)


def _groups(trace: Trace) -> list[list[Op]]:
    """Operations one by one, those of a custom function together; views left out."""
    groups: list[list[Op]] = []
    for op in trace.forward_ops:
        if op.function >= 0 and groups and groups[-1][-1].function == op.function:
            groups[-1].append(op)
            continue
        read = {spec.value for _, spec in op.inputs}
        is_view = op.is_view or (
            bool(op.outputs) and not op.mutates and all(s.value in read for s in op.outputs)
        )
        if (is_view and op.function < 0) or not op.outputs:
            continue
        groups.append([op])
    return groups


def _rule(group: list[Op], unknown: dict[str, None]) -> Rule:
    if len(group) > 1 or group[0].function >= 0:
        return Rule({"*": ("saved",)}, "what the function asked to keep")
    op = group[0]
    if not op.differentiable or op.name.partition(".")[2] in UNDIFFERENTIATED:
        return Rule({}, "takes no gradient", elementwise=bool(op.mutates))
    found = rule_for(op.name)
    if found is None:
        unknown[op.name] = None
        return FALLBACK
    return found


def _gradients(
    trace: Trace,
    group: list[Op],
    rule: Rule,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    record: int,
    parameters: set[int],
) -> tuple[Gradient, ...]:
    if not rule.needs:
        return ()
    gradients: list[Gradient] = []
    arguments = [(name, s) for op in group for name, s in op.inputs if s.value in inputs]
    by_name = {name: s.value for name, s in group[0].inputs}
    seen: set[int] = set()
    for name, spec in arguments:
        is_parameter = trace.values[spec.value].storage in parameters
        if not spec.requires_grad or not spec.dtype.is_floating_point:
            continue
        sources = rule.needs.get(name.partition(".")[0], rule.needs.get("*", ()))
        reads: list[int] = []
        for source in sources:
            if source == "saved":
                reads.extend(group[-1].saved)
            elif source == "*":
                reads.extend((*inputs, *outputs))
            elif source == "bits":
                reads.append(record)
            elif source.startswith("output"):
                position = int(source.partition(".")[2] or 0)
                if position < len(group[0].outputs):
                    reads.append(group[0].outputs[position].value)
            elif source == "whole":  # a reduction over everything has one output, and no positions
                if len(group[0].outputs) == 1:
                    reads.extend((*inputs, *outputs))
            else:
                reads.extend(v for n, v in by_name.items() if n.partition(".")[0] == source)
        keys = tuple(dict.fromkeys(k for k in reads if not _free(trace, k)))
        if spec.value in seen:  # the same tensor twice (x·x): one gradient, both needs
            gradients = [
                Gradient(g.of, tuple(dict.fromkeys(g.reads + keys)), g.is_parameter)
                if g.of == spec.value
                else g
                for g in gradients
            ]
            continue
        seen.add(spec.value)
        gradients.append(Gradient(spec.value, keys, is_parameter))
    return tuple(sorted(gradients, key=lambda g: not g.is_parameter))


def _free(trace: Trace, key: int) -> bool:
    return key >= 0 and trace.storages[trace.values[key].storage].role in _FREE_ROLES


def _cost(trace: Trace, graph: ForwardGraph, value: int) -> None:
    if value in graph.key_bytes:
        return
    held = trace.values[value]
    bits = held.information_bits or held.dtype.itemsize * 8
    graph.key_bytes[value] = 0 if _free(trace, value) else dense_bytes(held.numel, bits)
    graph.key_module.setdefault(value, "")


def _densities(trace: Trace) -> dict[int, float]:
    """Fraction of the floating-point operations left where a factor is a sparse parameter."""
    sparse = {p.storage: p.density for p in trace.parameters if p.density < 1.0}
    found: dict[int, float] = {}
    if not sparse:
        return found
    for op in trace.ops:
        for _, spec in op.inputs:
            density = sparse.get(trace.values[spec.value].storage)
            if density is not None:
                found[op.index] = density
        if op.forward_op in found:
            found[op.index] = found[op.forward_op]
    return found


def dense_flops(trace: Trace, phase: str) -> int:
    """Floating-point operations of a phase, sparse factors counted by their nonzeros."""
    density = _densities(trace)
    return int(sum(op.flops * density.get(op.index, 1.0) for op in trace.ops if op.phase == phase))
