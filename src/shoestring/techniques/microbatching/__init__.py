"""Microbatching: parts of the minibatch one after the other, gradients added (Section 3.3)."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import InputError, NoEffectWarning, UnprovenWarning
from ...trace.batches import tensors_of
from ...trace.fakes import is_fake, readable
from ...trace.graph import Trace
from ..base import Setup
from .accumulate import Compensated, Together, small_parameters
from .simulate import GroupedNormalization
from .split import cut, examples_of
from .split_test import find_units
from .units import AUTO, EXAMPLES, Units, check_units, weights


@dataclass(frozen=True)
class Microbatching:
    """Run `size` examples at once; a last microbatch may be smaller and weighs less.

    With the unit "tokens" `size` counts positions: as many sentences as fit, padded as they are in
    the minibatch, and at least one.
    `units` says what the loss is averaged over (`microbatching.units`): "auto" finds it on the
    first batch, and refuses a loss that is not the sum of its parts; "examples"; "sum" for a summed
    loss; a tensor of the batch, "labels[:, 1:] != -100"; or a function from a part to its number of
    units. `accumulate="compensated"` adds gradients with Kahan's correction. `simulated` runs the
    whole minibatch at once, normalized in groups of `size`. `weight` is an older name of `units`.
    """

    size: int
    weight: str | Units | None = None
    accumulate: str = "parameter"
    simulated: bool = False
    unit: str = "examples"
    units: str | Units = AUTO

    def __post_init__(self) -> None:
        if self.weight is not None:
            object.__setattr__(self, "units", self.weight)
            object.__setattr__(self, "weight", None)
        if self.unit not in ("examples", "tokens"):
            raise InputError(
                f"unknown microbatch unit {self.unit!r}", hint="'examples' or 'tokens'"
            )
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise InputError(
                f"microbatch {self.size!r} is not a whole number from 1",
                hint="10 runs ten examples at once",
            )
        check_units(self.units)
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
        if self.unit == "examples":
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
        setup.split = _Split(self, setup)
        if self.accumulate == "compensated":
            Compensated(setup)
        elif small := small_parameters(setup.model):
            Together(setup, small)


class _Split:
    """batch → microbatches with their weights."""

    def __init__(self, technique: Microbatching, setup: Setup) -> None:
        self._technique, self._units, self._before = technique, technique.units, setup.split
        self._setup = weakref.ref(setup)  # gradient hooks hold this, and are held by the model
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
            if self._units == AUTO and not any(map(is_fake, tensors_of(whole))):
                setup = self._setup()
                assert setup is not None
                self._units = tested_units(setup, whole)
            starts = range(0, examples, size)
            parts = [cut(whole, start, min(start + size, examples)) for start in starts]
            for part, weight in zip(parts, weights(self._units, parts), strict=True):
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


def tested_units(setup: Setup, batch: Any) -> str | Units:
    """Test the loss before anything is made of it; InputError where it does not split."""
    if setup.loss is None:  # a setup that nobody trains by
        return EXAMPLES
    found = find_units(setup.model, batch, setup.loss, light=True)
    if found.splits is False:
        raise InputError(
            f"parts of the batch would give other gradients: {found.why}",
            hint="train on whole batches, or say by units= what the loss is averaged over",
        )
    if found.splits is None:
        warnings.warn(f"weighed by examples, untested: {found.why}", UnprovenWarning, stacklevel=3)
        return EXAMPLES
    return found.units


def _is_zero(weight: float | torch.Tensor) -> bool:
    """Where that is known without waiting for a GPU."""
    if isinstance(weight, torch.Tensor) and not readable(weight):
        return False
    return bool(weight == 0)
