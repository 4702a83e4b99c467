"""Whether a loss splits: a few examples run whole and in parts, and are compared.

Four examples with 2, 1, 3 and 2 labels, cut after the first:

    whole                       loss 2.0
    parts    1 | 2 3 4          losses 1.1 and 2.3
    by examples                 1/4 · 1.1 + 3/4 · 2.3 = 2.0    fits
    by labels                   2/8 · 1.1 + 6/8 · 2.3 = 2.0    fits as well

Another cut tells these two apart. A candidate must also fit where the labels are changed, where one
example is there several times, and for gradients. The one that is left is the unit of the loss; if
none is, the result says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...trace.split import cut, examples_of
from ...trace.tracing import Loss
from ...trace.wide import wide_batch
from ..base import LossUnits
from . import SplitFound
from .candidates import (
    changed,
    ends_the_process,
    labels,
    masks,
    named,
    none_ignored,
    repeated,
)
from .draws import Slices
from .runs import CopyRuns, in_type_of
from .units import EXAMPLES, SUM, Units, weights
from .values import TOLERANCES, Bent, Failed, Values, Watched

CUTS = (1, 2)
"""Where a few examples are cut in two; a cut that does not run (of one example) is left out."""
TIMES = 2.0, 8.0, 32.0, 128.0
"""Factors to the weights, so that examples are told apart as after training."""
COARSE = 1e-3
"""Relative error that such weights may make of FP32's rounding."""
GRADIENT_ELEMENTS = 2**20
"""Of parameters whose gradients are compared."""


class ExampleRuns:
    """The model on a few examples, in FP64 or as it is."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Loss,
        *,
        wide: bool,
        cuts: tuple[int, ...] = CUTS,
    ) -> None:
        self._model, self._cuts = model, cuts
        self._runs = CopyRuns(model, loss, wide=wide)
        self._examples = examples_of(batch) or 0
        self._batch = wide_batch(batch) if wide else in_type_of(model, batch)
        self._seen: Watched | None = None

    @property
    def runs(self) -> bool:
        """All examples together ran."""
        return self._seen is not None

    @property
    def reads(self) -> bool:
        """Python saw values of tensors."""
        return self._seen is not None and self._seen.reads

    def found(self, known: LossUnits | None = None, *, gradients: bool) -> SplitFound:
        """The units by which it splits, or that there are none."""
        values = self._values(self._batch)
        assert self._seen is not None
        if self._runs.backward:  # what it leaves there, no weight reaches
            why = "the loss runs a backward pass of the model itself"
            return SplitFound(EXAMPLES, False, why)
        if not math.isfinite(values.whole):  # none of these examples has a label
            raise Failed(f"the loss of {self._examples} examples is {values.whole}", unclear=True)
        if known is not None:
            kept: list[Any] = [known] if values.split_by(known) else []
            read = []
        else:
            read = labels(self._batch, self._seen.targets)
            kept = self._confirmed([*read, EXAMPLES, SUM], values, seen=read)
            if not kept or kept[0] not in read:  # written by hand: masks, padding by its number
                kept = self._confirmed([EXAMPLES, SUM, *masks(self._batch, self._model)], values)
            kept = self._also_repeated(kept)
        if not kept:
            why = self._reason(self._seen, read)
            return SplitFound(EXAMPLES, False, why)
        if self._runs.left and (carried := self._carried()):
            why = f"each part reads what the one before it left in {carried}"
            return SplitFound(EXAMPLES, False, why)
        units = kept[0]
        if gradients and not all(
            self._gradients_agree(self._cut_as(values, batch), units, batch)
            for batch in (self._batch, *self._told_apart(units if units in read else None))
        ):
            why = "its parts' losses add up, but their gradients do not"
            if read and self._two_means(read[0]):
                why = self._reason(self._seen, read)
            return SplitFound(EXAMPLES, False, why)
        if self._seen.compares and not self._splits_elsewhere(units):
            why = "with larger weights its parts do not add up: a threshold decides what counts"
            return SplitFound(EXAMPLES, False, why)
        if self._seen.bends and (gradients or self._runs.wide) and not self._splits_bent(units):
            why = "a mean over the batch is clamped, or its sign taken: a part's may be on one side"
            return SplitFound(EXAMPLES, False, why)
        mean = "the loss is a sum" if units == SUM else f"the loss is a mean over {named(units)}"
        return SplitFound(units, True, f"{mean}: tested on {self._examples} examples")

    def _splits_elsewhere(self, units: LossUnits) -> bool:
        """Whether it splits after training, too, as far as a step of other weights can tell.

        A mean over the losses above a threshold is one over all examples as long as all are.
        """
        for self._runs.times in TIMES:
            try:
                values = self._values(self._batch)
            except Failed:  # nothing to compare
                continue
            tolerance = values.tolerance if self._runs.wide else max(values.tolerance, COARSE)
            values = replace(values, tolerance=tolerance)
            if math.isfinite(values.whole) and not values.split_by(units):
                return False
        self._runs.times = 1.0
        return True

    def _splits_bent(self, units: LossUnits) -> bool:
        """Whether it splits where a function of means is linear on each side of a point alone.

        Such a function is of the same shape in the whole batch and in each part; all are bent.
        """
        runs, seen = self._runs, list[Bent]()
        asked = runs.needs_gradients

        def watched(chosen: frozenset[int]) -> Callable[[], Bent]:
            return lambda: seen.append(Bent(chosen)) or seen[-1]  # type: ignore[func-returns-value]

        runs.needs_gradients = True  # to know what depends on parameters
        try:
            runs.within = watched(frozenset())
            self._values(self._batch)
            if len({len(one.shapes) for one in seen}) != 1:
                return True
            given = enumerate(zip(*(one.shapes for one in seen), strict=True))
            alike = frozenset(n for n, s in given if len(set(s)) == 1 and s[0] is not None)
            if not alike:
                return True
            runs.within = watched(alike)
            values = self._values(self._batch)
        except Failed:
            return True
        finally:
            runs.within, runs.needs_gradients = nullcontext, asked
        return not math.isfinite(values.whole) or values.split_by(units)

    def _confirmed(
        self, candidates: list[str], values: Values, seen: Sequence[str] = ()
    ) -> list[str]:
        """Those by which the parts add up, also where the tensors they count are changed.

        Those that the loss was `seen` to count by need no such proof where it cannot be had.
        """
        left = [c for c in candidates if values.split_by(c)]
        for candidate in left:
            if candidate in (EXAMPLES, SUM) or candidate not in left:
                continue
            if ends_the_process(self._batch, candidate):
                left = [c for c in left if c != candidate or c in seen]
                continue
            try:
                other = self._values(changed(self._batch, candidate))
            except Failed:  # the model cannot take such a batch, so it counts nothing by it
                left = [c for c in left if c != candidate]
                continue
            if math.isfinite(other.whole):
                left = [c for c in left if other.split_by(c)]
        return left

    def _also_repeated(self, candidates: list[str], batch: Any = None) -> list[str]:
        """Those by which a batch that has one example several times adds up, too.

        Few examples have few labels of a kind: a loss that counts them shows only so.
        """
        try:
            given = self._batch if batch is None else batch
            other = self._values(repeated(given, self._examples)) if candidates else None
        except (Failed, IndexError, RuntimeError):  # not a batch that the model takes
            return candidates
        if other is None or not math.isfinite(other.whole):
            return candidates
        return [c for c in candidates if other.split_by(c)]

    def _told_apart(self, labels: str | None) -> list[Any]:
        """A batch in which these labels and examples differ, if the model takes one."""
        if labels is None or ends_the_process(self._batch, labels):
            return []
        other = changed(self._batch, labels)
        try:
            return [other] if math.isfinite(self._values(other).whole) else []
        except Failed:
            return []

    @staticmethod
    def _cut_as(values: Values, batch: Any) -> list[Any]:
        """In two, as the last cut that ran."""
        at = examples_of(values.cuts[-1][0][0]) or 0
        return [cut(batch, 0, at), cut(batch, at, examples_of(batch) or 0)]

    def _two_means(self, labels: str) -> bool:
        """Whether it splits by examples where no label is ignored."""
        try:
            other = none_ignored(self._batch, labels)
            values = self._values(other)
            kept = values.split_by(EXAMPLES) and bool(self._also_repeated([EXAMPLES], other))
            return kept and self._gradients_agree(self._cut_as(values, other), EXAMPLES, other)
        except (Failed, IndexError, RuntimeError):  # not a batch that the model takes
            return False

    def _reason(self, seen: Watched, read: Sequence[str]) -> str:
        if seen.weighted:
            return "class weights in the loss: a mean over weights, not over labels"
        if read and self._two_means(read[0]):
            return (
                f"one term is a mean over {named(read[0])}, another over examples, which agree "
                "only while no label is ignored. If none ever is, say units='examples'; else make "
                "both sums over counts of the whole batch that come with it"
            )
        return (
            "the loss is neither a mean nor a sum over its examples: it compares them with each "
            "other (contrastive), or divides by something of the whole batch"
        )

    # -- values --------------------------------------------------------------------------------

    def _values(self, batch: Any) -> Values:
        whole, draws = self._whole(batch)
        assert self._seen is not None
        kind = max(self._seen.kinds & TOLERANCES.keys(), key=lambda k: TOLERANCES[k],
                   default=torch.float32)  # fmt: skip
        if not math.isfinite(whole):  # nothing to compare
            return Values(whole, [], TOLERANCES[kind])
        failed: Failed | None = None
        cuts = []
        for at in self._cuts:
            if at >= self._examples:
                continue
            rows = [(0, at), (at, self._examples)]
            parts = [cut(batch, *one) for one in rows]
            try:
                each = [
                    float(self._runs.run(part, Slices(draws, one, self._examples)))
                    for part, one in zip(parts, rows, strict=True)
                ]
            except Failed as error:
                failed = error
            else:
                cuts.append((parts, each))
        if not cuts:
            raise failed or Failed("a batch of two examples at least")
        return Values(whole, cuts, TOLERANCES[kind])

    def _whole(self, batch: Any) -> tuple[float, Any]:
        seen = Watched()
        try:
            value = float(self._runs.run(batch, seen))
        except Failed as error:
            if self._runs.needs_gradients or error.unclear:
                raise
            self._runs.needs_gradients = True  # a penalty, an inner step: the loss takes gradients
            return self._whole(batch)
        if seen.hidden is not None and not self._runs.open:
            self._runs.open = True  # repeat with kernels whose draws can be cut
            return self._whole(batch)
        if self._seen is None:
            self._seen = seen
        return value, seen.draws

    def _carried(self) -> str | None:
        """An attribute that holds a state by example: a part computes something else with it.

        Most attributes that a pass sets are results that nobody reads. Buffers, counters and lists
        are tested elsewhere.
        """
        draws, size = self._whole(self._batch)[1], self._examples // 2
        first, second = (cut(self._batch, n * size, (n + 1) * size) for n in (0, 1))
        rows = Slices(draws, (size, 2 * size), self._examples)
        try:
            self._runs.run(first, Slices(draws, (0, size), self._examples))
            left = self._runs.left
            alone = float(self._runs.run(second, rows))
        except Failed:  # a part of this size does not run, so it reads nothing
            return None
        for key, value in left.items():
            try:
                after = float(self._runs.run(second, rows, given={key: value}))
            except Failed:
                after = math.inf
            if not math.isclose(alone, after, rel_tol=1e-9) and not math.isnan(alone):
                return ".".join(filter(None, key))
        return None

    def _gradients_agree(self, parts: list[Any], units: str | Units, batch: Any = None) -> bool:
        """Of as many parameters as are small."""
        chosen: list[torch.Tensor] = []
        elements = 0
        for p in sorted(
            (p for p in self._model.parameters() if p.requires_grad), key=lambda p: p.numel()
        ):
            elements += p.numel()
            if chosen and elements > GRADIENT_ELEMENTS:
                break
            chosen.append(p)
        seen = Watched()
        whole = self._runs.run(self._batch if batch is None else batch, seen, chosen)
        totals: list[Any] = [None] * len(chosen)
        start = 0
        for part, weight in zip(parts, weights(units, parts), strict=True):
            stop = start + (examples_of(part) or 0)
            if float(weight):
                made = self._runs.run(
                    part, Slices(seen.draws, (start, stop), self._examples), chosen
                )
                for number, gradient in enumerate(made):
                    if gradient is not None:
                        term = gradient.double() * float(weight)
                        held = totals[number]
                        totals[number] = term if held is None else held + term
            start = stop
        tolerance = max(TOLERANCES.get(kind, 0.0) for kind in seen.kinds | {torch.float64})
        scale = max((float(g.double().norm()) for g in whole if g is not None), default=0.0)
        for expected, total in zip(whole, totals, strict=True):
            if expected is None and total is None:
                continue
            if expected is None or total is None:
                other = total if expected is None else expected
                if float(other.double().norm()) > tolerance * scale:
                    return False
                continue
            error = float((expected.double() - total).norm())
            own = float(expected.double().norm())
            if not error <= 10 * tolerance * max(own, 1e-3 * scale):
                return False
        return True
