"""Find by what units a loss splits, on a few real examples: whole, and in parts.

Nothing is believed that was not computed: candidates come from what the loss reads (the targets of
`nll_loss` and what it ignores), from masks in the batch, and from the two plain ones, examples and
sum. The one is chosen by which the parts add up to the whole, also after labels and masks were
changed so that the candidates differ. The model is a copy, or shares its parameters with one.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ...errors import InputError, UnprovenWarning
from ...trace.batches import tensors_of
from ...trace.fakes import is_fake
from ...trace.split import cut, examples_of
from ...trace.streams import rewound_streams
from ...trace.tracing import Loss
from ...trace.untouched import Untouched, hooks_of
from ..base import LossUnits, Setup
from ..draws import observed_by
from . import SplitFound
from .examples import CUTS, ExampleRuns
from .units import AUTO, EXAMPLES, Units, check_units
from .values import Failed

EXAMPLES_TRIED = 4
WIDE_BYTES = 2**28
"""Of a model that is copied to FP64 for this."""
MORE_ELEMENTS = 2**22
"""Of the examples on which units are tried again, forwards only."""
TOKEN_ELEMENTS = 2**8
"""One whole number stands for so many: it becomes a row of an embedding, and one of scores."""


def find_units(
    model: nn.Module, batch: Any, loss: Loss, *, light: bool = False, told: LossUnits = AUTO
) -> SplitFound:
    """By what a batch's parts must weigh, so that their losses add up to the batch's.

    A small model is copied to FP64, where what is left is not rounding. `light`: of a larger one no
    gradients are made, so that it needs less memory than a training step. The model, its streams
    and its gradients stay as they are. Normalizations use their running statistics: whether those
    may be of a part is another question.

    Units that the user has `told` are tested alone, on the batch as it is; InputError where its
    parts do not add up by them.
    """
    check_units(told)
    assumed = "assumed: {}; the first training batch tests it"
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(batch)]
    if any(is_fake(t) or t.is_meta for t in tensors):
        return SplitFound(told, None, assumed.format("no real values to test the loss on"))
    try:
        examples = examples_of(batch)
    except InputError as error:
        return SplitFound(EXAMPLES, None, f"not cut: {error.message}")
    if examples is None or examples < 2:
        return SplitFound(told, None, assumed.format("a batch of one example has no parts"))
    untouched = Untouched(
        [loss, *hooks_of(model)], []
    )  # other networks that the loss trains or moves
    with warnings.catch_warnings(), rewound_streams(), untouched, observed_by(None):
        warnings.simplefilter("ignore")
        if told != AUTO:
            more = cut(batch, 0, _more_examples(model, batch, examples))
            return _as_told(model, more, loss, told)
        found, reads = _tested(model, cut(batch, 0, EXAMPLES_TRIED), loss, light)
        if examples <= EXAMPLES_TRIED or found.splits is False:
            return found
        more, known = batch, found.units if found.splits else None
        if found.splits and not reads:  # else what it reads may decide what it does
            # A tenth of four examples is none of them; few labels may all be of one kind.
            more = cut(batch, 0, _more_examples(model, batch, examples))
            given = model, more, loss, True, known
            again, _ = _tested(*given, whole=True, forwards=True)
            if again.splits is not False:
                return again if again.splits else found
        light = light or bool(found.splits)
        whole, _ = _tested(model, more, loss, light, known, whole=True)
        if known is not None and whole.splits is False:  # perhaps by others
            whole, _ = _tested(model, more, loss, light, whole=True)
        return whole if whole.splits is not None else found


def _as_told(model: nn.Module, batch: Any, loss: Loss, told: LossUnits) -> SplitFound:
    found, _ = _tested(model, batch, loss, True, told, whole=True)
    if found.splits is False:
        raise InputError(
            f"units={told!r} is not what the loss is averaged over: parts of the batch that are "
            "weighed by it do not add up",
            hint="units='auto' finds them, or says why there are none",
        )
    return SplitFound(told, found.splits, found.why)


def _more_examples(model: nn.Module, batch: Any, examples: int) -> int:
    """All of a small batch, or as many as take little beside the model, but not too few."""
    least = 4 * EXAMPLES_TRIED
    if _wide_bytes(model) > WIDE_BYTES:
        return min(examples, least)
    tensors = tensors_of(batch)
    size = sum(t.numel() * (1 if t.is_floating_point() else TOKEN_ELEMENTS) for t in tensors)
    return min(examples, max(least, examples * MORE_ELEMENTS // max(size, 1)))


def _wide_bytes(model: nn.Module) -> int:
    return sum(p.numel() * max(p.element_size(), 8) for p in model.parameters())


def _tested(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    light: bool,
    known: LossUnits | None = None,
    *,
    whole: bool = False,
    forwards: bool = False,
) -> tuple[SplitFound, bool]:
    """In FP64 where the model is small and runs so, and whether the step reads values.

    `known` units were found on fewer examples: only whether this batch splits by them is asked,
    with `forwards` of one cut and in the model's own type.
    """
    examples = examples_of(batch) or 0
    cuts = tuple(sorted({1, examples // 4, examples // 2} - {0})) if whole else CUTS
    cuts = (examples // 2,) if forwards else cuts
    why = ""
    for wide in (True, False) if _wide_bytes(model) <= WIDE_BYTES and not forwards else (False,):
        trial = ExampleRuns(model, batch, loss, wide=wide, cuts=cuts)
        try:
            found = trial.found(known, gradients=not forwards and (wide or not light))
            return found, trial.reads
        except Failed as error:
            why = str(error)
            if whole and trial.runs and not error.unclear:
                return SplitFound(EXAMPLES, False, f"its parts do not run: {why}"), False
    why = f"assumed: the test failed: {why}; the first training batch tests it"
    return SplitFound(AUTO, None, why), False


def tested_units(setup: Setup, batch: Any) -> str | Units:
    """Test the loss before anything is made of it; InputError where it does not split."""
    if setup.loss is None:  # a setup that nobody trains by
        return EXAMPLES
    found = find_units(setup.model, batch, setup.loss, light=True)
    if next(setup.model.parameters()).is_cuda:
        torch.cuda.empty_cache()  # a graph that is captured later cannot take it from the cache
    if found.splits is False:
        raise InputError(
            f"parts of the batch would give other gradients: {found.why}",
            hint="train on whole batches, or say by units= what the loss is averaged over",
        )
    if found.splits is None:
        warnings.warn(f"weighed by examples, untested: {found.why}", UnprovenWarning, stacklevel=3)
        return EXAMPLES
    return found.units
