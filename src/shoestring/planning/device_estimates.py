"""What plans for a model take, by the `device` accounting.

Estimates scale the plain step: offers say by how much, and the scheduler fills the room. `predict`
does not estimate: it runs the planned step itself on fake tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from functools import cached_property

from ..errors import InputError, TraceError
from ..memory.cpu_scratch import scratch_above
from ..memory.device import device_timeline
from ..memory.prediction import Prediction
from ..memory.timeline import resident_bytes
from ..memory.work import Work, work_of_passes
from ..techniques import registered
from ..techniques.base import Technique
from ..techniques.offers import Conditions, Context, Scheduled, Scheduler, Update
from ..techniques.plan import Plan
from ..trace.graph import Trace
from .cost import Costs
from .residents import largest, traced_update
from .search import Candidate
from .settings import Setting


class DeviceEstimates:
    """Candidates for one training step on one kind of device."""

    def __init__(self, context: Context, costs: Costs) -> None:
        self.context, self._costs = context, costs
        self._updates: dict[tuple[Technique, ...], Update] = {}
        self._known_passes: dict[tuple[Technique, ...], _Passes] = {(): _Passes(context)}
        self.trained: dict[str, int] = {
            p.name: p.numel * p.dtype.itemsize for p in context.trace.parameters if p.has_gradient
        }

    @cached_property
    def plain(self) -> Prediction:
        """The step without a plan."""
        work = self._passes(Setting()).work
        seconds = self._seconds(Setting(), work)
        return self._predicted(Setting(), self.context.trace, seconds, int(work.flops))

    # -- a setting -----------------------------------------------------------------------------

    def _passes(self, setting: Setting) -> _Passes:
        """Forward and backward, with what changes them by more than a factor."""
        techniques = tuple(t for t in setting.techniques if t.changes_passes)
        if techniques not in self._known_passes:
            self._known_passes[techniques] = _Passes(self.context.within(techniques))
        return self._known_passes[techniques]

    def update(self, setting: Setting) -> Update:
        """What is resident with a setting, and what the update takes."""
        return self._update(tuple(t for t in setting.techniques if t.changes_update))

    def _update(self, techniques: tuple[Technique, ...]) -> Update:
        if techniques not in self._updates:
            self._updates[techniques] = self._made_update(techniques)
        return self._updates[techniques]

    def _made_update(self, techniques: tuple[Technique, ...]) -> Update:
        for technique in reversed(techniques):
            made = technique.estimate_update(_Known(self, techniques))
            if made is not None:
                return made
            if ends := technique.between():
                first, second = (
                    self._update(tuple(end if t is technique else t for t in techniques))
                    for end in ends[:2]
                )
                return first.toward(second, ends[2])
        some = all(t.some_tell_all for t in techniques)
        names, shown = largest(self.trained if some else {})
        try:
            trace = self._capture(Plan(techniques), update=names)
        except (InputError, TraceError):
            if not techniques:
                raise
            return self._update(techniques[:-1])  # it does not train, which `predict` finds too
        together = self.context.device == "cuda" and not any(t.updates_apart for t in techniques)
        return traced_update(trace, shown, together=together)

    def _capture(self, plan: Plan, *, update: Collection[str] | None = None) -> Trace:
        """The passes of a planned step, or the update of some parameters (of none: of all)."""
        names = update or self.trained
        inside = any(t.updates_in_backward for t in plan.techniques)
        return self.context.trace_step(
            plan,
            optimizer=None if update is None and not inside else self.context.optimizer,
            passes=update is None,
            trained={*names, *(f"{name}_values" for name in names)},  # of sparse ones
        )

    def _conditions(self, setting: Setting) -> Conditions:
        whole, now = self._update(()), self.update(setting)
        number_type, fixed = setting.scales.number_type, self._passes(setting).fixed_bytes
        resident = fixed - whole.model_bytes + now.model_bytes + now.state_bytes
        return Conditions(
            scales=setting.scales,
            gradients=now.gradient_bytes / max(whole.gradient_bytes, 1),
            gradient_bytes=now.gradient_bytes,
            resident_bytes=resident,
            # Libraries keep their workspaces through the update.
            floor_bytes=resident + now.gradient_bytes + now.passing_bytes,
            cost=lambda work: self._costs.seconds(work, number_type),
        )

    def _seconds(self, setting: Setting, work: Work) -> float:
        """Of a whole step whose passes over the minibatch take so much work."""
        now, by = self.update(setting), setting.scales
        again = (by.parts - 1) * (2 * now.model_bytes + 3 * now.gradient_bytes)
        passes = work.times(1, by.width, by.parts) + Work(0, again, 0)
        step = self._costs.step_seconds(passes, by.number_type)
        return step + self._costs.step_seconds(now.work)

    # -- estimates -----------------------------------------------------------------------------

    def least_seconds(self, setting: Setting) -> float:
        """Nothing is recomputed."""
        passes = self._passes(setting)
        kept = None if passes.scheduler is None else passes.scheduler.kept
        works = [passes.work, *([] if kept is None else [kept])]
        return min(self._seconds(setting, work) for work in works)

    def least_bytes(self, setting: Setting) -> int:
        """What no schedule changes, and the largest block alone."""
        at, scheduler = self._conditions(setting), self._passes(setting).scheduler
        return at.floor_bytes if scheduler is None else scheduler.least_bytes(at)

    def best(self, setting: Setting, room_bytes: int) -> Candidate | None:
        """The fastest that is estimated to fit."""
        at, passes = self._conditions(setting), self._passes(setting)
        if passes.scheduler is None:
            found = next((s for s in passes.unscheduled(at) if s.peak_bytes <= room_bytes), None)
        else:
            found = passes.scheduler.best(at, room_bytes)
        return None if found is None else self._candidate(setting, found)

    def around(self, candidate: Candidate) -> list[Candidate]:
        """The fastest for somewhat less and somewhat more memory, by the same setting."""
        scheduler = self._passes(candidate.setting).scheduler
        if scheduler is None:
            return [candidate]
        at = self._conditions(candidate.setting)
        found = scheduler.around(at, candidate.peak_bytes)
        return [self._candidate(candidate.setting, one) for one in found]

    def front(self, setting: Setting) -> list[Candidate]:
        """Every schedule worth having."""
        at, passes = self._conditions(setting), self._passes(setting)
        scheduler = passes.scheduler
        found = passes.unscheduled(at) if scheduler is None else scheduler.front(at)
        return [self._candidate(setting, one) for one in found]

    def _candidate(self, setting: Setting, found: Scheduled) -> Candidate:
        seconds, flops = self._seconds(setting, found.work), int(found.work.flops)
        return Candidate(setting, found.technique, found.peak_bytes, seconds, flops)

    # -- predictions ---------------------------------------------------------------------------

    def predict(self, candidate: Candidate) -> Prediction | None:
        """The peak of the planned step, run on fake tensors; the time is that of the estimate."""
        try:
            trace = self._capture(candidate.plan)
        except (InputError, TraceError) as error:
            warnings.warn(
                f"left out, {candidate.plan.short()}: {error}", RuntimeWarning, stacklevel=2
            )
            return None
        return self._predicted(candidate.setting, trace, candidate.seconds, candidate.flops)

    def _predicted(self, setting: Setting, trace: Trace, seconds: float, flops: int) -> Prediction:
        totals = device_timeline(trace).totals
        passes, state = int(totals.max(initial=0)), self.update(setting).state_bytes
        if any(t.updates_in_backward for t in setting.techniques):
            state = 0  # it is in the trace
        peak = max(passes + state, self._conditions(setting).floor_bytes)
        device = self.context.device
        scratch = scratch_above(trace, totals) if device == "cpu" else 0
        above = max(passes + state + scratch - peak, 0)
        return Prediction(peak, "device", device, seconds, flops, self._costs.source, above)


class _Passes:
    """Forward and backward of one step: what they hold and take, and who schedules them."""

    def __init__(self, context: Context) -> None:
        found = (kind.scheduler(context) for kind in registered().values())
        self.scheduler: Scheduler | None = next((s for s in found if s is not None), None)
        self._trace = context.trace
        self.work: Work = work_of_passes(context.trace)
        self.fixed_bytes: int = resident_bytes(device_timeline(context.trace))

    def unscheduled(self, at: Conditions) -> list[Scheduled]:
        """The passes as they are, scaled."""
        passes = int(device_timeline(self._trace).totals.max(initial=0)) - self.fixed_bytes
        peak = at.resident_bytes + int(passes * at.scales.share * at.scales.width)
        return [Scheduled(None, max(peak, at.floor_bytes), self.work)]


class _Known:
    """The updates that are known while one of several techniques is estimated."""

    def __init__(self, estimates: DeviceEstimates, techniques: tuple[Technique, ...]) -> None:
        self.context, self.trained = estimates.context, estimates.trained
        self._estimates, self._techniques = estimates, techniques

    def without(self, technique: Technique) -> Update:
        """The update of the same setting, this technique left out."""
        others = tuple(t for t in self._techniques if t is not technique)
        return self._estimates._update(others)
