"""A training step as a chain of stages, and what a schedule for it needs and costs.

The stages are the head (all before the first block), the blocks, and the tail (all after the last
block, and the loss). A schedule says for each block whether it is kept, in whole or without what is
cheap to recompute, or recomputed as part of a region (`memory.items`): when backward reaches a
region, it is recomputed as the schedule inside of it says. Recomputation stops at the last tensor
that backward reads, so the end of a region costs less (`Option.again`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

from ...memory.items import Item, leaves
from ...memory.work import Cost, Work


def flops_only(work: Work) -> float:
    """The cost by floating-point operations alone."""
    return work.flops


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a stage so that its backward pass can follow.

    Bytes are above what the stages before it keep, which has the stage's input among it.
    """

    kept_bytes: int
    """Held from its forward to its backward pass: saved tensors, and its output; less what is
    freed of its input."""
    forward_bytes: int
    """Peak of its forward pass."""
    backward_bytes: int
    """Peak of its backward pass, with what it kept and the gradients it makes."""
    again_bytes: int
    """Peak of running again and backward, as the last of a region."""
    forward: Work
    again: Work
    """Running again as the last of a region: up to the last tensor that backward reads."""
    backward: Work
    """With what a cheap leaf recomputes."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One block, or the head or the tail of the chain."""

    name: str
    options: Mapping[str, Option]
    """"keep", and "cheap" and "lean" where they keep less."""
    held_bytes: int = 0
    """Held after it when it ends a region: its output, which the next stage starts from."""
    pass_bytes: int = 0
    """Peak of a forward pass that keeps nothing."""
    gradient_bytes: int = 0
    """Gradient of its output, there while a region that it ends is recomputed."""
    parameter_gradient_bytes: int = 0
    """Gradients that its backward pass leaves behind."""
    freed_bytes: int = 0
    """Of its input, what goes when a leaf has run, though a region that starts here holds it."""
    joins: bool = True
    """Nothing but the next block reads its output, so one region may hold both."""


@dataclass(frozen=True)
class Chain:
    """A training step as a chain of blocks; head and tail are always kept."""

    head: Stage
    blocks: tuple[Stage, ...]
    tail: Stage
    fixed_bytes: int = 0
    """Resident all the time: parameters, buffers, optimizer state, the batch."""
    floor_bytes: int = 0
    """Peak of what no schedule changes: the update."""

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Head, blocks, tail."""
        return (self.head, *self.blocks, self.tail)

    @cached_property
    def later_gradient_bytes(self) -> tuple[int, ...]:
        """Parameter gradients of the stages from i on."""
        sums = [0]
        for stage in reversed(self.stages):
            sums.append(sums[-1] + stage.parameter_gradient_bytes)
        return tuple(reversed(sums))


@dataclass(frozen=True)
class Schedule:
    """A schedule with its predicted bytes and work."""

    items: tuple[Item, ...]
    """One leaf for each block of the chain, some of them in regions."""
    peak_bytes: int
    """Of the whole step."""
    cost: float
    """Of forward, backward and all that is recomputed."""
    plain_cost: float
    """Of the step that keeps everything."""
    again: Work = field(repr=False, default_factory=Work)
    """The recomputed parts."""

    @property
    def extra_cost(self) -> float:
        """The cost of recomputation."""
        return self.cost - self.plain_cost


def plain(chain: Chain, cost: Cost = flops_only) -> Schedule:
    """Keep everything."""
    return evaluate(chain, ("keep",) * len(chain.blocks), cost)


def evaluate(chain: Chain, items: tuple[Item, ...], cost: Cost = flops_only) -> Schedule:
    """The peak and the cost of a schedule."""
    run = _Run(chain, cost)
    run.part(("keep", *items, "keep"), 0, 0, top=True)
    kept = [stage.options["keep"] for stage in chain.stages]
    plain_cost = sum(cost(o.forward) + cost(o.backward) for o in kept)
    return Schedule(
        items,
        max(chain.floor_bytes, chain.fixed_bytes + run.peak_bytes),
        run.spent,
        plain_cost,
        run.again,
    )


class _Run:
    """A schedule carried out on paper."""

    def __init__(self, chain: Chain, cost: Cost) -> None:
        self.stages, self.later = chain.stages, chain.later_gradient_bytes
        self.cost = cost
        self.peak_bytes, self.spent, self.again = 0, 0.0, Work()

    def part(self, items: tuple[Item, ...], first: int, outside: int, *, top: bool) -> None:
        """Forward, then backward through items that are a region inside of, or the whole chain."""
        stop = first + sum(map(leaves, items))
        waiting = self.later[stop] + (0 if top else self.stages[stop - 1].gradient_bytes)
        begun: list[tuple[Item, int, int]] = []
        at, held = first, outside
        if not top and stop - first > 1:
            held += self.stages[first].freed_bytes
        for item in items:
            begun.append((item, at, held))
            after = at + leaves(item)
            if top or after < stop:
                self._forward(item, at, held + waiting, again=not top)
            held += self._kept(item, at)
            at = after
        for item, at, held in reversed(begun):
            if isinstance(item, str):
                self._backward(item, at, held, last=not top and at + 1 == stop)
            else:
                self.part(item, at, held, top=False)

    def _kept(self, item: Item, at: int) -> int:
        if isinstance(item, str):
            return self.stages[at].options[item].kept_bytes
        return self.stages[at + leaves(item) - 1].held_bytes

    def _forward(self, item: Item, at: int, there: int, *, again: bool) -> None:
        if isinstance(item, str):
            option = self.stages[at].options[item]
            self._do(option.forward, there + option.forward_bytes, again)
            return
        for k in range(at, at + leaves(item)):
            inside = self.stages[k - 1].held_bytes if k > at else 0
            work = self.stages[k].options["keep"].forward
            self._do(work, there + inside + self.stages[k].pass_bytes, again)

    def _backward(self, item: str, at: int, held: int, *, last: bool) -> None:
        option, there = self.stages[at].options[item], held + self.later[at + 1]
        if last:  # it did not run with the others of its region, but does so now
            self._do(option.again, there + option.again_bytes, True)
        self._do(option.backward, there + (0 if last else option.backward_bytes), False)
        self.again += option.backward - self.stages[at].options["keep"].backward

    def _do(self, work: Work, nbytes: int, again: bool) -> None:
        self.spent += self.cost(work)
        self.peak_bytes = max(self.peak_bytes, nbytes)
        if again:
            self.again += work


def between(one: Chain, other: Chain, at: float) -> Chain:
    """The chain of a batch between two others, or beyond: bytes and work are affine in its size.

    `at` is 0 for the first and 1 for the second. Options that only one of them has are left out.
    """
    mixed: Chain = _mix(one, other, at)
    return mixed


def _mix(one: Any, other: Any, at: float) -> Any:
    if isinstance(one, Mapping):
        return {key: _mix(one[key], other[key], at) for key in one if key in other}
    if isinstance(one, tuple):
        return tuple(_mix(a, b, at) for a, b in zip(one, other, strict=True))
    if is_dataclass(one) and not isinstance(one, type):
        names = [f.name for f in fields(one)]
        return replace(one, **{n: _mix(getattr(one, n), getattr(other, n), at) for n in names})
    if isinstance(one, (str, bool)):
        return one
    return math.ceil(one + (other - one) * at)
