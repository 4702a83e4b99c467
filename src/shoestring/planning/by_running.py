"""Plan a model that cannot be traced: run what could be used, and measure.

A trace needs fake tensors to follow the step. Some steps they cannot follow: a kernel without a
shape function, a gradient that reads values, a library that takes a tensor's memory. Such a step
still runs. So recomputation of repeated modules and microbatches are put on the model, three steps
are taken by each, the last one is measured, and everything is put back. The plan holds because its
step was measured, not predicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ..errors import BudgetError, InputError, ShoestringError, TraceError, first_line
from ..memory.live.measure import training_step
from ..memory.prediction import Prediction
from ..step.holding import out_of_memory
from ..step.step import Step, apply_alone
from ..techniques import registered
from ..techniques.base import LossUnits
from ..techniques.offers import Context
from ..techniques.plan import Plan
from ..techniques.splitting.find import find_units
from ..techniques.splitting.units import AUTO
from ..trace.attributes import held_by, moved_modules
from ..trace.batches import tensors_of
from ..trace.blocks import is_normalization
from ..trace.failures import user_code
from ..trace.fakes import OptimizerLike, is_fake, make_optimizer
from ..trace.split import cut, examples_of
from ..trace.streams import stream_states
from ..trace.tracing import Loss
from ..trace.untouched import Untouched, as_it_was, hooks_of
from ..units import format_size
from .allow import Allowed
from .margin import Margin
from .result import BudgetPlan, Choice
from .settings import Setting

DRAWS = 3
"""Steps that are measured where a step draws: with random depth each needs something else."""
_PART = 0.05
"""Of a step's time, what each doubling of the number of parts is taken to cost."""
_FORWARD = 1 / 3
"""Of a step's time, what a whole forward pass is taken to cost."""


def untraced(error: Exception) -> ShoestringError | None:
    """Why the step failed on fake tensors, though it may run on real ones; None for other errors.

    An InputError with a cause came from the user's own code, as it ran there.
    """
    if isinstance(error, TraceError) or (isinstance(error, InputError) and error.__cause__):
        return error
    if isinstance(error, (ShoestringError, Warning)) or out_of_memory(error):
        return None
    made = TraceError(f"the step cannot be traced: {type(error).__name__}: {first_line(error)}")
    made.__cause__ = error
    return made


def plan_by_running(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    optimizer: OptimizerLike,
    budget_bytes: int,
    margin: float,
    allow: str | Iterable[str] | None,
    because: ShoestringError,
    units: LossUnits = AUTO,
) -> BudgetPlan:
    """The mildest of what revisable techniques offer whose measured step fits.

    `because` says why there is no trace. It is raised again where nothing can run: on fake tensors,
    or where the model fails on real ones, too. BudgetError with the smallest that was measured.
    """
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(batch)]
    if any(is_fake(t) or t.is_meta for t in tensors):
        raise because
    updates = make_optimizer(optimizer, model, {}) if isinstance(optimizer, str) else optimizer
    trials = _Trials(model, batch, loss, updates)
    trials.units = units
    try:
        context = trials.context()
        plain = trials.needed(Setting())
    except InputError:
        raise because from None
    limit = int(budget_bytes * (1 - margin))
    allowed = Allowed.of(allow)
    found = Setting() if _fits(plain, limit) else _search(trials, context, allowed, limit)
    if found is None:
        raise _too_small(trials, budget_bytes, margin, because, context)
    at = context.circumstances
    return BudgetPlan(
        found.techniques,
        budget_bytes=budget_bytes,
        margin=margin,
        predicted=trials.as_prediction(found, context.device),
        plain=trials.as_prediction(Setting(), context.device),
        choices=tuple(
            Choice(o.technique.name, o.shown or o.technique.short(), o.level(at).kind, o.why)
            for o in found.offers
        ),
        by_running=because.message,
    )


def _fits(needed: int | None, limit: int) -> bool:
    return needed is not None and needed <= limit


def _search(trials: _Trials, context: Context, allowed: Allowed, limit: int) -> Setting | None:
    """For each schedule the fewest parts that fit; of those the one that is taken to cost least."""
    at = context.circumstances
    offers = [o for kind in registered().values() for o in kind.offers_untraced(context)]
    alone = [Setting((o,)) for o in offers if allowed.permits(o, at)]
    parts = [setting for setting in alone if setting.scales.parts > 1]
    ways = [setting for setting in alone if setting.scales.parts == 1]
    best: Setting | None = None
    for way in (Setting(), *ways):
        ladder = [Setting((*part.offers, *way.offers)) for part in (Setting(), *parts)]
        if not _fits(trials.needed(ladder[-1]), limit):
            continue
        low, high = 0, len(ladder) - 1  # what fits stays so with more parts
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if _fits(trials.needed(ladder[middle]), limit) else (
                middle + 1, high
            )  # fmt: skip
        if best is None or _cost(ladder[high]) < _cost(best):
            best = ladder[high]
    return best


def _cost(setting: Setting) -> float:
    """By rule, not by the clock: the same call gives the same plan."""
    again = sum(offer.recomputed for offer in setting.offers)
    return _PART * (setting.scales.parts - 1).bit_length() + _FORWARD * again


def _too_small(
    trials: _Trials, budget_bytes: int, margin: float, because: ShoestringError, context: Context
) -> BudgetError:
    setting, least = min(trials.known.items(), key=lambda item: item[1] or 2**63)
    split = context.split
    left = f"; microbatches are left out: {split.why}" if split.splits is False else ""
    hint = f"measured step by step, since {because.message}{left}"
    if least is None:
        return BudgetError("the device runs out of memory with all that was tried", hint=hint)
    needed = Margin(margin).budget_for(least)
    return BudgetError(
        f"no plan fits {format_size(budget_bytes)}; the smallest measured needs "
        f"{format_size(needed, digits=2)} ({setting.plan().short()})",
        hint=hint,
        smallest_bytes=needed,
    )


class _Trials:
    """Steps that are taken, measured and taken back."""

    units: LossUnits = AUTO
    """Over these the loss is averaged, the user said."""

    def __init__(self, model: nn.Module, batch: Any, loss: Loss, optimizer: Any) -> None:
        self._model, self._batch, self._loss, self._optimizer = model, batch, loss, optimizer
        self.known: dict[Setting, int | None] = {}
        """Bytes a budget must have; None where the device ran out of memory."""
        self._measured: dict[Setting, tuple[int, int]] = {}

    def context(self) -> Context:
        """The context for techniques; one step finds out what the forward pass writes."""
        try:
            examples = examples_of(self._batch)
        except InputError:
            examples = None
        model = self._model
        return Context(
            model, self._batch, self._optimizer, _no_trace,
            device=next(model.parameters()).device.type, examples=examples,
            batch_norm=any(is_normalization(m) and m.training for m in model.modules()),
            split=find_units(model, self._batch, self._loss, told=self.units),
            writers=self._writers(),
        )  # fmt: skip

    def needed(self, setting: Setting) -> int | None:
        """Bytes that the step by this setting takes; run once, then known."""
        if setting not in self.known:
            self.known[setting] = self._run(setting)
        return self.known[setting]

    def as_prediction(self, setting: Setting, device: str) -> Prediction:
        """The measurement, in place of a prediction."""
        peak, beside = self._measured.get(setting, (self.known[setting] or 0, 0))
        return Prediction(peak, "device", device, costs="measured", scratch_bytes=beside)

    def _writers(self) -> frozenset[str]:
        model = self._model
        values = {name: buffer.clone() for name, buffer in model.named_buffers()}
        versions = {name: (p, p._version) for name, p in model.named_parameters()}
        before = [held_by(module) for module in model.modules()]
        with self._put_back(), user_code():
            training_step(model, self._batch, self._loss, None)
            now = dict(model.named_buffers())
            moved = {n.rpartition(".")[0] for n, held in values.items()
                     if n not in now or not torch.equal(held, now[n])}  # fmt: skip
            moved |= {n.rpartition(".")[0] for n, (p, v) in versions.items() if p._version != v}
            return moved_modules(model, before) | frozenset(moved)

    def _run(self, setting: Setting) -> int | None:
        plan = setting.plan()
        with self._put_back():
            try:
                step = apply_alone(plan, self._model, self._optimizer, loss=self._loss)
            except InputError:
                return None
            some = self._few_parts(plan)
            try:
                peak, beside = self._peak(step, some)
            except Exception as error:
                if not setting.offers and not out_of_memory(error):
                    raise
                return None  # too large, or this model does not run so
            finally:
                assert step._base is not None
                step._base.restore(step._setup)
        device = next(self._model.parameters()).device.type
        beside += sum(technique.untraced_bytes(device) for technique in plan.techniques)
        if device == "cpu":  # what the batch has beside these parts; CUDA's allocator counts it
            peak += sum(t.nbytes for t in tensors_of(self._batch))
            peak -= sum(t.nbytes for t in tensors_of(some))
        self._measured[setting] = peak, beside
        return peak + beside

    def _few_parts(self, plan: Plan) -> Any:
        """As many examples as three parts have: the third meets all that the others left."""
        size = plan.examples_at_once(self._batch)
        if size is None:
            return self._batch
        return cut(self._batch, 0, min(3 * size, examples_of(self._batch) or size))

    def _peak(self, step: Step, batch: Any) -> tuple[int, int]:
        """Of a steady step: tensors, and what kernels take beside them."""
        with user_code():
            for _ in range(2 if next(self._model.parameters()).is_cuda else 1):
                step(batch)  # makes the state; on CUDA one more, after which a graph may run
            before = stream_states()
            found = [step.measure(batch)]
            if stream_states() != before:
                found += [step.measure(batch) for _ in range(DRAWS - 1)]
        highest = max(found, key=lambda m: m.peak_bytes + m.scratch_bytes)
        return highest.peak_bytes, highest.scratch_bytes

    def _put_back(self) -> AbstractContextManager[None]:
        """Weights, state, buffers, gradients, streams and bystanders as they were."""
        return as_it_was(self._model, Untouched([self._loss, *hooks_of(self._model)]))


def _no_trace(plan: Plan, **_: Any) -> Any:
    raise AssertionError("this model cannot be traced")
