"""The contract of a technique: one transformation in two worlds, prediction and training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ..trace.graph import Trace

Run = Callable[[Any], torch.Tensor]


class HasState(Protocol):
    """Something that outlives a step and belongs into a snapshot."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        ...


@dataclass
class Setup:
    """A training step under construction: each technique changes the part that is its own.

    The step runs `run` on each part of `split(batch)`, multiplies the loss by the part's weight,
    calls `backward` on it, and `update` once at the end; then every `after_update`.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    run: Run
    """batch → loss."""
    split: Callable[[Any], Iterable[tuple[Any, float | torch.Tensor]]]
    """batch → parts with their weights, which add up to one."""
    backward: Callable[[torch.Tensor], None]
    """Weighted loss of a part → gradients in `.grad`, added up."""
    update: Callable[[], None]
    """Gradients → parameters."""
    after_update: list[Callable[[], object]] = field(default_factory=list)
    """Called after every update; True says that parameters or buffers were replaced."""
    state: dict[str, HasState] = field(default_factory=dict)
    first_run_differs: bool = False
    """The first forward pass is looked at; what was found there changes those after it."""
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None
    """The user's own, (model, batch) → loss; `run` is what the step makes of it."""
    undo: list[Callable[[], None]] = field(default_factory=list)
    """Called in reverse order when a later technique fails: the model must be as it was."""


class Technique(Protocol):
    """One way to need less memory; each is a frozen dataclass."""

    def prepare(self, batch: Any) -> Any:
        """The part of the batch that runs at once, for a prediction."""
        ...

    def predict(self, trace: Trace) -> Trace:
        """What the technique does to sizes, types and schedule. Pure."""
        ...

    def check(self, setup: Setup) -> None:
        """Raise InputError, before anything is changed, if it cannot be applied."""
        ...

    def apply(self, setup: Setup) -> None:
        """Change the setup for real."""
        ...


class WholeBatch:
    """A technique that leaves the batch alone."""

    def prepare(self, batch: Any) -> Any:
        """The whole batch."""
        return batch
