"""Bounds of 16 bits: how far a plan that claims "near" may be from plain training.

A plan in bf16 differs from plain training by far more than FP32's rounding. How much is right for
this very step is measured: plain training is emulated with every result rounded to 16 bits, and
its distance from FP64 is the noise that the plan may have, too. Five things widen it:

    parts that are added up      a loop over the plan's parts, emulated as well
    Adam and its like            a move of each parameter, where its gradient is mostly rounding
    squares of gradients         (1 + e)² - 1 for a gradient within e
    later steps                  a plain run whose gradients are stirred within their bounds
    bounds of techniques         as they state them
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from ..errors import InputError
from ..techniques.claims import MOVED, Level
from ..techniques.distance import (
    NEAR_MULTIPLE,
    NEAR_SPREAD,
    ROUNDING_MULTIPLE,
    RoundingNoise,
    longer,
)
from ..techniques.emulated import EPSILON
from .noise import noises, trained_in_bits
from .pair import Pair, runs_in_parts
from .sides import Plain, Trained, plain_name


class Stirred(Plain):
    """Plain training whose gradients are changed at random, by as much as they may differ."""

    MULTIPLE = ROUNDING_MULTIPLE / NEAR_MULTIPLE
    """Of `noise`; what comes of it is multiplied by the latter."""

    noise: RoundingNoise

    def run(self, batch: Any) -> torch.Tensor:
        """A plain step with other gradients."""
        random = torch.Generator().manual_seed(len(self.optimizer.state))
        names = {id(parameter): name for name, parameter in self.named.items()}

        def stir(optimizer: Any, args: Any, kwargs: Any) -> None:
            for parameter in self.model.parameters():
                gradient = parameter.grad
                if gradient is None or gradient.is_sparse or not gradient.numel():
                    continue
                scale = float(gradient.double().norm())
                bound = self.noise.bound(names[id(parameter)], scale, self.MULTIPLE)
                drawn = torch.randn(gradient.shape, generator=random).to(gradient)
                gradient.add_(drawn, alpha=bound / gradient.numel() ** 0.5)

        handle = self.optimizer.register_step_pre_hook(stir)
        try:
            return super().run(batch)
        finally:
            handle.remove()


class NearBounds:
    """Of one pair, beside these tensors of plain training."""

    def __init__(self, pair: Pair, expected: dict[str, dict[Any, Any]]) -> None:
        self._pair, self._expected = pair, expected
        self._in_16_bits: Trained | None = None

    @cached_property
    def bounds(self) -> dict[str, RoundingNoise]:
        """For each thing that is compared; measured when one is more than rounding apart."""
        expected = self._expected
        near = self._near()
        if not self._pair.at.linear:
            near["parameters"] = near["parameters"] | self._moves(expected["parameters"])
            by_chance = self._moves_by_chance(expected["gradients"], near["gradients"])
            near["parameters"] = near["parameters"] | by_chance
            squares = of_squares(expected["optimizer state"], expected["gradients"], near)
            near["optimizer state"] = near["optimizer state"] | squares
            for what, noise in self._stirred(near["gradients"]).items():
                near[what] = near[what] | noise
        return self._with_stated(near, expected["parameters"])

    def longer(self, expected: dict[Any, Any], found: dict[Any, Any]) -> float:
        """A common factor of all gradients that 16 bits do not explain; 0 where there is none."""
        kind = self._pair.narrow
        if self._in_16_bits is None or kind is None:
            return 0.0
        return longer(expected, found, self._gradients_in_16_bits, EPSILON[kind])

    def _gradients_in_16_bits(self, seed: int | None) -> dict[Any, Any]:
        assert self._in_16_bits is not None
        made = self._in_16_bits if seed is None else self._emulated(seed, self._pair.data[:1])
        return (made or self._in_16_bits).gradients

    def _emulated(self, seed: int | None, data: list[Any]) -> Trained | None:
        pair = self._pair
        assert pair.narrow is not None
        scale = 1.0 if pair.planned.scale is None else float(pair.planned.scale)
        return trained_in_bits(pair.like_plain(wide=False), pair.narrow, data, seed, scale)

    def _near(self) -> dict[str, RoundingNoise]:
        """The effect of the plan's 16 bits on a plain step, and plain rounding."""
        pair = self._pair
        kind = pair.narrow
        if kind is None:
            return dict(pair.noise)
        found = {what: RoundingNoise({}, EPSILON[kind] / 2) for what in pair.noise}
        scale = 1.0 if pair.planned.scale is None else float(pair.planned.scale)
        for seed in (None, 0):  # two samples: one number's noise can be zero by luck
            made = None if pair.exact is None else self._emulated(seed, pair.data)
            if made is None or pair.exact is None:
                return {what: RoundingNoise({}, EPSILON[kind]) for what in pair.noise}
            self._in_16_bits = self._in_16_bits or made
            also = noises(pair.exact, made)
            found = {what: found[what] | also[what] for what in found}
        if any(runs_in_parts(pair.plan, batch) for batch in pair.data):
            # Sums of parts round, too; beside exact parts, so that only rounding counts.
            exact = pair.exactly(lambda: pair.in_a_loop(pair.plan, wide=True))
            loop = pair.in_a_loop(pair.plan, wide=False)
            made = trained_in_bits(loop, kind, pair.data, scale=scale)
            if exact is not None and made is not None:
                also = noises(exact, made)
                found = {what: found[what] | also[what] for what in found}
        return {what: pair.noise[what] | found[what] for what in pair.noise}

    def _stirred(self, noise: RoundingNoise) -> dict[str, RoundingNoise]:
        """The effect of gradients that differ by rounding: the next ones are of other parameters,
        since a parameter whose gradient is near zero moved the other way."""
        pair = self._pair
        pair.rewind()
        side = Stirred(*pair.trained)
        side.draws, side.noise = pair.expected.draws, noise
        try:
            made = side.train(pair.data)
        except InputError:  # its loss is not finite
            return {}
        found = noises(pair.expected, made)
        return {what: found[what] for what in MOVED}

    def _with_stated(
        self, near: dict[str, RoundingNoise], after: dict[Any, Any]
    ) -> dict[str, RoundingNoise]:
        """With the bounds that techniques state themselves."""
        stated: dict[str, float] = {}
        for technique in self._pair.plan.techniques:
            for claim in technique.claims(self._pair.at):
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
        before = {plain_name(n): p for n, p in self._pair.trained[0].named_parameters()}
        held = {n: self._pair.planned.as_held(n, before[n]) for n in after}
        moved = RoundingNoise.between(after, held)
        return RoundingNoise({n: norm / NEAR_MULTIPLE for n, norm in moved.norms.items()})

    def _moves_by_chance(self, gradients: dict[Any, Any], noise: RoundingNoise) -> RoundingNoise:
        """A gradient that is all rounding moves its parameter by whole steps, in any direction:
        an attention's key bias, whose gradient is zero, stays where it is in FP32 alone."""
        model, optimizer, _ = self._pair.trained
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
                farthest = (
                    2 * len(self._pair.data) * rates[id(parameter)] * parameter.numel() ** 0.5
                )
                norms[plain_name(name)] = farthest / NEAR_MULTIPLE
        return RoundingNoise(norms)


def of_squares(
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
