"""What plans for a model take, by the `fundamental` accounting: the report's, of an ideal executor.

Ways to checkpoint are the report's strategies and the schedules that the chain of blocks suggests,
each counted once on the whole minibatch. `predict` counts a microbatch as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from ..errors import InputError, UnknownOperationWarning
from ..memory.fundamental import parameter_bytes
from ..memory.model import MemoryProfile, memory_profile
from ..techniques import Checkpointing
from ..techniques.plan import Plan
from ..trace.blocks import writers
from ..trace.capture import Loss, capture
from ..trace.fakes import OptimizerLike
from ..trace.graph import Trace
from .cost import IDEAL
from .result import Predicted
from .search import Candidate
from .settings import Setting
from .stages import Work

_STRATEGIES = ("no-bn", *(f"residual-{m}{star}" for m in (1, 2, 3, 4, 6, 8) for star in ("", "*")))
_HALF = Setting(density=0.5)


@dataclass(frozen=True)
class _Way:
    """One way to checkpoint the whole minibatch: activations and flops by precision, density."""

    checkpointing: Checkpointing | None
    activation_bytes: dict[str | None, int]
    flops: dict[bool, int]
    """Dense; at half the density."""
    launches: int


class FundamentalEstimates:
    """Candidates for one model, batch, loss and optimizer."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        *,
        loss: Loss,
        optimizer: OptimizerLike,
        examples: int | None,
        schedules: Callable[[], Iterable[Checkpointing]],
    ) -> None:
        self._model, self._batch, self._loss = model, batch, loss
        self._optimizer, self._examples, self._schedules = optimizer, examples, schedules
        self._traces: dict[int | None, Trace] = {}
        self._residents: dict[tuple[str | None, float | None], int] = {}

    def _trace(self, size: int | None) -> Trace:
        if size not in self._traces:
            part = Setting(microbatch=size).plan().microbatching
            batch = self._batch if part is None else part.prepare(self._batch)
            self._traces[size] = capture(
                self._model, batch, loss=self._loss, optimizer=self._optimizer
            )
        return self._traces[size]

    @property
    def sparsifiable(self) -> bool:
        """Whether density would change anything."""
        return any(p.sparsifiable for p in self._trace(None).parameters)

    @property
    def writers(self) -> frozenset[str]:
        """Modules whose state changes in the forward pass."""
        return writers(self._trace(None))

    @cached_property
    def plain(self) -> Predicted:
        """The step without a plan."""
        made = self.predict(Candidate(Setting(), None, 0, 0.0, 0))
        assert made is not None
        return made

    def _count(self, plan: Plan, size: int | None = None) -> MemoryProfile:
        trace = self._trace(size)
        for technique in plan.techniques:
            trace = technique.predict(trace)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnknownOperationWarning)
            return memory_profile(trace)

    @cached_property
    def _ways(self) -> list[_Way]:
        """Those beside which none needs both less memory and less time."""
        chosen: list[Checkpointing | None] = [None]
        chosen += [*map(Checkpointing, _STRATEGIES), *self._schedules()]
        ways = []
        for checkpointing in chosen:
            try:
                ways.append(self._way(checkpointing))
            except InputError:  # a strategy by blocks, for a model that has none
                continue
        ways.sort(key=lambda w: (w.activation_bytes[None], w.flops[False]))
        kept: list[_Way] = []
        for way in ways:
            if not kept or way.flops[False] < kept[-1].flops[False]:
                kept.append(way)
        return kept

    def _way(self, checkpointing: Checkpointing | None) -> _Way:
        activations, flops, launches = {}, {}, 0
        for setting in (Setting(), Setting(precision="fp16"), _HALF):
            made = self._count(setting.plan(checkpointing))
            if setting is not _HALF:
                activations[setting.precision] = made.activation_bytes
            if setting.precision is None:
                flops[setting is _HALF] = _flops(made)
            launches = len(made.timeline.labels)
        return _Way(checkpointing, activations, flops, launches)

    # -- estimates -----------------------------------------------------------------------------

    def _resident(self, setting: Setting) -> int:
        key = setting.precision, setting.density
        if key not in self._residents:
            trace = self._trace(None)
            for technique in Setting(precision=key[0], density=key[1]).plan().techniques:
                trace = technique.predict(trace)
            held = parameter_bytes(trace)
            parts = held.model_bytes, held.gradient_bytes, held.optimizer_state_bytes
            self._residents[key] = sum(parts)
        return self._residents[key]

    def _candidate(self, setting: Setting, way: _Way) -> Candidate:
        share = 1.0
        if setting.microbatch is not None and self._examples is not None:
            share = setting.microbatch / self._examples
        activations = way.activation_bytes[setting.precision] * share
        dense, half = way.flops[False], way.flops[True]
        flops = dense - int((dense - half) * 2 * (1 - (setting.density or 1.0)))
        seconds = IDEAL.seconds(Work(flops, 0, way.launches * setting.parts))
        peak = self._resident(setting) + int(activations)
        return Candidate(setting, way.checkpointing, peak, seconds, flops)

    def front(self, setting: Setting) -> list[Candidate]:
        """From the least memory to the least time."""
        return [self._candidate(setting, way) for way in self._ways]

    def around(self, candidate: Candidate) -> list[Candidate]:
        """All ways by the same setting."""
        return self.front(candidate.setting)

    def least_seconds(self, setting: Setting) -> float:
        """Nothing runs again."""
        return min(c.seconds for c in self.front(setting))

    def least_bytes(self, setting: Setting) -> int:
        """Of the ways there are."""
        return self.front(setting)[0].peak_bytes

    def best(self, setting: Setting, room_bytes: int) -> Candidate | None:
        """The fastest that fits."""
        found = [c for c in self.front(setting) if c.peak_bytes <= room_bytes]
        return min(found, key=lambda c: c.seconds, default=None)

    def predict(self, candidate: Candidate) -> Predicted | None:
        """Counted on a microbatch of the size it has."""
        setting = candidate.setting
        made = self._count(replace(candidate.plan, microbatching=None), setting.microbatch)
        flops = _flops(made) * setting.parts
        work = Work(flops, 0, len(made.timeline.labels) * setting.parts)
        return Predicted(
            made.peak_bytes, IDEAL.seconds(work), flops, "fundamental", "any", IDEAL.source
        )


def _flops(made: MemoryProfile) -> int:
    return made.forward_flops + made.backward_flops + made.recompute_flops
