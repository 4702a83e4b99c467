"""A few examples through the model: whole and in parts, their losses and their gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import InputError
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
from .candidates import Targets, changed, ends_the_process, labels, masks, named, repeated
from .draws import Drawn, Slices, open_kernels
from .units import EXAMPLES, SUM, Units, weights

CUTS = (1, 2)
"""Where a few examples are cut in two; a cut that does not run (of one example) is left out."""
TOLERANCES = {
    torch.float64: 1e-7,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
}
"""Of the loss, relative, by the least precise type it is computed in."""
GRADIENT_ELEMENTS = 2**20
"""Of parameters whose gradients are compared."""


Left = dict[tuple[str, str], Any]
"""Path of a module and name of an attribute → what a pass left there."""


class _Watched(Drawn):
    """Records draws, types, and the targets of likelihoods with what they ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: Targets = []
        self.kinds: set[torch.dtype] = set()
        self.weighted = False
        self.reads = False
        """Python saw a number or a truth value, which may decide what runs."""

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Look at the arguments of likelihoods."""
        made = func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads = self.reads or args[0].is_floating_point() or args[0].dtype is torch.bool
        if isinstance(made, torch.Tensor) and not func.is_view and made.is_floating_point():
            self.kinds.add(made.dtype)
        if func._schema.name in ("aten::nll_loss_forward", "aten::nll_loss2d_forward"):
            target, weight, _, ignored = args[1:5]
            self.targets.append((target.detach().flatten().clone(), int(ignored)))
            self.weighted = self.weighted or weight is not None
        return made


class Failed(Exception):
    """The loss did not run; its message is the reason."""

    def __init__(self, message: str, *, unclear: bool = False) -> None:
        super().__init__(message)
        self.unclear = unclear
        """It says nothing of the loss: there was not enough memory, or nothing to compare."""


@dataclass(frozen=True)
class _Values:
    """Losses of a few examples, whole and in parts."""

    whole: float
    cuts: list[tuple[list[Any], list[float]]]
    """Parts and their losses, for each way to cut."""
    tolerance: float

    def split_by(self, units: str | Units) -> bool:
        """Whether the parts add up to the whole."""
        return all(self._adds_up(units, parts, each) for parts, each in self.cuts)

    def _adds_up(self, units: str | Units, parts: list[Any], each: list[float]) -> bool:
        try:
            shares = [float(w) for w in weights(units, parts)]
        except (InputError, IndexError, RuntimeError):
            return False
        terms = [w * v for w, v in zip(shares, each, strict=True) if w]  # no unit: 0/0
        scale = max(abs(self.whole), *(abs(t) for t in terms), 1e-30)
        return abs(sum(terms) - self.whole) <= self.tolerance * scale


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
        self._seen: _Watched | None = None
        self._open = self._needs_gradients = False
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
        if not math.isfinite(values.whole):  # none of these examples has a label
            raise Failed(f"the loss of {self._examples} examples is {values.whole}", unclear=True)
        if known is not None:
            kept: list[Any] = [known] if values.split_by(known) else []
        else:
            read = labels(self._batch, self._seen.targets)
            kept = self._confirmed([*read, EXAMPLES, SUM], values, seen=read)
            if not kept or kept[0] not in read:  # written by hand: masks, padding by its number
                kept = self._confirmed([EXAMPLES, SUM, *masks(self._batch, self._model)], values)
            kept = self._also_repeated(kept)
        if not kept:
            two = bool(known is None and read) and values.split_by(EXAMPLES)
            two = two and bool(self._also_repeated([EXAMPLES]))
            why = self._reason(self._seen, read[0] if two else None)
            return SplitFound(EXAMPLES, False, why)
        if self._left and (carried := self._carried()):
            why = f"each part reads what the one before it left in {carried}"
            return SplitFound(EXAMPLES, False, why)
        units = kept[0]
        if gradients and not self._gradients_agree(values.cuts[-1][0], units):
            why = "its parts' losses add up, but their gradients do not"
            return SplitFound(EXAMPLES, False, why)
        mean = "the loss is a sum" if units == SUM else f"the loss is a mean over {named(units)}"
        return SplitFound(units, True, f"{mean}: tested on {self._examples} examples")

    def _confirmed(
        self, candidates: list[str], values: _Values, seen: Sequence[str] = ()
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

    def _also_repeated(self, candidates: list[str]) -> list[str]:
        """Those by which a batch that has one example several times adds up, too.

        Few examples have few labels of a kind: a loss that counts them shows only so.
        """
        try:
            other = self._values(repeated(self._batch, self._examples)) if candidates else None
        except (Failed, IndexError, RuntimeError):  # not a batch that the model takes
            return candidates
        if other is None or not math.isfinite(other.whole):
            return candidates
        return [c for c in candidates if other.split_by(c)]

    def _reason(self, seen: _Watched, labels: str | None) -> str:
        if seen.weighted:
            return "class weights in the loss: a mean over weights, not over labels"
        if labels is not None:
            return (
                f"one term is a mean over {named(labels)}, another over examples, which agree "
                "only while no label is ignored; if none ever is, say units='examples'"
            )
        return (
            "the loss is neither a mean nor a sum over its examples: it compares them with each "
            "other (contrastive), or divides by something of the whole batch"
        )

    # -- values --------------------------------------------------------------------------------

    def _values(self, batch: Any) -> _Values:
        whole, draws = self._whole(batch)
        assert self._seen is not None
        kind = max(self._seen.kinds & TOLERANCES.keys(), key=lambda k: TOLERANCES[k],
                   default=torch.float32)  # fmt: skip
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
        return _Values(whole, cuts, TOLERANCES[kind])

    def _whole(self, batch: Any) -> tuple[float, Any]:
        seen = _Watched()
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
                with torch.set_grad_enabled(self._needs_gradients or parameters is not None):
                    value = self._loss(model, map_tensors(torch.clone, batch))
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

    def _gradients_agree(self, parts: list[Any], units: str | Units) -> bool:
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
        seen = _Watched()
        whole = self._run(self._batch, seen, chosen)
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


def in_type_of(model: nn.Module, batch: Any) -> Any:
    """In 16 bits where the model is: a step in 16 bits casts its batch, too."""
    narrow = (torch.float16, torch.bfloat16)
    kinds = {p.dtype for p in model.parameters()} & set(narrow)
    if len(kinds) != 1:
        return batch
    kind = kinds.pop()
    return map_tensors(lambda t: t.to(kind) if t.dtype is torch.float32 else t, batch)
