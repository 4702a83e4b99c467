"""What plans for a model take, by the `device` accounting: estimated from its chain of blocks.

The chain is that of the plain step, scaled to precisions and microbatches. `predict` does not
estimate: it runs the planned step itself on fake tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from ..errors import InputError, TraceError
from ..memory.device import device_timeline
from ..memory.items import Item
from ..step.trace_step import capture_step
from ..techniques import Checkpointing
from ..techniques.plan import Plan
from ..techniques.precision.update import ELEMENTWISE, kernels_know
from ..trace.blocks import writers
from ..trace.capture import Loss
from ..trace.fakes import OptimizerLike, make_optimizer
from ..trace.graph import Phase, Role, Trace
from .block_chain import measure_chain
from .chain import front, solve
from .cost import Costs
from .residents import Update, between, halved, largest, traced_update
from .result import Predicted, short
from .search import Candidate
from .settings import DENSITIES, Scales, Setting, adapted
from .staged import resident_bytes, work_of
from .stages import Chain, Schedule, Work

_NAMED = ("no-bn", "every-2", "every-4", "every-8", "every-16", "every-32")
"""Ways to checkpoint a model without repeated blocks; the first runs no module again."""
_AROUND = (0.85, 1.15)
DEEPEST = 32
"""Regions within regions: running each again takes a dozen of Python's 1,000 frames, or more."""


@dataclass(frozen=True)
class _Way:
    """One way to checkpoint, on the whole minibatch in FP32; bytes above what is resident."""

    checkpointing: Checkpointing | None
    activation_bytes: int
    gradient_bytes: int
    """At the peak."""
    work: Work


_TRACED_BYTES = 2**23
"""Gradients up to which an update in blocks is traced: there the rule for them is too coarse."""


class DeviceEstimates:
    """Candidates for one model, batch, loss and optimizer, on one kind of device."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        *,
        loss: Loss,
        optimizer: OptimizerLike,
        device: str,
        costs: Costs,
        examples: int | None,
    ) -> None:
        self._step: dict[str, Any] = {"batch": batch, "loss": loss, "device": device}
        self._model, self._optimizer, self._examples = model, optimizer, examples
        self._device, self._costs = device, costs
        made = make_optimizer(optimizer, model, {id(p): p for p in model.parameters()})
        self._in_blocks = type(made) in ELEMENTWISE
        known = made is not None and kernels_know(made)
        self._copied = device != "cuda" or not known
        """An update in 16 bits makes copies in FP32."""
        self._updates: dict[tuple[str | None, float | None], Update] = {}
        self._trace: Trace | None = None
        try:
            self._chain: Chain | None = measure_chain(
                Plan(), model, optimizer=None, seen=self._note, **self._step
            )
        except InputError:
            if self._trace is None:
                raise
            self._chain = None  # no repeated blocks
        assert self._trace is not None
        self.writers: frozenset[str] = writers(self._trace)
        """Modules whose state changes in the forward pass."""
        self._kept_passes: Work = _passes(self._trace)
        """Of blocks that are wrapped and keep everything."""
        self._wrapped_differs: bool = any(
            op.name.startswith("shoestring.") for op in self._trace.ops
        )
        """They have kernels of our own, which the step without a plan has not."""
        if self._wrapped_differs:
            self._trace = capture_step(Plan(), model, optimizer=None, **self._step)
        self._trained: dict[str, int] = {
            p.name: p.numel * p.dtype.itemsize for p in self._trace.parameters if p.has_gradient
        }
        self._passes: Work = _passes(self._trace)
        self._fixed_bytes: int = resident_bytes(device_timeline(self._trace))

    def _note(self, trace: Trace) -> None:
        self._trace = trace

    @property
    def sparsifiable(self) -> bool:
        """Whether density would change anything."""
        assert self._trace is not None
        return any(p.sparsifiable for p in self._trace.parameters)

    @cached_property
    def plain(self) -> Predicted:
        """The step without a plan."""
        assert self._trace is not None
        seconds = self._seconds(Setting(), self._passes)
        return self._predicted(Setting(), self._trace, seconds, int(self._passes.flops))

    # -- a setting -----------------------------------------------------------------------------

    def _update(self, setting: Setting) -> Update:
        key = setting.precision, setting.density
        if key not in self._updates:
            self._updates[key] = self._made_update(setting)
        return self._updates[key]

    def _made_update(self, setting: Setting) -> Update:
        density = setting.density
        narrow = setting.precision is not None
        small = self._copied and sum(self._trained.values()) <= _TRACED_BYTES
        if narrow and self._in_blocks and not small:
            return self._halved(setting)
        ends = DENSITIES[0], DENSITIES[-1]
        if density is not None and density not in ends:  # bytes grow with it by a line
            high, low = (self._update(replace(setting, density=end)) for end in ends)
            return between(low, high, (density - ends[1]) / (ends[0] - ends[1]))
        names, shown = largest(self._trained if density is None else {})
        try:
            trace = self._capture(replace(setting, microbatch=None).plan(), update=names)
        except (InputError, TraceError):
            if not narrow:
                raise
            return self._halved(setting)  # does not train in 16 bits, which `predict` finds too
        return traced_update(trace, shown, together=self._device == "cuda" and not narrow)

    def _halved(self, setting: Setting) -> Update:
        wide = self._update(replace(setting, precision=None))
        return halved(wide, self._model, copied=self._copied)

    def _capture(self, plan: Plan, *, update: Collection[str] | None = None) -> Trace:
        """The passes of a planned step, or the update of some parameters (of none: of all)."""
        names = update or self._trained
        return capture_step(
            plan,
            self._model,
            optimizer=None if update is None else self._optimizer,
            passes=update is None,
            trained={*names, *(f"{name}_values" for name in names)},  # of sparse ones
            **self._step,
        )

    def _scales(self, setting: Setting) -> Scales:
        whole, now = self._update(Setting()), self._update(setting)
        size = setting.microbatch
        share = 1.0 if size is None or self._examples is None else size / self._examples
        width = 1.0 if setting.precision is None else 0.5
        return Scales(
            activations=share * width,
            gradients=now.gradient_bytes / max(whole.gradient_bytes, 1),
            flops=1 / setting.parts,
            bytes_moved=width / setting.parts,
            split=setting.parts > 1,
        )

    def _resident(self, setting: Setting) -> int:
        whole, now = self._update(Setting()), self._update(setting)
        return self._fixed_bytes - whole.model_bytes + now.model_bytes + now.state_bytes

    def _floor(self, setting: Setting) -> int:
        """Peak of the update; libraries keep their workspaces through it."""
        now = self._update(setting)
        return self._resident(setting) + now.gradient_bytes + now.passing_bytes

    def _seconds(self, setting: Setting, work: Work) -> float:
        """Of a whole step whose passes over the minibatch take so much work."""
        now = self._update(setting)
        width = 1.0 if setting.precision is None else 0.5
        again = (setting.parts - 1) * (2 * now.model_bytes + 3 * now.gradient_bytes)
        passes = work.times(1, width, setting.parts) + Work(0, again, 0)
        precision = setting.precision or "fp32"
        return self._costs.step_seconds(passes, precision) + self._costs.step_seconds(now.work)

    # -- estimates -----------------------------------------------------------------------------

    def least_seconds(self, setting: Setting) -> float:
        """Nothing runs again."""
        return min(self._seconds(setting, w) for w in (self._passes, self._kept_passes))

    def least_bytes(self, setting: Setting) -> int:
        """What no schedule changes, and the largest block alone."""
        if self._chain is None:
            return self._floor(setting)
        chain = self._adapted(setting)
        alone = (
            min(min(o.backward_bytes, o.again_bytes) for o in stage.options.values())
            for stage in chain.stages
        )
        return max(chain.floor_bytes, chain.fixed_bytes + max(alone))

    def best(self, setting: Setting, room_bytes: int) -> Candidate | None:
        """By the dynamic program over the chain, or of the named ways."""
        if self._chain is None:
            found = [c for c in self.front(setting) if c.peak_bytes <= room_bytes]
            return min(found, key=lambda c: c.seconds, default=None)
        chain = self._adapted(setting)
        schedule = solve(chain, room_bytes, self._cost(setting))
        if schedule is not None and not _runs(schedule):
            found = [c for c in self.front(setting) if c.peak_bytes <= room_bytes]
            return min(found, key=lambda c: c.seconds, default=None)
        return None if schedule is None else self._candidate(setting, schedule)

    def around(self, candidate: Candidate) -> list[Candidate]:
        """The fastest for somewhat less and somewhat more memory, by the same setting."""
        if self._chain is None:
            return self.front(candidate.setting)
        rooms = (int(candidate.peak_bytes * share) for share in _AROUND)
        found = (self.best(candidate.setting, room) for room in rooms)
        return [one for one in found if one is not None]

    def front(self, setting: Setting) -> list[Candidate]:
        """Every schedule worth having, but those too deep to run."""
        if self._chain is None:
            return sorted((self._by_way(setting, w) for w in self._ways), key=_by_bytes)
        chain = self._adapted(setting)
        found = front(chain, self._cost(setting))
        return [self._candidate(setting, s) for s in found if _runs(s)]

    def _cost(self, setting: Setting) -> Any:
        precision = setting.precision or "fp32"
        return lambda work: self._costs.seconds(work, precision)

    def _adapted(self, setting: Setting) -> Chain:
        assert self._chain is not None
        return adapted(
            self._chain, self._scales(setting), self._resident(setting), self._floor(setting)
        )

    def _candidate(self, setting: Setting, schedule: Schedule) -> Candidate:
        assert self._chain is not None
        by, again = self._scales(setting), schedule.again
        paths = tuple(stage.name for stage in self._chain.blocks)
        differs = self._wrapped_differs and setting.precision is None  # 16 bits have them anyway
        plain = all(item == "keep" for item in schedule.items) and not differs
        whole = self._kept_passes + again.times(1 / by.flops, 1 / by.flops)
        return Candidate(
            setting,
            None if plain else Checkpointing.of(schedule.items, paths),
            schedule.peak_bytes,
            self._seconds(setting, whole),
            int(whole.flops),
        )

    # -- models without blocks -----------------------------------------------------------------

    @cached_property
    def _ways(self) -> list[_Way]:
        assert self._trace is not None
        ways = [self._way(None, self._trace)]
        for name in _NAMED:
            chosen = Checkpointing(name)
            try:
                way = self._way(chosen, self._capture(Plan(checkpointing=chosen)))
            except (InputError, TraceError):
                continue
            if all(way.activation_bytes < other.activation_bytes for other in ways):
                ways.append(way)
        return ways

    def _way(self, checkpointing: Checkpointing | None, trace: Trace) -> _Way:
        timeline = device_timeline(trace)
        peak = timeline.roles_at(timeline.peak_instant)
        gradients = peak[Role.GRADIENT]
        above = sum(peak.values()) - gradients - resident_bytes(timeline)
        return _Way(checkpointing, above, gradients, _passes(trace))

    def _by_way(self, setting: Setting, way: _Way) -> Candidate:
        by, now = self._scales(setting), self._update(setting)
        gradients = now.gradient_bytes if by.split else int(way.gradient_bytes * by.gradients)
        peak = self._resident(setting) + gradients + int(way.activation_bytes * by.activations)
        return Candidate(
            setting,
            way.checkpointing,
            max(peak, self._floor(setting)),
            self._seconds(setting, way.work),
            int(way.work.flops),
        )

    # -- predictions ---------------------------------------------------------------------------

    def predict(self, candidate: Candidate) -> Predicted | None:
        """The peak of the planned step, run on fake tensors; the time is that of the estimate."""
        try:
            trace = self._capture(candidate.plan)
        except (InputError, TraceError) as error:
            warnings.warn(
                f"left out, {short(candidate.plan)}: {error}", RuntimeWarning, stacklevel=2
            )
            return None
        return self._predicted(candidate.setting, trace, candidate.seconds, candidate.flops)

    def _predicted(self, setting: Setting, trace: Trace, seconds: float, flops: int) -> Predicted:
        passes = int(device_timeline(trace).totals.max(initial=0))
        peak = max(passes + self._update(setting).state_bytes, self._floor(setting))
        return Predicted(peak, seconds, flops, "device", self._device, self._costs.source)


def _runs(schedule: Schedule) -> bool:
    def depth(item: Item) -> int:
        return 0 if isinstance(item, str) else 1 + max(map(depth, item))

    return max(map(depth, schedule.items)) <= DEEPEST


def _by_bytes(candidate: Candidate) -> int:
    return candidate.peak_bytes


def _passes(trace: Trace) -> Work:
    total = Work()
    for op in trace.ops:
        if op.phase is not Phase.OPTIMIZER and not op.is_view:
            total += work_of(op)
    return total
