"""The values that planner and techniques exchange.

The planner describes a training step (`Context`). Each technique answers with `Offer`s: settings
that could be used, and how each scales the passes of the plain step. One technique may be the
`Scheduler`, which fills the room that the others leave.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from ..memory.work import Cost, Work
from ..trace.blocks import writers
from ..trace.graph import Trace
from ..trace.tracing import Loss
from .base import Technique
from .claims import Circumstances, Level
from .plan import Plan
from .splitting import SplitFound


@dataclass(frozen=True)
class Scales:
    """How a setting changes the passes of the plain step."""

    share: float = 1.0
    """Of the minibatch, what runs at once."""
    width: float = 1.0
    """Bytes of a number in activations, relative to the plain step's."""
    parts: int = 1
    """How often the passes run; the gradients of the parts before are there when one begins."""
    number_type: str = "fp32"
    """In which the products are computed, where it is not the model's own."""
    inputs_here: int | None = None
    """Of the inputs that recomputed blocks start from, how many are on the device at once, the
    others on the host; None for all."""

    def __mul__(self, other: Scales) -> Scales:
        return Scales(
            self.share * other.share,
            self.width * other.width,
            self.parts * other.parts,
            other.number_type if self.number_type == "fp32" else self.number_type,
            self.inputs_here if other.inputs_here is None else other.inputs_here,
        )


@dataclass(frozen=True)
class Offer:
    """Settings of a technique that a planner may use."""

    technique: Technique
    why: str
    """Their effect, for the plan's table."""
    scales: Scales = Scales()
    lossiness: float = 0.0
    """Orders lossy ones: points of accuracy that somebody measured on some network."""
    shown: str | None = None
    """In the plan's table; by default the technique's own short text."""
    allow: str | None = None
    """The name by which it is allowed where it is lossy; by default the technique's."""
    dominates: bool = False
    """Costs neither bytes nor time: wherever it is allowed, no plan is made without it."""
    refuses: Callable[[Technique], bool] = lambda other: False
    """Techniques it is not offered beside, in these circumstances."""
    last: bool = False
    """Only where no plan as lossless fits without it: it takes more than the device and time."""
    of_parts: bool = False
    """Only where the passes run more than once: else it does as a milder one."""
    asked: bool = False
    """Only where `allow` names it: no prediction counts all it takes, or no GPU has run it yet."""
    recomputed: float = 0.0
    """Share of the forward pass that runs twice, where no trace says what that costs."""

    @property
    def name(self) -> str:
        """By which it is allowed."""
        return self.allow or self.technique.allow or self.technique.name

    def level(self, at: Circumstances) -> Level:
        """The weakest claim it makes."""
        return max((c.level for c in self.technique.claims(at)), default=Level.EQUAL)


TraceStep = Callable[..., Trace]
"""(plan, *, optimizer, watch) → trace of the planned step on fake tensors."""


class Context:
    """A training step that is planned for."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        optimizer: torch.optim.Optimizer,
        trace_step: TraceStep,
        *,
        device: str,
        examples: int | None,
        batch_norm: bool,
        split: SplitFound | None = None,
        ragged: bool = True,
        narrow: str = "fp16",
        reserved: bool = True,
        accounting: str = "device",
        writers: frozenset[str] | None = None,
        loss: Loss | None = None,
        near: bool = True,
    ) -> None:
        self.model, self.batch, self.optimizer = model, batch, optimizer
        self.trace_step = trace_step
        self.device, self.examples = device, examples
        self.ragged, self.narrow = ragged, narrow
        self.accounting, self.reserved = accounting, reserved
        """On CUDA a budget is of what the allocator takes from the card, not of what is in use."""
        self._batch_norm = batch_norm
        self.applied: tuple[Technique, ...] = ()
        """Techniques that this step is traced with: see `within`."""
        self.found: dict[str, Any] = {}
        """Facts that techniques learned about the plain step, shared with contexts `within`
        some technique: "region_inputs" are the bytes each block is recomputed from."""
        self.split = split or SplitFound("auto", None, "assumed: the loss was not tested")
        """How the loss of a batch splits into those of its parts, as tested on real values."""
        self._writers = writers
        self.loss = loss
        """As the user gave it; None where nothing may run."""
        self.near = near
        """Whether plans may round; if not, such offers are only named as a way out."""

    def within(self, techniques: Sequence[Technique]) -> Context:
        """The same step, where these techniques are always applied."""

        def trace_step(plan: Plan, **others: Any) -> Trace:
            return self.trace_step(plan.but(*techniques), **others)

        made = copy.copy(self)
        made.applied = (*self.applied, *techniques)
        made.__dict__.pop("trace", None)
        made.trace_step = trace_step
        return made

    @cached_property
    def trace(self) -> Trace:
        """Of the plain step, without its update."""
        return self.trace_step(Plan(), optimizer=None)

    @cached_property
    def writers(self) -> frozenset[str]:
        """Modules whose buffers or parameters change in the forward pass."""
        return writers(self.trace) if self._writers is None else self._writers

    @property
    def keeps_statistics(self) -> bool:
        """Whether modules look at all examples that run together, or keep count of them."""
        return self._batch_norm or bool(self.writers)

    @property
    def circumstances(self) -> Circumstances:
        """As far as they are known before anything runs."""
        return Circumstances("cpu", batch_norm=self.keeps_statistics)


@dataclass(frozen=True)
class Update:
    """Resident bytes beside the passes; none depend on the schedule."""

    model_bytes: int
    """Parameters and buffers."""
    gradient_bytes: int
    state_bytes: int
    passing_bytes: int
    """Temporary bytes of the update, on top of all of the above and `lasting_bytes`."""
    work: Work
    lasting_bytes: int = 0
    """There from update to update: through the passes, if those call for the updates."""
    early_bytes: int = 0
    """Where gradients go one by one: those that are there with all activations."""
    link_bytes: int = 0
    """Bytes that are copied from the host and back."""
    part_link_bytes: int = 0
    """Bytes that are copied from the host and back for each part of a batch before the last."""
    part_launches: float = 0
    """Kernels that each of those parts starts for it."""
    host_launches: float = 0
    """Time of Python beside launching kernels, in kernel launches; a graph has none
    of it."""

    def toward(self, other: Update, share: float) -> Update:
        """On the line to another; the work is this one's."""
        names = ("model_bytes", "gradient_bytes", "state_bytes", "passing_bytes",
                 "lasting_bytes")  # fmt: skip
        return replace(
            self,
            **{n: round(getattr(self, n) * (1 - share) + getattr(other, n) * share) for n in names},
        )


class Updates(Protocol):
    """Known updates, to estimate another one."""

    context: Context
    trained: dict[str, int]
    """Bytes of every parameter that gets a gradient."""

    def without(self, technique: Technique) -> Update:
        """The update of the same setting, this technique left out."""
        ...


@dataclass(frozen=True)
class Conditions:
    """Conditions that the other techniques of a plan set for a schedule."""

    scales: Scales
    gradients: float
    """Bytes of gradients, relative to the plain step's."""
    gradient_bytes: int
    resident_bytes: int
    """There all the time."""
    floor_bytes: int
    """Peak of the update, which no schedule changes."""
    cost: Cost
    waiting: bool = False
    """Gradients of earlier batches are there, and those of this one are added."""

    @property
    def adds(self) -> bool:
        """Whether the passes meet all gradients, as earlier parts or batches left them."""
        return self.waiting or self.scales.parts > 1

    @property
    def of_activations(self) -> Conditions:
        """The same, as if gradients took nothing and the update were no peak."""
        return replace(self, gradients=0.0, gradient_bytes=0, floor_bytes=0)


@dataclass(frozen=True)
class Scheduled:
    """Settings of the scheduler's technique, and what the passes take with them."""

    technique: Technique | None
    peak_bytes: int
    work: Work
    """Of the passes over the whole minibatch, numbers as wide as the plain step's."""


class Scheduler(Protocol):
    """Finds the settings of one technique that fit into the room the others leave."""

    kept: Work | None
    """Of the passes when it recomputes nothing; None where that is the plain step."""

    def best(self, at: Conditions, room_bytes: int) -> Scheduled | None:
        """The fastest that is estimated to fit."""
        ...

    def front(self, at: Conditions) -> list[Scheduled]:
        """From the least memory to the least time."""
        ...

    def around(self, at: Conditions, peak_bytes: int) -> list[Scheduled]:
        """Some for less and for more memory."""
        ...

    def least_bytes(self, at: Conditions) -> int:
        """No settings need less."""
        ...

    def peak_bytes(self, at: Conditions, technique: Technique | None) -> int:
        """Estimated for settings that it found, or another one: 0 if those are of other blocks.

        None is for nothing recomputed.
        """
        ...

    def ways(self) -> Iterable[Technique]:
        """Settings worth counting by the fundamental accounting."""
        ...


def without(techniques: Collection[Technique], technique: Technique) -> tuple[Technique, ...]:
    """The others."""
    return tuple(t for t in techniques if t is not technique)
