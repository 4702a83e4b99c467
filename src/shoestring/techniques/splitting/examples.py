"""A few examples through the model: whole and in parts, their losses and their gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ...trace.attributes import assigned
from ...trace.batches import map_tensors
from ...trace.blocks import is_normalization
from ...trace.hooked import copy_gradient_hooks
from ...trace.split import cut, examples_of
from ...trace.streams import kept_streams
from ...trace.tracing import Loss
from ...trace.wide import staying_wide, wide_batch, wide_model
from ..base import LossUnits
from . import SplitFound
from .bounds import InBounds
from .candidates import (
    changed,
    ends_the_process,
    labels,
    masks,
    named,
    none_ignored,
    repeated,
)
from .draws import Slices, open_kernels
from .units import EXAMPLES, SUM, Units, weights
from .values import TOLERANCES, Failed, Values, Watched

CUTS = (1, 2)
"""Where a few examples are cut in two; a cut that does not run (of one example) is left out."""
GRADIENT_ELEMENTS = 2**20
"""Of parameters whose gradients are compared."""


Left = dict[tuple[str, str], Any]
"""Path of a module and name of an attribute → what a pass left there."""


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
        self.wide, self._model, self._loss, self._cuts = wide, model, loss, cuts
        self._examples = examples_of(batch) or 0
        self._batch = wide_batch(batch) if wide else in_type_of(model, batch)
        self._seen: Watched | None = None
        self._open = self._needs_gradients = self._backward = False
        self._left: Left = {}
        """By the last run."""

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
        if self._backward:  # what it leaves there, no weight reaches
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
        if self._left and (carried := self._carried()):
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
        mean = "the loss is a sum" if units == SUM else f"the loss is a mean over {named(units)}"
        return SplitFound(units, True, f"{mean}: tested on {self._examples} examples")

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
                    float(self._run(part, Slices(draws, one, self._examples)))
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
            value = float(self._run(batch, seen))
        except Failed as error:
            if self._needs_gradients or error.unclear:
                raise
            self._needs_gradients = True  # a penalty, an inner step: the loss takes gradients
            return self._whole(batch)
        if seen.hidden is not None and not self._open:
            self._open = True  # repeat with kernels whose draws can be cut
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
            self._run(first, Slices(draws, (0, size), self._examples))
            left = self._left
            alone = float(self._run(second, rows))
        except Failed:  # a part of this size does not run, so it reads nothing
            return None
        for key, value in left.items():
            try:
                after = float(self._run(second, rows, given={key: value}))
            except Failed:
                after = math.inf
            if not math.isclose(alone, after, rel_tol=1e-9) and not math.isnan(alone):
                return ".".join(filter(None, key))
        return None

    def _run(
        self,
        batch: Any,
        mode: Any,
        parameters: Sequence[torch.Tensor] | None = None,
        given: Left | None = None,
    ) -> Any:
        """The loss, or with `parameters` its gradients; on a copy that is thrown away.

        The copy has the attributes that are `given`.
        """
        rewind = kept_streams()
        try:
            with self._copy() as (model, memo), self._context(), mode:
                for (path, name), value in (given or {}).items():
                    model.get_submodule(path).__dict__[name] = value
                before = [dict(vars(module)) for module in model.modules()]
                gradients = _gradients(model)
                with torch.set_grad_enabled(self._needs_gradients or parameters is not None):
                    value = self._loss(model, map_tensors(torch.clone, batch))
                self._backward = self._backward or _gradients(model) != gradients
                self._left = assigned(model, before)
                if not isinstance(value, torch.Tensor) or value.numel() != 1:
                    raise Failed("the loss is not one number")
                if parameters is None:
                    return value.detach()
                wanted = [memo[id(p)] for p in parameters]
                return torch.autograd.grad(value, wanted, allow_unused=True)
        except Failed:
            raise
        except torch.OutOfMemoryError as error:
            raise Failed("out of memory", unclear=True) from error
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise Failed(first) from error
        finally:
            rewind()

    @contextmanager
    def _context(self) -> Iterator[None]:
        wide: Any = staying_wide() if self.wide else nullcontext()
        guarded: Any = InBounds() if next(self._model.parameters()).is_cuda else nullcontext()
        with open_kernels() if self._open else nullcontext(), wide, guarded:
            yield

    @contextmanager
    def _copy(self) -> Iterator[tuple[nn.Module, dict[int, Any]]]:
        """All that is not a parameter is copied; parameters are too where they become FP64."""
        memo: dict[int, Any] = {}
        if self.wide:
            made = wide_model(self._model, memo)
        else:
            memo = {id(p): p for p in self._model.parameters()}
            made = copy.deepcopy(self._model, memo)
        held = ((p, memo.get(id(p), p)) for p in self._model.parameters())
        copy_gradient_hooks(held)
        for module in made.modules():
            if is_normalization(module):
                module.eval()
        yield made, memo

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
        whole = self._run(self._batch if batch is None else batch, seen, chosen)
        totals: list[Any] = [None] * len(chosen)
        start = 0
        for part, weight in zip(parts, weights(units, parts), strict=True):
            stop = start + (examples_of(part) or 0)
            if float(weight):
                made = self._run(part, Slices(seen.draws, (start, stop), self._examples), chosen)
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


def _gradients(model: nn.Module) -> list[tuple[int, int] | None]:
    """Which tensors they are, and how often they were written."""
    held = (p.grad for p in model.parameters())
    return [None if g is None else (id(g), g._version) for g in held]


def in_type_of(model: nn.Module, batch: Any) -> Any:
    """In 16 bits where the model is: a step in 16 bits casts its batch, too."""
    narrow = (torch.float16, torch.bfloat16)
    kinds = {p.dtype for p in model.parameters()} & set(narrow)
    if len(kinds) != 1:
        return batch
    kind = kinds.pop()
    return map_tensors(lambda t: t.to(kind) if t.dtype is torch.float32 else t, batch)
