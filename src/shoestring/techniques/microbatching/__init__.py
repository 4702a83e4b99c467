"""Microbatching: parts of the minibatch one after the other, gradients added (Section 3.3)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import InputError, NoEffectWarning
from ...trace.batches import tensors_of
from ...trace.fakes import readable
from ...trace.graph import Trace
from ..base import Setup
from .accumulate import Compensated, Together, small_parameters
from .simulate import GroupedNormalization
from .split import cut, examples_of

Units = Callable[[Any], float | torch.Tensor]


@dataclass(frozen=True)
class Microbatching:
    """Run `size` examples at once; a last microbatch may be smaller and weighs less.

    With the unit "tokens" `size` counts positions: as many sentences as fit, padded as they are in
    the minibatch, and at least one.
    `weight` says what the loss is averaged over: "examples", or a function from a part to its
    number of units (tokens, for instance). `accumulate="compensated"` adds gradients with Kahan's
    correction. `simulated` runs the whole minibatch at once, normalized in groups of `size`.
    """

    size: int
    weight: str | Units = "examples"
    accumulate: str = "parameter"
    simulated: bool = False
    unit: str = "examples"

    def __post_init__(self) -> None:
        if self.unit not in ("examples", "tokens"):
            raise InputError(
                f"unknown microbatch unit {self.unit!r}", hint="'examples' or 'tokens'"
            )
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise InputError(
                f"microbatch {self.size!r} is not a whole number from 1",
                hint="10 runs ten examples at once",
            )
        if self.weight != "examples" and not callable(self.weight):
            raise InputError(
                f"unknown microbatch weight {self.weight!r}",
                hint="'examples', or a function from a part of the batch to its number of units",
            )
        if self.accumulate not in ("parameter", "compensated"):
            raise InputError(
                f"unknown accumulation {self.accumulate!r}", hint="'parameter' or 'compensated'"
            )
        if self.simulated and self.unit == "tokens":
            raise InputError("microbatches of tokens are not simulated", hint="unit='examples'")
        if self.simulated and self.accumulate == "compensated":
            raise InputError(
                "simulated microbatches accumulate nothing to compensate",
                hint="leave out simulated=True or accumulate='compensated'",
            )

    def examples_at_once(self, batch: Any) -> int:
        """Of this batch: `size` itself, or as many as have so many tokens."""
        if self.unit == "examples":
            return self.size
        lengths = [tensor.shape[1] for tensor in tensors_of(batch) if tensor.dim() > 1]
        return max(self.size // max(lengths, default=1), 1)

    def check_size(self, batch_size: int) -> None:
        """For a prediction the minibatch must be a whole number of microbatches."""
        if batch_size % self.size:
            lower = max(d for d in range(1, self.size + 1) if batch_size % d == 0)
            raise InputError(
                f"a batch of {batch_size} does not divide into microbatches of {self.size}",
                hint=f"the next smaller size that does is {lower}",
            )

    def prepare(self, batch: Any) -> Any:
        """The first microbatch, or all of it where they are only simulated."""
        examples = examples_of(batch)
        if examples is None:
            return batch
        if self.unit == "examples" and self.size < examples:  # else all of it runs at once
            self.check_size(examples)
        return batch if self.simulated else cut(batch, 0, self.examples_at_once(batch))

    def predict(self, trace: Trace) -> Trace:
        """The trace is of one microbatch already; compensation is one more tensor per gradient."""
        if self.accumulate == "parameter":
            return trace
        parameters = tuple(
            replace(p, state_elements=(*p.state_elements, p.numel)) if p.has_gradient else p
            for p in trace.parameters
        )
        return replace(trace, parameters=parameters)

    def check(self, setup: Setup) -> None:
        """Whether a batch can be cut shows when there is one."""

    def apply(self, setup: Setup) -> None:
        """Split every batch, or normalize it in groups."""
        if self.simulated:
            groups = GroupedNormalization(setup, self.size)
            if not groups.paths:
                warnings.warn(
                    "simulated microbatches: the model has no BatchNorm, so nothing changes",
                    NoEffectWarning,
                    stacklevel=2,
                )
            return
        setup.split = _Split(self, setup.split)
        if self.accumulate == "compensated":
            Compensated(setup)
        elif small := small_parameters(setup.model):
            Together(setup, small)


class _Split:
    """batch → microbatches with weights that add up to one."""

    def __init__(self, technique: Microbatching, before: Callable[[Any], Any]) -> None:
        self._technique, self._weight, self._before = technique, technique.weight, before
        self._told = False

    def __call__(self, batch: Any) -> Any:
        for whole, share in self._before(batch):
            examples = examples_of(whole)
            size = self._technique.examples_at_once(whole)
            if examples is None:
                self._say_whole(whole)
            if examples is None or examples <= size:
                yield whole, share
                continue
            starts = range(0, examples, size)
            parts = [cut(whole, start, min(start + size, examples)) for start in starts]
            for part, weight in zip(parts, self._weights(parts, examples, size), strict=True):
                if not _is_zero(weight):  # no unit: its mean is 0/0
                    yield part, weight if share is None else weight * share

    def _say_whole(self, batch: Any) -> None:
        if not self._told:
            warnings.warn(
                f"microbatches: a batch of type {type(batch).__name__} has no tensor with a first "
                "dimension, so it runs as a whole; give a tensor, or a tuple, dict or dataclass",
                NoEffectWarning,
                stacklevel=2,
            )
        self._told = True

    def _weights(self, parts: list[Any], examples: int, size: int) -> list[float | torch.Tensor]:
        if not callable(self._weight):
            last = examples - (len(parts) - 1) * size
            return [held / examples for held in [size] * (len(parts) - 1) + [last]]
        units = [_wide(self._weight(part)) for part in parts]
        total = sum(units)
        if not isinstance(total, torch.Tensor) and not total > 0:
            raise InputError(
                f"the weights of the microbatches add up to {total}",
                hint="weight(part) must give the number of units the part's loss is averaged over",
            )
        return [unit / total for unit in units]


def _is_zero(weight: float | torch.Tensor) -> bool:
    """Where that is known without waiting for a GPU."""
    if isinstance(weight, torch.Tensor) and not readable(weight):
        return False
    return bool(weight == 0)


def _wide(units: float | torch.Tensor) -> float | torch.Tensor:
    """Counts of any type as 64-bit numbers, so that weights do not round before the loss does."""
    return units.detach().double() if isinstance(units, torch.Tensor) else float(units)
