"""Both sides of a certificate, compared row by row.

    plain training     loss, gradients, … ─┐
                                           ├─ 3e-7 apart; "within rounding" allows 2e-6 here: ok
    by the plan        loss, gradients, … ─┘

The claim for a row says how far apart it may be (`Proof._row`):

    equal              no bit differs
    within rounding    a multiple of what rounding does to plain training, measured beside FP64
    near               about as far as plain training emulated in 16 bits (`near.py`)
    lossy              any distance, unless the user set a bound

Mistakes can be smaller than rounding, so the lossless parts of the plan also train in FP64, where
nothing rounds (`_differs_exactly`). A technique that others would hide has a row of its own
(`_proof_of`): the plan beside the plan without it, or the technique alone.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import Any

from ..errors import NoEffectWarning
from ..techniques.base import Technique
from ..techniques.claims import WHAT, Claims, Level, weakest
from ..techniques.distance import (
    EXACT,
    EXACT_NARROW,
    NEAR_LARGEST,
    NEAR_MULTIPLE,
    NEAR_SPREAD,
    ROUNDING_MULTIPLE,
    Distance,
    RoundingNoise,
    distance,
    total,
)
from ..techniques.plan import Plan
from ..techniques.splitting.draws import open_kernels
from ..trace.blocks import is_normalization
from .certificate import Comparison
from .claims import claims, suspicion
from .near import NearBounds
from .noise import noises, trained_in_bits
from .pair import Pair, runs_in_parts


class Proof:
    """The rows of one pair."""

    def __init__(self, pair: Pair, bounds: dict[Level, float | None]) -> None:
        self.pair, self._bounds = pair, bounds
        """`bounds` are the user's own, by what is claimed."""
        self._changed = False
        """A plain copy had to be changed to have comparable gradients."""
        self._alike_exactly: frozenset[str] = frozenset()
        """Rows that do not differ in FP64."""
        self.claims = self._claims()

    def _claims(self) -> Claims:
        if self.pair.against is None:
            return claims(self.pair.plan, self.pair.at)
        made: Claims = dict.fromkeys(WHAT, (Level.ROUNDING, ""))
        made["random stream"] = Level.EQUAL, ""
        return made

    def rows(self) -> list[Comparison]:
        """Everything that is compared, in the order of a certificate."""
        expected = self.pair.planned.expected(self.pair.expected)
        alike = self.pair.like_plain(wide=False)
        self._changed = self.pair.planned.prepare_plain(alike)
        if self._changed:
            gradients = alike.train(self.pair.data[:1]).gradients
            expected["gradients"] = {
                n: self.pair.planned.as_held(n, g) for n, g in gradients.items()
            }
        del alike
        found = self.pair.found.rows()
        extra = []
        if self.pair.against is not None:
            extra = _unshared(expected, found)
        broken_exactly = self._differs_exactly()
        self._near = NearBounds(self.pair, expected)
        made = []
        for what in WHAT:
            if what == "random stream":
                made.append(self._streams())
                continue
            row = self._row(what, expected[what], found[what])
            if not row.ok and row.claim is Level.ROUNDING and what in self._alike_exactly:
                self.pair.noise[what] |= self._another_noise[what]
                row = self._row(what, expected[what], found[what])
            made.append(self._judged(row, broken_exactly.get(what)))
        made += extra
        if self.pair.against is None:
            for technique in self.pair.plan.techniques:
                made += self._proof_of(technique)
        return [row if row.ok else self._suspected(row) for row in made]

    def _row(self, what: str, expected: dict[Any, Any], found: dict[Any, Any]) -> Comparison:
        claim, why = self.claims[what]
        if not expected and not found:
            return Comparison(what, claim, Level.NONE, None)
        seen = distance(expected, found, self.pair.noise[what], ROUNDING_MULTIPLE)
        if seen.undefined:
            why = "plain training gives NaN or infinity: there is nothing to compare with"
            return Comparison(what, claim, Level.LOSSY, seen.relative, 0.0, why, seen.name)
        if seen.equal:
            return Comparison(what, claim, Level.EQUAL, 0.0, why="")
        if seen.within or claim <= Level.ROUNDING:
            level = Level.ROUNDING if seen.within else Level.LOSSY
            return Comparison(what, claim, level, seen.relative, seen.bound, why, seen.name)
        set_by_user = self._bounds.get(claim)
        if claim is Level.LOSSY or set_by_user is not None:
            bound = set_by_user
            within = _within(seen, bound)
        else:
            seen = distance(expected, found, self._near.bounds[what], NEAR_MULTIPLE, NEAR_SPREAD)
            bound, within = seen.bound, seen.within
            comparable = what == "gradients" and not self._changed
            longer = self._near.longer(expected, found) if comparable else 0.0
            whole = total(expected, found) if what == "gradients" else 0.0
            if whole > NEAR_LARGEST:
                why = f"16 bits change all gradients together by {whole:.0%}"
                return Comparison(what, claim, Level.LOSSY, whole, NEAR_LARGEST, why)
            if longer:
                why = f"all gradients together are {1 + longer:.3f} times as long as in 16 bits"
                return Comparison(what, claim, Level.LOSSY, abs(longer), 0.0, why)
        level = Level.NEAR if within and claim is Level.NEAR else Level.LOSSY
        return Comparison(what, claim, level, seen.relative, bound, why, seen.name)

    def _differs_exactly(self) -> dict[str, Distance]:
        """Rows that differ in FP64 where nothing but rounding may."""
        plan = Plan(t for t in self.pair.plan.techniques if self._lossless(t))
        promised = claims(plan, replace(self.pair.at, linear=True, device="cpu"))
        checked = [what for what in self.pair.noise if promised[what][0] <= Level.ROUNDING]
        if self.pair.against is not None:
            checked = list(self.pair.noise)
            compiled = any(hasattr(m, "_orig_mod") for m in self.pair.own[0].modules())
            if compiled:  # modes in which all stays FP64 take the compiler away
                return {}
        elif plan == self.pair.plan and all(
            promised[what][0] is Level.EQUAL for what in self.pair.noise
        ):
            return {}  # as it is, no bit may differ
        if self.pair.exact is None or not checked:
            return {}
        again = self.pair.exactly(lambda: self.pair.make_planned(plan, wide=True))
        if again is None:
            return {}
        steady = not (self.pair.exact.narrowed or again.narrowed)
        if not steady or not self._even_optimizer():
            checked = [what for what in checked if what in ("loss", "gradients", "buffers")]
        self.pair.found.unmatched = self.pair.found.unmatched or again.unmatched
        expected, found = self.pair.exact.rows(), again.rows()
        if self.pair.against is not None:
            _unshared(expected, found)
        allowed = RoundingNoise({}, EXACT if steady else EXACT_NARROW)
        apart = {what: distance(expected[what], found[what], allowed, 1.0) for what in checked}
        broken = {what: d for what, d in apart.items() if not d.equal and not d.within}
        self._alike_exactly = frozenset(apart.keys() - broken.keys())
        return broken

    @cached_property
    def _another_noise(self) -> dict[str, RoundingNoise]:
        """Another sample: one number whose terms cancel may round to what is exact, by luck."""
        side = self.pair.like_plain(wide=False)
        made = trained_in_bits(side, "fp32", self.pair.data, seed=0)
        if made is None or self.pair.exact is None:
            return self.pair.noise
        return noises(self.pair.exact, made)

    def _even_optimizer(self) -> bool:
        """Whether a gradient that is zero but for rounding, 1e-16 of others, moves nothing."""
        if self.pair.at.linear:
            return True
        added = (group.get("eps") for group in self.pair.own[1].param_groups)
        return all(isinstance(eps, float) and eps >= 1e-8 for eps in added)  # Adafactor has two

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
        if not row.ok and self.pair.at.drawn and self.pair.at.split and self.pair.found.unmatched:
            why = f"not compared: parts cannot share what {self.pair.found.unmatched} draws"
            row = replace(row, found=Level.UNPROVEN, why=why)
        return row

    def _streams(self) -> Comparison:
        claim, why = self.claims["random stream"]
        same = self.pair.expected.streams == self.pair.found.streams
        level = Level.EQUAL if same else Level.LOSSY
        return Comparison("random stream", claim, level, None, why="" if same else why)

    def _lossless(self, technique: Technique) -> bool:
        """Whether all it claims is within rounding, apart from statistics and draws."""
        at = replace(self.pair.at, drawn=False, batch_norm=False, linear=True, device="cpu")
        return all(claim.level <= Level.ROUNDING for claim in technique.claims(at))

    def _proof_of(self, technique: Technique) -> list[Comparison]:
        """A row of its own for a technique that others' claims would hide."""
        if technique.proof == "without" and len(self.pair.plan.techniques) > 1:
            return [self._without(technique)]
        own = weakest(technique.claims(replace(self.pair.at, drawn=False)))["gradients"][0]
        parts = any(runs_in_parts(Plan([technique]), batch) for batch in self.pair.data)
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

        whole = self.pair.exactly(lambda: frozen(self.pair.like_plain(wide=True)))
        parts = self.pair.exactly(lambda: frozen(self.pair.make_planned(alone, wide=True)))
        loop = self.pair.exactly(lambda: self.pair.in_a_loop(alone, wide=True))
        by_plan = self.pair.exactly(lambda: self.pair.make_planned(alone, wide=True))
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
        blurred = [
            t.name for t in self.pair.plan.techniques if t.rounds_saved and t is not technique
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoEffectWarning)  # said once
            without = self.pair.train_by(self.pair.plan.without(technique.name, *blurred))
            found = (
                self.pair.train_by(self.pair.plan.without(*blurred)) if blurred else self.pair.found
            )
        on_cpu = next(iter(self.pair.planned.named.values())).is_cpu
        claim = Level.EQUAL if on_cpu else Level.ROUNDING
        merged = RoundingNoise({}, max(noise.relative for noise in self.pair.noise.values()))
        seen = distance(without.all(), found.all(), merged, ROUNDING_MULTIPLE)
        level = Level.EQUAL if seen.equal else Level.ROUNDING if seen.within else Level.LOSSY
        if without.streams != found.streams:
            level = Level.LOSSY
        return Comparison(technique.name, claim, level, seen.relative, seen.bound, "", seen.name)

    def _suspected(self, row: Comparison) -> Comparison:
        if row.found is Level.UNPROVEN or row.why.startswith("plain training gives"):
            return row
        if self.pair.split is not None and self.pair.split.splits is False:
            return replace(row, why=self.pair.split.why)
        made = suspicion(row, self.pair.plan)
        where = f"{row.tensor}: " if row.tensor else ""
        return replace(made, why=where + made.why)


def _within(seen: Distance, bound: float | None) -> bool:
    return seen.relative < float("inf") and (bound is None or seen.relative <= bound)


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
) -> tuple[Pair, list[Comparison]]:
    """Train both sides and compare them; again, if need be, with kernels whose draws show."""
    bounds = {Level.NEAR: near, Level.LOSSY: lossy}
    pair = Pair(*given)
    with ExitStack() as opened:
        if pair.expected.hidden is not None:
            opened.enter_context(open_kernels())
            pair.rewind()
            pair = Pair(*given)
        return pair, Proof(pair, bounds).rows()
