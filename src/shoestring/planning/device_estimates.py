"""Estimates of plans for a model, by the `device` accounting.

Estimates scale the plain step: offers say by how much, and the scheduler fills the room. `predict`
does not estimate: it runs the planned step itself on fake tensors, with its update.

Example, 4 GB of weights in FP32, AdamW, 10 GB of activations, a budget of 16 GB and the setting
"8-bit state, two microbatches":

    update        a trace of the 64 largest tensors: weights 4 GB, gradients 4 GB, state 2 GB
    resident      weights and state, 6 GB, and the gradients of the first part, 4 GB
    room          16 GB - 10 GB = 6 GB, for 10 GB × `Scales.share` 1/2 = 5 GB: nothing is recomputed
    `_seconds`    of both parts, of the update, and of 0 bytes over the link
    `predict`     the step traced: 15.02 GB, and what the allocator reserves for it
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cached_property

import numpy as np

from ..errors import InputError, TraceError
from ..memory.cpu.scratch import scratch_above
from ..memory.device import device_timeline
from ..memory.picture import repeated, thinned
from ..memory.prediction import Prediction
from ..memory.reserved import reserved
from ..memory.timeline import resident_bytes
from ..memory.work import Work, brought_bytes, link_bytes, work_of_passes
from ..techniques import registered
from ..techniques.base import Technique
from ..techniques.offers import Conditions, Context, Scheduled, Scheduler, Update
from ..techniques.plan import Plan
from ..trace.graph import Trace, without_update
from .cost import Costs
from .residents import largest, traced_update
from .search import Candidate
from .settings import Setting

_PLAIN = Plan()

_GAPS = 0.004
"""Of a limit in reserved bytes, gaps between tensors: of 46 predicted steps of nine models
(`benchmarks/card_models`, at 80, 55 and 30%) 42 need at least so much beyond their estimate."""
_BOTH_WAYS = 0.7
"""Of the link's rate each way, what is left while state goes both ways: so plans took that moved 16
and 32 GB an update (`benchmarks/results/card_h200_strangers.jsonl`, run b)."""


class DeviceEstimates:
    """Candidates for one training step on one kind of device."""

    def __init__(
        self, context: Context, costs: Costs, *, by_norm: bool = False, waiting: bool = False
    ) -> None:
        self.context, self._costs, self._by_norm = context, costs, by_norm
        self._waiting = waiting
        plain = context.trace_step(Plan(), optimizer=context.optimizer)
        context.trace = without_update(plain)
        self._traced: dict[Plan, Trace] = {} if waiting else {Plan(): plain}
        self._updates: dict[tuple[Technique, ...], Update] = {}
        self._known_passes: dict[tuple[Technique, ...], _Passes] = {(): _Passes(context)}
        self.trained: dict[str, int] = {
            p.name: p.numel * p.dtype.itemsize for p in context.trace.parameters if p.has_gradient
        }
        self.room_bytes: int | None = None
        """Bytes a captured step may reserve; above that the step runs eagerly."""
        self.captures = not waiting
        self._off: dict[tuple[str, ...], tuple[int, float]] = {}
        """Names of techniques → bytes that were missing in predictions, and the factor to seconds,
        as trials found them."""
        self._predictions: dict[tuple[Plan, int | None], Prediction] = {}

    @property
    def passes(self) -> Work:
        """Of the plain step."""
        return self._passes(Setting()).work

    @cached_property
    def plain(self) -> Prediction:
        """The step without a plan."""
        return self._predicted(Setting(), self._traced_step(Plan()), self.passes)

    # -- trials --------------------------------------------------------------------------------

    def correct(self, setting: Setting, more_bytes: int, factor: float) -> None:
        """A step by it took so much more than is predicted with what was known so far."""
        known_bytes, known = self._correction(setting)
        self._off[setting.names] = known_bytes + more_bytes, known * factor

    @property
    def least_factor(self) -> float:
        """To the seconds of settings that were not tried: of one trial nothing follows for them."""
        factors = [factor for _, factor in self._off.values()]
        return min(factors) if len(factors) > 1 else 1.0

    def _correction(self, setting: Setting) -> tuple[int, float]:
        return self._off.get(setting.names, (0, self.least_factor))

    # -- a setting -----------------------------------------------------------------------------

    def _passes(self, setting: Setting) -> _Passes:
        """Forward and backward, with what changes them by more than a factor."""
        techniques = tuple(t for t in setting.techniques if t.changes_passes)
        if techniques not in self._known_passes:
            self._known_passes[techniques] = _Passes(self.context.within(techniques))
        return self._known_passes[techniques]

    def update(self, setting: Setting) -> Update:
        """Resident bytes with a setting, and the bytes of the update."""
        techniques = tuple(t for t in setting.techniques if t.changes_update)
        now = self._update(techniques)
        for technique in techniques if setting.scales.parts > 1 else ():
            folds = technique.folds_parts(self.context.optimizer)
            if technique.updates_in_backward and not folds:  # gradients wait for the last part
                others = self._update(tuple(t for t in techniques if t is not technique))
                now = replace(
                    now,
                    gradient_bytes=others.gradient_bytes,
                    early_bytes=others.early_bytes,
                )
        return now

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
            trace = self._traced_update(Plan(techniques), names)
        except (InputError, TraceError):
            if not techniques:
                raise
            return self._update(techniques[:-1])  # it does not train, which `predict` finds too
        together = self.context.device == "cuda" and not any(t.updates_apart for t in techniques)
        return traced_update(trace, shown, together=together)

    def _traced_update(self, plan: Plan, names: Collection[str]) -> Trace:
        """The update of some parameters, or of all if none is named."""
        return self.context.trace_step(
            plan,
            optimizer=self.context.optimizer,
            passes=False,
            trained=self._trained_names(names or self.trained),
        )

    @staticmethod
    def _trained_names(names: Iterable[str]) -> set[str]:
        """Sparse ones have another name once a plan is applied."""
        return {one for name in names for one in (name, f"{name}_values")}

    @property
    def _of_card(self) -> bool:
        """Whether budgets are of what the allocator reserves."""
        return self.context.device == "cuda" and self.context.reserved

    def _resident_bytes(self, setting: Setting) -> int:
        """There all the time. A technique may narrow the model and another take it away."""
        whole, now = self._update(()), self.update(setting)
        fixed = self._passes(setting).fixed_bytes
        model = fixed + now.model_bytes - whole.model_bytes
        if now.model_bytes < whole.model_bytes:
            model = max(model, fixed * now.model_bytes // whole.model_bytes)
        inside = any(t.updates_in_backward for t in setting.techniques)
        lasting = now.lasting_bytes if inside else 0
        return model + now.state_bytes + lasting

    def floor_bytes(self, setting: Setting) -> int:
        """At the peak of the update, through which libraries keep their workspaces."""
        now = self.update(setting)
        return self._resident_bytes(setting) + now.gradient_bytes + self._passing_bytes(setting)

    def _passing_bytes(self, setting: Setting) -> int:
        """Of the update, on top of what is resident and the gradients."""
        now, inside = self.update(setting), any(t.updates_in_backward for t in setting.techniques)
        return now.passing_bytes + (0 if inside else now.lasting_bytes)

    def _conditions(self, setting: Setting, *, least: bool = False) -> Conditions:
        """`least`: no gradient need be there at the peak of the passes."""
        whole, now = self._update(()), self.update(setting)
        number_type = setting.scales.number_type
        floor = self.floor_bytes(setting)
        gradients = now.gradient_bytes / max(whole.gradient_bytes, 1)
        early = 0 if least else now.early_bytes
        if early and early >= now.gradient_bytes:  # the others are less, and none waits
            gradients = 0.0
        if self._of_card and self.room_bytes is not None and floor <= self.room_bytes:
            floor = 0  # it fits; less for the passes makes smaller gaps between what is reserved
        return Conditions(
            scales=setting.scales,
            gradients=gradients,
            gradient_bytes=now.gradient_bytes,
            resident_bytes=self._resident_bytes(setting) + early,
            floor_bytes=floor,
            cost=lambda work: self._costs.seconds(work, number_type),
            waiting=self._waiting,
        )

    def _seconds(self, setting: Setting, work: Work, captured: bool | None = None) -> float:
        """Of a whole step whose passes over the minibatch take so much work."""
        if captured is None:
            captured = self._capturable(setting)
        step, update, link, hidden = self._parts(setting, work, captured)
        return (step + update + link - hidden) * self._correction(setting)[1]

    def _parts(
        self, setting: Setting, work: Work, captured: bool
    ) -> tuple[float, float, float, float]:
        """Seconds of the passes, the update and the link, and how many of the link's overlap.

        Copies to the host overlap the forward pass, at least a quarter of the passes; those that
        come back overlap the backward pass, two thirds of them. Sums of gradients overlap that
        of the parts before the last. State overlaps the update; where updates run in it, the
        backward pass of the last part. Weights overlap what is left of the passes: each is
        brought in both.
        """
        now, by = self.update(setting), setting.scales
        before = by.parts - 1
        added = 3 * now.gradient_bytes + 5 * now.part_link_bytes
        again = before * (2 * now.model_bytes + added)
        passes = work.times(1, by.width, by.parts) + Work(0, again, 0)
        step = self._costs.step_seconds(passes, by.number_type, captured=captured)
        update = self._costs.step_seconds(now.work, captured=captured)
        inside = any(t.updates_in_backward for t in setting.techniques)
        if not captured:
            host = (passes.launches if inside else 0) + now.work.launches + now.host_launches
            host += before * now.part_launches
            least = self._costs.seconds_per_launch * host  # Python runs one after the other
            if inside:
                step = max(step, least - update)
            else:
                update = max(update, least)
        if self._by_norm and inside and by.parts == 1:  # once for the norm to clip by
            step *= 2
        link = now.link_bytes / self._costs.link_bytes_per_second
        sums = before * now.part_link_bytes / self._costs.link_bytes_per_second
        if self.context.device != "cpu":
            link, sums = link / _BOTH_WAYS, sums / _BOTH_WAYS
        saved = passes.link / self._costs.link_bytes_per_second  # each way
        brought = self._brought_bytes(setting) / self._costs.link_bytes_per_second
        if self.context.device == "cpu":  # a disk is read and written by who computes
            return step, update, link + sums + 2 * saved, 0.0
        once = step / 2 if self._by_norm and inside and by.parts == 1 else step
        back = min(saved, once * 2 / 3)
        under = update + ((once * 2 / 3 - back) / by.parts if inside else 0)
        summed = min(sums, (once * 2 / 3 - back) * before / by.parts)
        hidden = min(link, under) + min(saved, once / 4) + back + summed
        left = max(step - back - summed - (min(link, under) if inside else 0), 0)
        return step, update, link + sums + 2 * saved + brought, hidden + min(brought, left)

    def _brought_bytes(self, setting: Setting) -> int:
        """Of weights, from the host."""
        return 2 * self._passes(setting).brought_bytes * setting.scales.parts

    @staticmethod
    def _saved_link(setting: Setting, work: Work) -> int:
        """Bytes of activations that go to the host and come back."""
        return int(work.link * setting.scales.width)

    def _capturable(self, setting: Setting) -> bool:
        """On CUDA, whether the update can be part of a graph."""
        if self.context.device != "cuda" or not self.captures:
            return False
        if any(t.runs_eagerly for t in setting.techniques):
            return False
        known = any(t.updates_on_device for t in setting.techniques)
        return known or self.context.trace.capturable

    # -- estimates -----------------------------------------------------------------------------

    def least_seconds(self, setting: Setting) -> float:
        """Nothing is recomputed."""
        passes = self._passes(setting)
        kept = None if passes.scheduler is None else passes.scheduler.kept
        works = [passes.work, *([] if kept is None else [kept])]
        return min(self._seconds(setting, work) for work in works)

    def least_bytes(self, setting: Setting) -> int:
        """Bytes that no schedule changes, and those of the largest block."""
        at, scheduler = self._conditions(setting, least=True), self._passes(setting).scheduler
        floor = self.floor_bytes(setting)  # that of `at` may be left out, where it fits
        return floor if scheduler is None else max(floor, scheduler.least_bytes(at))

    def likely_room(self, limit_bytes: int) -> int:
        """Of a limit, what an estimate may need so that its prediction fits, too, most likely."""
        return limit_bytes - int(_GAPS * limit_bytes) if self._of_card else limit_bytes

    def best(self, setting: Setting, room_bytes: int) -> Candidate | None:
        """The fastest that is estimated to fit."""
        at, passes = self._conditions(setting), self._passes(setting)
        if passes.scheduler is None:
            found = next((s for s in passes.unscheduled(at) if s.peak_bytes <= room_bytes), None)
        else:
            found = passes.scheduler.best(at, room_bytes)
        return None if found is None else self._candidate(setting, found)

    def tighter(self, candidate: Candidate, missing_bytes: int) -> Candidate | None:
        """The fastest that is estimated to need so much less, by the same setting.

        Reserved bytes do not follow the peak: gradients do not fit into the gaps that
        activations leave. So the schedule must keep fewer activations.
        """
        scheduler = self._passes(candidate.setting).scheduler
        if not self._of_card or scheduler is None:
            return self.best(candidate.setting, candidate.peak_bytes - missing_bytes)
        at = self._conditions(candidate.setting).of_activations
        now = scheduler.peak_bytes(at, candidate.scheduled)
        found = scheduler.best(at, now - missing_bytes)
        return None if found is None else self._candidate(candidate.setting, found)

    def least(self, setting: Setting, hardly: float = 0.005) -> Candidate | None:
        """The one of least memory, or one that takes hardly more and recomputes less.

        `hardly`: so much of all that the step needs is not worth regions within regions.
        """
        at, scheduler = self._conditions(setting), self._passes(setting).scheduler
        if scheduler is None:
            return next(iter(self.front(setting)), None)
        found = scheduler.front(at.of_activations if self._of_card else at)
        if not found:
            return None
        enough = found[0].peak_bytes + int(hardly * scheduler.least_bytes(at))
        chosen = [one for one in found if one.peak_bytes <= enough][-1]
        return self._candidate(setting, chosen)

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
        seconds = self._seconds(setting, found.work)
        return Candidate(setting, found.technique, found.peak_bytes, seconds, found.work)

    def idle(self, candidate: Candidate) -> bool:
        """Inputs of recomputed blocks would lie on the host, and none is recomputed."""
        return candidate.setting.scales.inputs_here is not None and not candidate.work.link

    # -- predictions ---------------------------------------------------------------------------

    def predict(self, candidate: Candidate) -> Prediction | None:
        """The peak of the planned step, run on fake tensors; the time is that of the estimate."""
        key = candidate.plan, self.room_bytes
        if key not in self._predictions:
            found = self._traced_prediction(candidate)
            if found is None:
                return None
            self._predictions[key] = found
        found, (more, factor) = self._predictions[key], self._correction(candidate.setting)
        assert found.seconds is not None
        room = self.room_bytes
        captured = found.captured and (room is None or found.graph_bytes + more <= room)
        return replace(
            found,
            seconds=found.seconds * factor,
            reserved_bytes=found.reserved_bytes and found.reserved_bytes + more,
            graph_bytes=found.graph_bytes and found.graph_bytes + more,
            scratch_bytes=found.scratch_bytes + (0 if found.reserved_bytes else more),
            captured=captured,
        )

    def _traced_prediction(self, candidate: Candidate) -> Prediction | None:
        try:
            trace = self._traced_step(candidate.plan)
        except (InputError, TraceError) as error:
            warnings.warn(
                f"left out, {candidate.plan.short()}: {error}", RuntimeWarning, stacklevel=2
            )
            return None
        return self._predicted(candidate.setting, trace, candidate.work, candidate.plan)

    def _traced_step(self, plan: Plan) -> Trace:
        """The whole step by a plan, as `profile` traces it."""
        if plan not in self._traced:
            made = self.context.trace_step(
                plan,
                optimizer=self.context.optimizer,
                waiting=self._waiting,
                trained=self._trained_names(self.trained),
            )
            self._traced = {plan: made}  # the last alone: they are large
        return self._traced[plan]

    def _predicted(
        self, setting: Setting, trace: Trace, work: Work, plan: Plan = _PLAIN
    ) -> Prediction:
        totals, device = device_timeline(trace).totals, self.context.device
        scratch = scratch_above(trace, totals) if device == "cpu" else 0
        scratch += sum(
            technique.untraced_bytes(device, trace.draws) for technique in plan.techniques
        )
        taken, graph, captured = 0, 0, self._capturable(setting)
        if self._of_card:
            card = reserved(
                trace,
                state_first=any(t.state_first for t in setting.techniques),
                rest=self._rest(setting), limit_bytes=self.room_bytes, capturable=captured,
            )  # fmt: skip
            taken, graph = card.eager_bytes, card.captured_bytes
            room = self.room_bytes
            if captured and room is not None and card.captured_bytes <= room:
                taken = card.captured_bytes
            else:
                captured = False
        by, now = setting.scales, self.update(setting)
        if by.inputs_here is not None:  # as the step itself moves it
            work = replace(work, link=link_bytes(trace) * by.parts / by.width)
        step, update, link, hidden = self._parts(setting, work, captured)
        return Prediction(
            int(totals.max(initial=0)), "device", device, step + update + link - hidden,
            int(work.flops), self._costs.source, scratch, taken, captured, graph,
            now.link_bytes + (by.parts - 1) * now.part_link_bytes
            + self._saved_link(setting, work) + self._brought_bytes(setting), link, hidden,
            curve=_curve(totals, trace.update_start, by.parts),
        )  # fmt: skip

    def _rest(self, setting: Setting) -> float:
        """How large the last part of the minibatch is, where it is smaller than the others."""
        size, examples = setting.plan().examples_at_once(self.context.batch), self.context.examples
        return 0.0 if size is None or examples is None else examples % size / size


def _curve(totals: np.ndarray, update_start: int, parts: int) -> tuple[int, ...]:
    """Of the passes of each part, and of the update, which is drawn as a twentieth."""
    passes = repeated(totals[:update_start], parts)
    update = totals[update_start:]
    drawn = np.full(len(passes) // 20 + 1 if len(update) else 0, update.max(initial=0))
    return thinned(np.append(passes, drawn))


class _Passes:
    """Forward and backward of one step: what they hold and take, and who schedules them."""

    def __init__(self, context: Context) -> None:
        found = (kind.scheduler(context) for kind in registered().values())
        self.scheduler: Scheduler | None = next((s for s in found if s is not None), None)
        self._trace = context.trace
        self.work: Work = work_of_passes(context.trace)
        self.fixed_bytes: int = resident_bytes(device_timeline(context.trace))
        self.brought_bytes: int = brought_bytes(context.trace)

    def unscheduled(self, at: Conditions) -> list[Scheduled]:
        """The passes as they are, scaled."""
        passes = int(device_timeline(self._trace).totals.max(initial=0)) - self.fixed_bytes
        peak = at.resident_bytes + int(passes * at.scales.share * at.scales.width)
        peak += at.gradient_bytes if at.waiting else 0
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
