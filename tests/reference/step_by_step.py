"""One training step, one thing at a time, in the `fundamental` accounting: slow and obvious.

A little machine has a memory, a list of steps ("run node 3", "take gradient 0 of node 3"), and at
every step looks ahead through all that remain to decide what it still has to hold. The list comes
from walking each strategy as the report describes it. Nothing is shared with the fast code but the
description of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shoestring.memory.nodes import ForwardGraph, Node


@dataclass(frozen=True)
class Step:
    """Run a node, forward (`again` is false) or once more, or take one of its gradients."""

    node: Node
    again: bool = False
    gradient: int | None = None

    @property
    def reads(self) -> tuple[int, ...]:
        if self.gradient is None:
            return self.node.inputs
        return self.node.gradients[self.gradient].reads

    @property
    def writes(self) -> tuple[int, ...]:
        return () if self.gradient is not None else made_by(self.node)


@dataclass(frozen=True)
class Outcome:
    """What the machine saw; parameters are not in it."""

    live_bytes: list[int]
    recomputed_flops: int

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes)


def simulate(graph: ForwardGraph, strategy: str) -> Outcome:
    """Forward and backward activations at every instant of a step under a strategy."""
    steps = all_steps(graph, strategy)
    statistics = 0
    for node in graph.nodes:
        if any(step.again and step.node is node for step in steps):
            statistics += node.statistics_bytes
    machine = Machine(graph, steps)
    live = [machine.perform(instant) + statistics for instant in range(len(steps))]
    return Outcome(live, sum(step.node.recompute_flops for step in steps if step.again))


# -- what is done, in which order ------------------------------------------------------------------


def made_by(node: Node) -> tuple[int, ...]:
    """The outputs of a node, and its record if it writes one."""
    return node.outputs + ((node.record,) if node.record else ())


def all_steps(graph: ForwardGraph, strategy: str) -> list[Step]:
    """Every step of the forward pass, then every step of the backward pass."""
    walk = Walk(graph)
    if strategy == "none":
        walk.keep(k for node in graph.nodes for k in made_by(node))
        walk.backward_through(graph.nodes)
    elif strategy == "no-bn":
        walk.keep(k for node in graph.nodes if not node.cheap for k in made_by(node))
        walk.backward_through(graph.nodes)
    elif strategy.startswith("every-"):
        parts = cut_every(graph, int(strategy.removeprefix("every-")))
        walk.keep_what_enters(parts)
        for part in reversed(parts):
            walk.recompute_for(part)
            walk.backward_through(part)
    else:
        star = strategy.endswith("*")
        size = int(strategy.removeprefix("residual-").removesuffix("*"))
        blocks, tail = cut_at_blocks(graph)
        groups = [blocks[i : i + size] for i in range(0, len(blocks), size)]
        walk.keep_what_enters([[n for block in group for n in block] for group in groups])
        walk.keep_what_enters([tail])
        walk.keep(k for node in tail if not (star and node.cheap) for k in made_by(node))
        walk.backward_through(tail)
        for group in reversed(groups):
            whole = [n for block in group for n in block]
            if not star:
                walk.recompute_for(whole)
                walk.backward_through(whole)
                continue
            if len(group) > 1:
                walk.recompute_for_block_inputs(group)
            for block in reversed(group):
                walk.recompute_for(block, but_cheap=True)
                walk.backward_through(block)
    return walk.steps


def cut_every(graph: ForwardGraph, size: int) -> list[list[Node]]:
    """Cut before the (size+1)-th, (2·size+1)-th … node whose gradients read something."""
    parts: list[list[Node]] = [[]]
    readers_here = 0
    for node in graph.nodes:
        reader = any(gradient.reads for gradient in node.gradients)
        if reader and readers_here == size:
            parts.append([])
            readers_here = 0
        readers_here += reader
        parts[-1].append(node)
    return parts


def cut_at_blocks(graph: ForwardGraph) -> tuple[list[list[Node]], list[Node]]:
    """The blocks, each with the nodes that come before it, and what comes after the last."""
    blocks: list[list[Node]] = []
    waiting: list[Node] = []
    current = None
    for node in graph.nodes:
        waiting.append(node)
        if node.block < 0:
            continue
        if node.block != current:
            blocks.append([])
            current = node.block
        blocks[-1] += waiting
        waiting = []
    return blocks, waiting


class Walk:
    """Writes the list of steps, knowing what is on hand without running anything again."""

    def __init__(self, graph: ForwardGraph) -> None:
        self.graph = graph
        self.steps = [Step(node) for node in graph.nodes]
        made = {k for node in graph.nodes for k in made_by(node)}
        self.on_hand = set(graph.key_bytes) - made

    def keep(self, keys) -> None:
        self.on_hand |= set(keys)

    def keep_what_enters(self, parts: list[list[Node]]) -> None:
        for part in parts:
            self.keep(entering(part))

    def recompute_for(self, part: list[Node], but_cheap: bool = False) -> None:
        """Have what the gradients of this part read and the part itself makes."""
        made = {k for node in part if not (but_cheap and node.cheap) for k in made_by(node)}
        self.bring({k for node in part for g in node.gradients for k in g.reads if k in made})

    def recompute_for_block_inputs(self, group: list[list[Node]]) -> None:
        """Have what passes from one block of the group to a later one, and nothing more."""
        made = {k for block in group for node in block for k in made_by(node)}
        before = set(self.on_hand)
        passing = {k for block in group for k in entering(block) if k in made}
        self.bring(passing)
        self.on_hand = before | passing

    def bring(self, wanted: set[int]) -> None:
        """Run again, in forward order, the nodes it takes to have these keys.

        The keys asked for stay, and the records written on the way; all else is gone at once.
        """
        missing = wanted - self.on_hand
        wanted = set(missing)
        again: list[Node] = []
        for node in reversed(self.graph.nodes):
            if missing & set(made_by(node)):
                again.insert(0, node)
                missing |= set(node.inputs) - self.on_hand
        self.steps += [Step(node, again=True) for node in again]
        self.keep(wanted)
        self.keep(node.record for node in again if node.record)

    def backward_through(self, part: list[Node]) -> None:
        for node in reversed(part):
            for position, gradient in enumerate(node.gradients):
                self.bring(set(gradient.reads))
                self.steps.append(Step(node, gradient=position))


def entering(part: list[Node]) -> set[int]:
    """What the nodes of a part or their gradients read and none of them makes."""
    made = {k for node in part for k in made_by(node)}
    read = {k for node in part for k in node.inputs}
    read |= {k for node in part for gradient in node.gradients for k in gradient.reads}
    return read - made


# -- what is held while it is done -----------------------------------------------------------------


@dataclass
class Machine:
    """A memory of forward keys, and slots of memory that gradients write and share."""

    graph: ForwardGraph
    steps: list[Step]
    memory: dict[int, int] = field(default_factory=dict)
    slot_bytes: dict[int, int] = field(default_factory=dict)
    slot_of: dict[int, int] = field(default_factory=dict)
    """Value → the slot its gradient is in."""
    slots_made: int = 0

    def perform(self, instant: int) -> int:
        """Do one step and return the bytes live while it is done."""
        step = self.steps[instant]
        for key in step.reads:
            if key not in self.memory:
                self.arrive(key, instant)
        moment = 0
        if step.gradient is None:
            overwriting = self.run(step.node, instant)
        else:
            overwriting = set()
            moment = self.take_gradient(step.node, step.gradient)
        held = sum(nbytes for key, nbytes in self.memory.items() if key not in overwriting)
        total = held + sum(self.slot_bytes.values()) + moment
        self.memory = {k: b for k, b in self.memory.items() if self.read_from(k, instant + 1)}
        if step.gradient == len(step.node.gradients) - 1:
            for value in step.node.outputs:
                self.slot_of.pop(value, None)
            self.free_slots()
        return total

    def read_from(self, key: int, instant: int) -> bool:
        """Will this key be read, from this instant on, before it is written again?"""
        for step in self.steps[instant:]:
            if key in step.reads:
                return True
            if key in step.writes:
                return False
        return False

    def arrive(self, key: int, instant: int) -> None:
        """Only the batch comes in from nowhere; everything else has to have been kept."""
        nbytes = self.graph.key_bytes[key]
        never_made = all(key not in made_by(node) for node in self.graph.nodes)
        assert never_made, f"step {instant} reads key {key}, which is not in memory"
        if nbytes:
            self.memory[key] = nbytes

    def run(self, node: Node, instant: int) -> set[int]:
        """Write what will be read later; return the outputs that were written over an input."""
        room = [k for k in node.inputs if k in self.memory and not self.read_from(k, instant + 1)]
        overwriting = set()
        for key in made_by(node):
            if not self.read_from(key, instant + 1):
                continue
            nbytes = self.graph.key_bytes[key]
            self.memory[key] = nbytes
            large_enough = [k for k in room if self.graph.key_bytes[k] >= nbytes]
            if node.elementwise and key in node.outputs and large_enough:
                large_enough.sort(key=lambda k: self.graph.key_bytes[k])
                room.remove(large_enough[0])
                overwriting.add(key)
        return overwriting

    def take_gradient(self, node: Node, position: int) -> int:
        """Put a gradient into a slot; return the bytes needed for this moment only."""
        gradient = node.gradients[position]
        if gradient.is_parameter:
            return 0
        value = gradient.of
        nbytes = self.graph.key_bytes[value]
        if value in self.slot_of:
            others = [v for v in self.holders(self.slot_of[value]) if v != value]
            if others:
                self.slot_of[value] = self.new_slot(nbytes)
            return nbytes if node.flow == "fresh" else 0
        arriving = [self.slot_of[v] for v in node.outputs if v in self.slot_of]
        if arriving and nbytes and self.slot_bytes[arriving[0]] == nbytes:
            slot = arriving[0]
            is_last = position == len(node.gradients) - 1
            unshared = len(self.holders(slot)) == 1
            if node.flow == "same" or (node.flow == "in place" and is_last and unshared):
                self.slot_of[value] = slot
                return 0
        self.slot_of[value] = self.new_slot(nbytes)
        return 0

    def holders(self, slot: int) -> list[int]:
        return [value for value, held in self.slot_of.items() if held == slot]

    def new_slot(self, nbytes: int) -> int:
        self.slots_made += 1
        self.slot_bytes[self.slots_made] = nbytes
        return self.slots_made

    def free_slots(self) -> None:
        for slot in list(self.slot_bytes):
            if not self.holders(slot):
                del self.slot_bytes[slot]
