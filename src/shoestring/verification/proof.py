"""Both sides of a certificate, trained as they are and in FP64, and the rows they make."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import InputError, NoEffectWarning, TraceError
from ..techniques.base import Technique
from ..techniques.claims import WHAT, Circumstances, Claims, Level, weakest
from ..techniques.plan import Plan
from ..techniques.splitting import SplitFound
from ..techniques.splitting.draws import open_kernels
from ..techniques.splitting.find import find_units
from ..techniques.splitting.units import AUTO
from ..trace.blocks import is_normalization
from ..trace.split import examples_of
from ..trace.tracing import Loss
from .certificate import Comparison
from .claims import claims, suspicion
from .distance import (
    EXACT,
    EXACT_NARROW,
    GAIN,
    NEAR_LARGEST,
    NEAR_MULTIPLE,
    NEAR_SPREAD,
    ROUNDING_MULTIPLE,
    Distance,
    RoundingNoise,
    distance,
    gain,
    total,
)
from .floats import computed_kinds
from .noise import EPSILON, noises, trained_in_16_bits
from .other import Against, carried_over
from .sides import InParts, Optimizer, Plain, Planned, Trained, plain_name

_ASSUMED = {
    torch.float64: 1e-13,
    torch.float32: 2e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 8e-3,
}
"""Rounding where it cannot be measured, relative, by the least precise type computed in."""


class Proof:
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
        self._changed = False
        """A plain copy had to be changed to have comparable gradients."""
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
        cut = next((batch for batch in self.data if _runs_in_parts(plan, batch)), None)
        if plan.loss_units != AUTO or cut is None:
            return plan
        model, _, loss = self._own
        self.split = find_units(model, cut, loss)
        units = "examples" if self.split.units == AUTO else self.split.units
        return Plan(technique.weighted(units) for technique in plan.techniques)

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

    def _in_a_loop(self, plan: Plan, *, wide: bool) -> InParts:
        """Over the parts of this plan, plainly."""
        self.rewind()
        side = InParts(*self._trained, wide=wide)
        side.plan, side.draws = plan, self.expected.draws
        return side

    def _exactly(self, side: Callable[[], Plain | Planned]) -> Trained | None:
        """In FP64; None where the model or its loss does not run so."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NoEffectWarning)
                return side().train(self.data)
        except (InputError, TraceError):
            return None

    @property
    def _narrow(self) -> str | None:
        """The 16-bit type the plan computes in, if it does."""
        kinds = {torch.float16: "fp16", torch.bfloat16: "bf16"}
        found = (kinds.get(t.input_dtype) for t in self.plan.techniques if t.input_dtype)
        return next((kind for kind in found if kind is not None), None)

    # -- rounding ------------------------------------------------------------------------------

    def _measured(self) -> dict[str, RoundingNoise]:
        if self.exact is not None:
            self.reference = "rounding measured against the same steps in FP64"
            return noises(self.exact, self.expected)
        loss = self._trained[2]
        self.rewind()
        kinds = computed_kinds(lambda: loss(Plain(*self._trained).model, self.data[0]))
        worst = max(_ASSUMED[kind] for kind in kinds & _ASSUMED.keys())
        self.reference = f"rounding assumed to be {worst:g}: the step does not run in FP64"
        return {what: RoundingNoise({}, worst) for what in self.expected.rows()}

    def _near(self) -> dict[str, RoundingNoise]:
        """The effect of the plan's 16 bits on a plain step, and plain rounding."""
        kind = self._narrow
        if kind is None:
            return self._noise
        found = {what: RoundingNoise({}, EPSILON[kind] / 2) for what in self._noise}
        scale = 1.0 if self.planned.scale is None else float(self.planned.scale)
        for seed in (None, 0):  # two samples: one number's noise can be zero by luck
            made = None
            if self.exact is not None:
                side = self._like_plain(wide=False)
                made = trained_in_16_bits(side, kind, self.data, seed, scale)
            if made is None or self.exact is None:
                return {what: RoundingNoise({}, EPSILON[kind]) for what in self._noise}
            self._in_16_bits = self._in_16_bits or made
            also = noises(self.exact, made)
            found = {what: found[what] | also[what] for what in found}
        if any(_runs_in_parts(self.plan, batch) for batch in self.data):
            # Sums of parts round, too; beside exact parts, so that only rounding counts.
            exact = self._exactly(lambda: self._in_a_loop(self.plan, wide=True))
            loop = self._in_a_loop(self.plan, wide=False)
            made = trained_in_16_bits(loop, kind, self.data, scale=scale)
            if exact is not None and made is not None:
                also = noises(exact, made)
                found = {what: found[what] | also[what] for what in found}
        return {what: self._noise[what] | found[what] for what in self._noise}

    # -- rows ----------------------------------------------------------------------------------

    def rows(self) -> list[Comparison]:
        """Everything that is compared, in the order of a certificate."""
        expected = self.planned.expected(self.expected)
        alike = self._like_plain(wide=False)
        self._changed = self.planned.prepare_plain(alike)
        if self._changed:
            gradients = alike.train(self.data[:1]).gradients
            expected["gradients"] = {n: self.planned.as_held(n, g) for n, g in gradients.items()}
        del alike
        found = self.found.rows()
        extra = []
        if self.against is not None:
            extra = _unshared(expected, found)
        broken_exactly = self._differs_exactly()
        near = self._near() if any(c is Level.NEAR for c, _ in self.claims.values()) else {}
        if near and not self.at.linear:
            near["parameters"] = near["parameters"] | self._moves(expected["parameters"])
            by_chance = self._moves_by_chance(expected["gradients"], near["gradients"])
            near["parameters"] = near["parameters"] | by_chance
            squares = _of_squares(expected["optimizer state"], expected["gradients"], near)
            near["optimizer state"] = near["optimizer state"] | squares
        if near:
            near = self._with_stated(near, expected["parameters"])
        made = []
        for what in WHAT:
            if what == "random stream":
                made.append(self._streams())
                continue
            row = self._row(what, expected[what], found[what], near.get(what))
            made.append(self._judged(row, broken_exactly.get(what)))
        made += extra
        if self.against is None:
            for technique in self.plan.techniques:
                made += self._proof_of(technique)
        return [row if row.ok else self._suspected(row) for row in made]

    def _row(
        self, what: str, expected: dict[Any, Any], found: dict[Any, Any], near: RoundingNoise | None
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
            whole = total(expected, found) if what == "gradients" else 0.0
            if whole > NEAR_LARGEST:
                why = f"16 bits change all gradients together by {whole:.0%}"
                return Comparison(what, claim, Level.LOSSY, whole, NEAR_LARGEST, why)
            if longer:
                why = f"all gradients together are {1 + longer:.3f} times as long as in 16 bits"
                return Comparison(what, claim, Level.LOSSY, abs(longer), 0.0, why)
        level = Level.NEAR if within and claim is Level.NEAR else Level.LOSSY
        return Comparison(what, claim, level, seen.relative, bound, why, seen.name)

    def _with_stated(
        self, near: dict[str, RoundingNoise], after: dict[Any, Any]
    ) -> dict[str, RoundingNoise]:
        """With the bounds that techniques state themselves."""
        stated: dict[str, float] = {}
        for technique in self.plan.techniques:
            for claim in technique.claims(self.at):
                for what in claim.of if claim.level is Level.NEAR else ():
                    stated[what] = max(claim.bound, stated.get(what, 0.0))
        made = dict(near)
        for what, bound in stated.items():
            if bound and what in made:
                made[what] = made[what] | RoundingNoise({}, bound / NEAR_SPREAD)
        if share := stated.get("parameters"):
            moved = self._moves(after).norms
            by_move = RoundingNoise({name: norm * share for name, norm in moved.items()})
            made["parameters"] = near["parameters"] | by_move
        return made

    def _moves(self, after: dict[Any, Any]) -> RoundingNoise:
        """Dividing by the gradient turns the rounding of a small one into a whole move."""
        before = {plain_name(n): p for n, p in self._trained[0].named_parameters()}
        held = {n: self.planned.as_held(n, before[n]) for n in after}
        moved = RoundingNoise.between(after, held)
        return RoundingNoise({n: norm / NEAR_MULTIPLE for n, norm in moved.norms.items()})

    def _moves_by_chance(self, gradients: dict[Any, Any], noise: RoundingNoise) -> RoundingNoise:
        """A gradient that is all rounding moves its parameter by whole steps, in any direction:
        an attention's key bias, whose gradient is zero, stays where it is in FP32 alone."""
        model, optimizer, _ = self._trained
        rates = {
            id(p): float(g.get("lr", 0.0)) for g in optimizer.param_groups for p in g["params"]
        }
        norms: dict[Any, float] = {}
        for name, parameter in model.named_parameters():
            gradient = gradients.get(plain_name(name))
            if gradient is None or id(parameter) not in rates:
                continue
            scale = float(gradient.double().norm())
            if noise.bound(plain_name(name), scale, NEAR_MULTIPLE, NEAR_SPREAD) >= scale:
                farthest = 2 * len(self.data) * rates[id(parameter)] * parameter.numel() ** 0.5
                norms[plain_name(name)] = farthest / NEAR_MULTIPLE
        return RoundingNoise(norms)

    def _longer(self, expected: dict[Any, Any], found: dict[Any, Any]) -> float:
        """A common factor of all gradients that 16 bits do not explain; 0 where there is none."""
        emulated, kind = self._in_16_bits, self._narrow
        if emulated is None or kind is None or self._changed:
            return 0.0
        apart = gain(expected, found) - gain(expected, emulated.gradients)
        return apart if abs(apart) > GAIN * EPSILON[kind] else 0.0

    def _differs_exactly(self) -> dict[str, Distance]:
        """Rows that differ in FP64 where nothing but rounding may."""
        plan = Plan(t for t in self.plan.techniques if self._lossless(t))
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
        allowed = RoundingNoise({}, EXACT if steady else EXACT_NARROW)
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

    def _lossless(self, technique: Technique) -> bool:
        """Whether all it claims is within rounding, apart from statistics and draws."""
        at = replace(self.at, drawn=False, batch_norm=False, linear=True, device="cpu")
        return all(claim.level <= Level.ROUNDING for claim in technique.claims(at))

    def _proof_of(self, technique: Technique) -> list[Comparison]:
        """A row of its own for a technique that others' claims would hide."""
        if technique.proof == "without" and len(self.plan.techniques) > 1:
            return [self._without(technique)]
        own = weakest(technique.claims(replace(self.at, drawn=False)))["gradients"][0]
        parts = any(_runs_in_parts(Plan([technique]), batch) for batch in self.data)
        if technique.proof == "alone" and own > Level.ROUNDING and parts:
            return [self._in_parts(technique)]
        return []

    def _in_parts(self, technique: Technique) -> Comparison:
        """Parts where BatchNorm trains: the loss splits, and parts run as in a plain loop."""
        alone = Plan([technique])

        def frozen(side: Any) -> Any:
            for module in side.model.modules():
                if is_normalization(module):
                    module.eval()
            return side

        whole = self._exactly(lambda: frozen(self._like_plain(wide=True)))
        parts = self._exactly(lambda: frozen(self._make_planned(alone, wide=True)))
        loop = self._exactly(lambda: self._in_a_loop(alone, wide=True))
        by_plan = self._exactly(lambda: self._make_planned(alone, wide=True))
        if whole is None or parts is None or loop is None or by_plan is None:
            why = "not compared: the step does not run in FP64"
            return Comparison(technique.name, Level.ROUNDING, Level.UNPROVEN, None, why=why)
        allowed = RoundingNoise({}, EXACT if not whole.narrowed else EXACT_NARROW)
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
        return Comparison(
            technique.name, Level.ROUNDING, level, worst.relative, worst.bound, why, worst.name
        )

    def _without(self, technique: Technique) -> Comparison:
        """All that training leaves behind, with and without one technique of the plan."""
        blurred = [t.name for t in self.plan.techniques if t.rounds_saved and t is not technique]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoEffectWarning)  # said once
            without = self._train_by(self.plan.without(technique.name, *blurred))
            found = self._train_by(self.plan.without(*blurred)) if blurred else self.found
        on_cpu = next(iter(self.planned.named.values())).is_cpu
        claim = Level.EQUAL if on_cpu else Level.ROUNDING
        merged = RoundingNoise({}, max(noise.relative for noise in self._noise.values()))
        seen = distance(without.all(), found.all(), merged, ROUNDING_MULTIPLE)
        level = Level.EQUAL if seen.equal else Level.ROUNDING if seen.within else Level.LOSSY
        if without.streams != found.streams:
            level = Level.LOSSY
        return Comparison(technique.name, claim, level, seen.relative, seen.bound, "", seen.name)

    def _train_by(self, plan: Plan) -> Any:
        """By another plan, from the same loss scale on."""
        side = self._make_planned(plan)
        if side.scale is not None:
            assert self.planned.scale is not None
            side.scale.copy_(self.planned.scale)
        return side.train(self.data)

    def _suspected(self, row: Comparison) -> Comparison:
        if row.found is Level.UNPROVEN or row.why.startswith("plain training gives"):
            return row
        if self.split is not None and self.split.splits is False:
            return replace(row, why=self.split.why)
        made = suspicion(row, self.plan)
        where = f"{row.tensor}: " if row.tensor else ""
        return replace(made, why=where + made.why)


def _of_squares(
    state: dict[Any, Any], gradients: dict[Any, Any], near: dict[str, RoundingNoise]
) -> RoundingNoise:
    """Bound of optimizer state whose gradient is within its bound: a square, about twice."""
    norms: dict[Any, float] = {}
    for key, held in state.items():
        gradient = gradients.get(key[0])
        scale = 0.0 if gradient is None else float(gradient.double().norm())
        if scale and held.is_floating_point() and held.dim():
            bound = near["gradients"].bound(key[0], scale, NEAR_MULTIPLE, NEAR_SPREAD) / scale
            norms[key] = (2 + bound) * bound * float(held.double().norm()) / NEAR_MULTIPLE
    return RoundingNoise(norms)


def _within(seen: Distance, bound: float | None) -> bool:
    return seen.relative < float("inf") and (bound is None or seen.relative <= bound)


def _is_cut(plan: Plan, batch: Any) -> bool:
    cuts = any(t.examples_together(batch) is not None for t in plan.techniques)
    return cuts and plan.examples_together(batch) < (examples_of(batch) or 0)


def _runs_in_parts(plan: Plan, batch: Any) -> bool:
    size = plan.examples_at_once(batch)
    return size is not None and size < (examples_of(batch) or 0)


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


def prove(
    *given: Any, near: float | None = None, lossy: float | None = None
) -> tuple[Proof, list[Comparison]]:
    """Train both sides and compare them; again, if need be, with kernels whose draws show."""
    made = Proof(*given)
    with ExitStack() as opened:
        if made.expected.hidden is not None:
            opened.enter_context(open_kernels())
            made.rewind()
            made = Proof(*given)
        made.bounds = {Level.NEAR: near, Level.LOSSY: lossy}
        return made, made.rows()
