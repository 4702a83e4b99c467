"""`verify`: plain and planned training side by side, on copies, with the same data and draws."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import InputError, NoEffectWarning, TraceError
from ..memory.live.measure import measure
from ..step.predict import predict_step
from ..techniques.base import Technique
from ..techniques.checkpointing.caches import caches_off
from ..techniques.microbatching.draws import open_kernels
from ..techniques.microbatching.split import examples_of
from ..techniques.microbatching.split_test import SplitFound, find_units
from ..techniques.microbatching.units import AUTO
from ..techniques.plan import Plan
from ..trace.blocks import is_normalization
from ..trace.capture import Loss
from ..trace.fakes import check_optimizer
from ..trace.streams import rewound_streams
from .certificate import Certificate, Comparison, Level
from .claims import MICROBATCHES, RECOMPUTATION, WHAT, Circumstances, Claims, claims, suspicion
from .distance import (
    EXACT,
    EXACT_NARROW,
    GAIN,
    NEAR_MULTIPLE,
    NEAR_SPREAD,
    ROUNDING_MULTIPLE,
    Distance,
    Noise,
    distance,
    gain,
)
from .floats import computed_kinds, whole_fp32
from .noise import EPSILON, noises, trained_in_16_bits
from .other import Against, carried_over
from .sides import InParts, Optimizer, Plain, Planned, Trained

PEAKS_DRAWN = 6
"""Predictions that tell whether a peak is random."""
_ASSUMED = {
    torch.float64: 1e-13,
    torch.float32: 2e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 8e-3,
}
"""Rounding where it cannot be measured, relative, by the least precise type computed in."""


def verify(
    plan: Plan | Iterable[Technique],
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss,
    optimizer: Optimizer,
    steps: int = 3,
    against: Against | None = None,
    near: float | None = None,
    lossy: float | None = None,
    accept: str | Sequence[str] = (),
) -> Certificate:
    """Train copies for a few steps, plainly and by the plan, and say how they compare.

    Gradients are those of the first step, before the update; all else is compared after the last.
    Rounding is measured: plain training in FP64 says how far the very step is from exact, and a
    multiple of that is allowed. The plan runs in FP64, too, where what differs is not rounding; so
    16 bits hide nothing. Microbatches draw what the whole batch drew. What could not be compared is
    UNPROVEN and fails, unless `accept` names it. `near` and `lossy` bound what a claim of that kind
    may differ by, relative; by default near is a multiple of the noise that 16 bits make here.

    `against` is another model, or (model, optimizer) or (model, optimizer, loss), to compare with
    in place of plain training: the model as it is beside one that is checkpointed, compiled or
    fused. It starts from the same weights, by name.

    The model, the optimizer and the random streams given are left as they are. FP32 is whole,
    without TF32. With fewer batches than steps they are used again.
    """
    chosen = Plan.of(plan.techniques if isinstance(plan, Plan) else plan)  # without a budget
    check_optimizer(optimizer)
    data = _batches(batches, steps)
    accepted = {accept} if isinstance(accept, str) else set(accept)
    compared = nullcontext() if chosen.checkpointing is None else caches_off(model)
    with rewound_streams() as rewind, compared:
        with whole_fp32():
            given = chosen, model, optimizer, loss, data, rewind, against
            made, rows = prove(*given, near=near, lossy=lossy)
        rows = [
            replace(row, accepted=row.found is Level.UNPROVEN and row.what in accepted)
            for row in rows
        ]
        return _with_peak(made, tuple(rows), model, optimizer, loss, steps)


def prove(
    *given: Any, near: float | None = None, lossy: float | None = None
) -> tuple[_Proof, list[Comparison]]:
    """Train both sides and compare them; again, if need be, with kernels whose draws show."""
    made = _Proof(*given)
    with ExitStack() as opened:
        if made.expected.hidden is not None:
            opened.enter_context(open_kernels())
            made.rewind()
            made = _Proof(*given)
        made.bounds = {Level.NEAR: near, Level.LOSSY: lossy}
        return made, made.rows()


def _with_peak(
    made: _Proof,
    rows: tuple[Comparison, ...],
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    steps: int,
) -> Certificate:
    batch = made.data[0]
    there = next(model.parameters()).device.type

    def predicted_bytes() -> int | None:
        if made.against is not None:
            return None
        try:
            return predict_step(
                made.plan, model, batch, loss=loss, optimizer=optimizer, device=there
            ).peak_bytes
        except TraceError:  # what it computes was compared all the same
            return None

    predicted = predicted_bytes()
    measured = made.planned.step.measure(batch)
    plain = made.plain
    before = measure(plain.model, batch, loss=plain.loss, optimizer=plain.optimizer, warmup_steps=1)
    found = Certificate(
        made.plan,
        measured.device,
        steps,
        rows,
        predicted,
        measured.peak_bytes,
        before.peak_bytes,
        reference=made.reference,
        beside="plain training" if made.against is None else "the model given",
    )
    return found if found.peak_ok else replace(found, peak_varies=_varies(predicted_bytes))


def _varies(peak_bytes: Callable[[], int | None]) -> bool:
    """Whether the peak is another one where random streams stand elsewhere."""
    found = set()
    for _ in range(PEAKS_DRAWN):
        torch.rand(()), random.random(), np.random.rand()
        found.add(peak_bytes())
    return len(found) > 1


def _batches(batches: Iterable[Any], steps: int) -> list[Any]:
    if steps < 1:
        raise InputError(f"verify cannot run {steps} steps", hint="a whole number from 1")
    if isinstance(batches, (torch.Tensor, Mapping, tuple)):
        raise InputError("batches is one batch, not several", hint="give a list, [batch]")
    given = list(islice(batches, steps))
    if not given:
        raise InputError("there is no batch to verify with", hint="give a list, [batch]")
    return [given[number % len(given)] for number in range(steps)]


class _Proof:
    """Both sides, as they are and in FP64."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        data: list[Any],
        rewind: Callable[[], None],
        against: Against | None,
    ) -> None:
        self.data, self.against, self.rewind = data, against, rewind
        self.bounds: dict[Level, float | None] = {}
        self._in_16_bits: Trained | None = None
        self._own = (model, optimizer, loss)
        self._trained = self._own if against is None else carried_over(against, *self._own)
        self.plain = Plain(*self._trained)
        self.expected = self.plain.train(data)
        self.split: SplitFound | None = None
        self.plan = self._with_units(plan)
        self.at = self._circumstances()
        self.planned, self.found = self._train_planned()
        self.exact = self._exactly(lambda: self._like_plain(wide=True))
        self._noise = self._measured()
        self.claims = self._claims()

    # -- what runs -----------------------------------------------------------------------------

    def _with_units(self, plan: Plan) -> Plan:
        """With units that were tested, where the plan leaves them open."""
        micro = plan.microbatching
        cut = next((batch for batch in self.data if _is_cut(plan, batch)), None)
        if micro is None or micro.simulated or micro.units != AUTO or cut is None:
            return plan
        model, _, loss = self._own
        self.split = find_units(model, cut, loss)
        units = "examples" if self.split.units == AUTO else self.split.units
        return replace(plan, microbatching=replace(micro, units=units))

    def _circumstances(self) -> Circumstances:
        model, optimizer, _ = self._own
        streams = self.expected.streams
        return Circumstances(
            device=next(model.parameters()).device.type,
            batch_norm=any(is_normalization(m) and m.training for m in model.modules()),
            drawn=any(state != streams[0] for state in streams),
            split=any(_is_cut(self.plan, batch) for batch in self.data),
            linear=isinstance(optimizer, torch.optim.SGD),
        )

    def _claims(self) -> Claims:
        if self.against is None:
            return claims(self.plan, self.at)
        made: Claims = dict.fromkeys(WHAT, (Level.ROUNDING, ""))
        made["random stream"] = Level.EQUAL, ""
        return made

    def _make_planned(self, plan: Plan, *, wide: bool = False) -> Planned:
        self.rewind()
        made = Planned(plan, *self._own, wide=wide)
        if wide or (self.at.split and self.at.drawn):
            made.share(self.expected.draws)
        return made

    def _train_planned(self) -> tuple[Planned, Trained]:
        """With a loss scale that no step overflows at, if there is one."""
        planned = self._make_planned(self.plan)
        scale = planned.scale
        for _ in range(40):
            start = None if scale is None else float(scale)
            found = planned.train(self.data)
            if start is None or planned.scale is None or float(planned.scale) >= start:
                break
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NoEffectWarning)
                planned, scale = self._make_planned(self.plan), planned.scale
            assert planned.scale is not None and scale is not None
            planned.scale.copy_(scale)
            scale = planned.scale
        return planned, found

    def _like_plain(self, *, wide: bool) -> Plain:
        self.rewind()
        side = Plain(*self._trained, wide=wide)
        side.draws = self.expected.draws
        return side

    def _exactly(self, side: Callable[[], Plain | Planned]) -> Trained | None:
        """In FP64; None where the model or its loss does not run so."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NoEffectWarning)
                return side().train(self.data)
        except (InputError, TraceError):
            return None

    # -- rounding ------------------------------------------------------------------------------

    def _measured(self) -> dict[str, Noise]:
        if self.exact is not None:
            self.reference = "rounding measured against the same steps in FP64"
            return noises(self.exact, self.expected)
        loss = self._trained[2]
        self.rewind()
        kinds = computed_kinds(lambda: loss(Plain(*self._trained).model, self.data[0]))
        worst = max(_ASSUMED[kind] for kind in kinds & _ASSUMED.keys())
        self.reference = f"rounding assumed to be {worst:g}: the step does not run in FP64"
        return {what: Noise({}, worst) for what in self.expected.rows()}

    def _near(self) -> dict[str, Noise]:
        """What the plan's 16 bits do to a plain step, and rounding as it is."""
        precision = self.plan.precision
        if precision is None or precision.kind == "fp32":
            return self._noise
        kind = precision.kind
        found = {what: Noise({}, EPSILON[kind] / 2) for what in self._noise}
        for seed in (None, 0):  # two samples: one number's noise can be zero by luck
            made = None
            if self.exact is not None:
                side = self._like_plain(wide=False)
                made = trained_in_16_bits(side, kind, self.data, seed)
            if made is None or self.exact is None:
                return {what: Noise({}, EPSILON[kind]) for what in self._noise}
            self._in_16_bits = self._in_16_bits or made
            also = noises(self.exact, made)
            found = {what: found[what] | also[what] for what in found}
        return {what: self._noise[what] | found[what] for what in self._noise}

    # -- rows ----------------------------------------------------------------------------------

    def rows(self) -> list[Comparison]:
        """Everything that is compared, in the order of a certificate."""
        expected = self.planned.expected(self.expected)
        if self.planned.sparse:
            masked = self._like_plain(wide=False)
            self.planned.masked(masked)
            gradients = masked.train(self.data[:1]).gradients
            expected["gradients"] = {
                name: self.planned.at_nonzeros(name, g) for name, g in gradients.items()
            }
        found = self.found.rows()
        extra = []
        if self.against is not None:
            extra = _unshared(expected, found)
        broken_exactly = self._differs_exactly()
        near = self._near() if any(c is Level.NEAR for c, _ in self.claims.values()) else {}
        made = []
        for what in WHAT:
            if what == "random stream":
                made.append(self._streams())
                continue
            row = self._row(what, expected[what], found[what], near.get(what))
            made.append(self._judged(row, broken_exactly.get(what)))
        made += extra
        if self.at.split and self.at.batch_norm and self.against is None:
            made += self._microbatches()
        if self.plan.checkpointing is not None and len(self.plan.techniques) > 1:
            made.append(self._recomputation())
        return [row if row.ok else self._suspected(row) for row in made]

    def _row(
        self, what: str, expected: dict[Any, Any], found: dict[Any, Any], near: Noise | None
    ) -> Comparison:
        claim, why = self.claims[what]
        if not expected and not found:
            return Comparison(what, claim, Level.NONE, None)
        seen = distance(expected, found, self._noise[what], ROUNDING_MULTIPLE)
        if seen.undefined:
            why = "plain training gives NaN or infinity: there is nothing to compare with"
            return Comparison(what, claim, Level.LOSSY, seen.relative, 0.0, why, seen.name)
        if seen.equal:
            return Comparison(what, claim, Level.EQUAL, 0.0, why="")
        if seen.within or claim <= Level.ROUNDING:
            level = Level.ROUNDING if seen.within else Level.LOSSY
            return Comparison(what, claim, level, seen.relative, seen.bound, why, seen.name)
        set_by_user = self.bounds.get(claim)
        if claim is Level.LOSSY or set_by_user is not None:
            bound = set_by_user
            within = _within(seen, bound)
        else:
            assert near is not None
            seen = distance(expected, found, near, NEAR_MULTIPLE, NEAR_SPREAD)
            bound, within = seen.bound, seen.within
            longer = self._longer(expected, found) if what == "gradients" else 0.0
            if longer:
                why = f"all gradients together are {1 + longer:.3f} times as long as in 16 bits"
                return Comparison(what, claim, Level.LOSSY, abs(longer), 0.0, why)
        level = Level.NEAR if within and claim is Level.NEAR else Level.LOSSY
        return Comparison(what, claim, level, seen.relative, bound, why, seen.name)

    def _longer(self, expected: dict[Any, Any], found: dict[Any, Any]) -> float:
        """A common factor of all gradients that 16 bits do not explain; 0 where there is none."""
        emulated, precision = self._in_16_bits, self.plan.precision
        if emulated is None or precision is None or self.planned.sparse:
            return 0.0
        apart = gain(expected, found) - gain(expected, emulated.gradients)
        return apart if abs(apart) > GAIN * EPSILON[precision.kind] else 0.0

    def _differs_exactly(self) -> dict[str, Distance]:
        """Rows that differ in FP64 where nothing but rounding may."""
        sparse = self.plan.sparsity is not None and self.plan.sparsity.density < 1
        plan = replace(self.plan, precision=None, sparsity=None) if sparse else replace(
            self.plan, precision=None
        )  # fmt: skip
        promised = claims(plan, replace(self.at, linear=True, device="cpu"))
        checked = [what for what in self._noise if promised[what][0] <= Level.ROUNDING]
        if self.against is not None:
            checked = list(self._noise)
            compiled = any(hasattr(m, "_orig_mod") for m in self._own[0].modules())
            if compiled:  # modes in which all stays FP64 take the compiler away
                return {}
        elif all(promised[what][0] is Level.EQUAL for what in self._noise) and plan == self.plan:
            return {}  # as it is, no bit may differ
        if self.exact is None or not checked:
            return {}
        again = self._exactly(lambda: self._make_planned(plan, wide=True))
        if again is None:
            return {}
        steady = not (self.exact.narrowed or again.narrowed)
        if not steady or not self._even_optimizer():
            checked = [what for what in checked if what in ("loss", "gradients", "buffers")]
        self.found.unmatched = self.found.unmatched or again.unmatched
        expected, found = self.exact.rows(), again.rows()
        if self.against is not None:
            _unshared(expected, found)
        allowed = Noise({}, EXACT if steady else EXACT_NARROW)
        apart = {what: distance(expected[what], found[what], allowed, 1.0) for what in checked}
        return {what: d for what, d in apart.items() if not d.equal and not d.within}

    def _even_optimizer(self) -> bool:
        """Whether a gradient that is zero but for rounding hardly moves its parameter."""
        if self.at.linear:
            return True
        groups = self._own[1].param_groups
        return all(float(group.get("eps", 0) or 0) >= 1e-10 for group in groups)

    def _judged(self, row: Comparison, apart: Distance | None) -> Comparison:
        """With what FP64 says, and whether the draws could be shared at all."""
        if apart is not None and not apart.undefined:
            row = replace(
                row,
                found=Level.LOSSY,
                claim=min(row.claim, Level.ROUNDING),
                error=apart.relative,
                bound=apart.bound,
                tensor=apart.name,
                why="differs in FP64, where nothing rounds",
            )
        if not row.ok and self.at.drawn and self.at.split and self.found.unmatched:
            why = f"not compared: parts cannot share what {self.found.unmatched} draws"
            row = replace(row, found=Level.UNPROVEN, why=why)
        return row

    def _streams(self) -> Comparison:
        claim, why = self.claims["random stream"]
        same = self.expected.streams == self.found.streams
        level = Level.EQUAL if same else Level.LOSSY
        return Comparison("random stream", claim, level, None, why="" if same else why)

    def _microbatches(self) -> list[Comparison]:
        """Microbatches where BatchNorm trains: the loss splits, and parts run as they should."""
        micro = self.plan.microbatching
        assert micro is not None
        if micro.simulated:
            return []
        alone = Plan(microbatching=micro)

        def frozen(side: Any) -> Any:
            for module in side.model.modules():
                if is_normalization(module):
                    module.eval()
            return side

        def in_parts() -> InParts:
            self.rewind()
            side = InParts(*self._trained, wide=True)
            side.micro, side.draws = micro, self.expected.draws
            return side

        whole = self._exactly(lambda: frozen(self._like_plain(wide=True)))
        parts = self._exactly(lambda: frozen(self._make_planned(alone, wide=True)))
        loop = self._exactly(in_parts)
        by_plan = self._exactly(lambda: self._make_planned(alone, wide=True))
        if whole is None or parts is None or loop is None or by_plan is None:
            why = "not compared: the step does not run in FP64"
            return [Comparison(MICROBATCHES, Level.ROUNDING, Level.UNPROVEN, None, why=why)]
        allowed = Noise({}, EXACT if not whole.narrowed else EXACT_NARROW)
        kept = ("loss", "gradients") if not self._even_optimizer() else tuple(loop.rows())
        pairs = [(whole.rows()[w], parts.rows()[w]) for w in ("loss", "gradients")]
        pairs += [(loop.rows()[what], by_plan.rows()[what]) for what in kept]
        seen = [distance(*pair, allowed, 1.0) for pair in pairs]
        worst = max(seen, key=lambda d: d.relative / max(d.bound, 1e-300))
        why = "its loss splits, and parts add up as in a plain loop"
        level = Level.ROUNDING if all(d.equal or d.within for d in seen) else Level.LOSSY
        if level is Level.LOSSY and (parts.unmatched or by_plan.unmatched):
            level = Level.UNPROVEN
            why = f"not compared: parts cannot share what {parts.unmatched} draws"
        return [
            Comparison(MICROBATCHES, Level.ROUNDING, level, worst.relative, worst.bound, why,
                       worst.name)
        ]  # fmt: skip

    def _recomputation(self) -> Comparison:
        """All that training leaves behind, with and without recomputing."""
        kept = replace(self.plan, checkpointing=None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoEffectWarning)  # said once
            side = self._make_planned(kept)
            if side.scale is not None:
                assert self.planned.scale is not None
                side.scale.copy_(self.planned.scale)
            without = side.train(self.data)
        on_cpu = next(iter(self.planned.named.values())).is_cpu
        claim = Level.EQUAL if on_cpu else Level.ROUNDING
        merged = Noise({}, max(noise.relative for noise in self._noise.values()))
        seen = distance(without.all(), self.found.all(), merged, ROUNDING_MULTIPLE)
        level = Level.EQUAL if seen.equal else Level.ROUNDING if seen.within else Level.LOSSY
        if without.streams != self.found.streams:
            level = Level.LOSSY
        return Comparison(RECOMPUTATION, claim, level, seen.relative, seen.bound, "", seen.name)

    def _suspected(self, row: Comparison) -> Comparison:
        if row.found is Level.UNPROVEN or row.why.startswith("plain training gives"):
            return row
        if self.split is not None and self.split.splits is False:
            return replace(row, why=self.split.why)
        made = suspicion(row, split=self.at.split)
        where = f"{row.tensor}: " if row.tensor else ""
        return replace(made, why=where + made.why)


def _within(seen: Distance, bound: float | None) -> bool:
    return seen.relative < float("inf") and (bound is None or seen.relative <= bound)


def _is_cut(plan: Plan, batch: Any) -> bool:
    micro = plan.microbatching
    return micro is not None and (examples_of(batch) or 0) > micro.examples_at_once(batch)


def _unshared(
    expected: dict[str, dict[Any, Any]], found: dict[str, dict[Any, Any]]
) -> list[Comparison]:
    """Take out what only one of two models has, and say so."""
    names = expected["parameters"].keys() & found["parameters"].keys()
    lone = sorted(map(str, expected["parameters"].keys() ^ found["parameters"].keys()))
    for rows in (expected, found):
        rows["parameters"] = {n: t for n, t in rows["parameters"].items() if n in names}
        rows["gradients"] = {n: t for n, t in rows["gradients"].items() if n in names}
        rows["optimizer state"] = {
            k: t for k, t in rows["optimizer state"].items() if k[0] in names
        }
    shared = expected["buffers"].keys() & found["buffers"].keys()
    for rows in (expected, found):
        rows["buffers"] = {n: t for n, t in rows["buffers"].items() if n in shared}
    if not lone:
        return []
    why = f"not compared: only one model has {lone[0]}" + (
        f" and {len(lone) - 1} more" if len(lone) > 1 else ""
    )
    return [Comparison("unshared parameters", Level.ROUNDING, Level.UNPROVEN, None, why=why)]
