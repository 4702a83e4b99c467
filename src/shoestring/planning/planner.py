"""`plan`: model + batch + loss + optimizer + budget → BudgetPlan, from traces alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

from ..errors import BudgetError, InputError
from ..memory.items import Item
from ..memory.model import ACCOUNTINGS
from ..techniques import Checkpointing
from ..techniques.base import Setup
from ..techniques.microbatching.split import examples_of
from ..techniques.microbatching.split_test import SplitFound, find_units
from ..techniques.plan import Plan
from ..trace.blocks import is_normalization
from ..trace.capture import Loss, check_trainable
from ..trace.fakes import OptimizerLike, make_optimizer
from ..units import parse_size
from .allow import Allowed
from .block_chain import measure_chain
from .chain import front
from .cost import Costs, costs_of
from .device_estimates import DeviceEstimates
from .fundamental import FundamentalEstimates
from .reasons import choices
from .result import BudgetPlan, FrontPoint
from .search import Candidate, Found, budget_error, budget_for, pareto, search, smallest
from .settings import Setting, settings

MARGIN = {"cpu": 0.01, "cuda": 0.04}
"""Fraction of a budget left free in the device accounting: the prediction misses the scratch memory
inside CPU kernels by design, and on CUDA is off by up to 1.5% in 19 of 20 measured steps."""

_SCHEDULES = 48
"""Of a chain's front, counted by the fundamental accounting."""
_POINTS = 8
"""Of the front of each kind, predicted by their own steps."""


def plan(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    optimizer: OptimizerLike,
    budget: str | int,
    allow: str | Iterable[str] | None = None,
    accounting: str = "device",
    device: str | None = None,
) -> BudgetPlan:
    """The plan of least predicted time that fits the budget, lossless if there is one.

    `allow` names what may change the numbers: "precision" (the default), "bn-microbatch",
    "sparsity"; "lossless" allows none, "exact" only what changes no bit. The loss is tested on a
    few real examples: where it does not split into parts there are no microbatches. Nothing of the
    model is changed; of a small one there is a copy for that test. Where there is a GPU, a few
    operations and each convolution run alone to be timed and measured. BudgetError names the
    smallest budget that works.
    """
    planner = Planner(
        model, batch, loss=loss, optimizer=optimizer, allow=allow, accounting=accounting,
        device=device,
    )  # fmt: skip
    return planner.plan(parse_size(budget))


class Planner:
    """Plans for one model and batch, for one budget after another."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        *,
        loss: Loss,
        optimizer: OptimizerLike,
        allow: str | Iterable[str] | None = None,
        accounting: str = "device",
        device: str | None = None,
        costs: Costs | None = None,
        split: SplitFound | None = None,
    ) -> None:
        if accounting not in ACCOUNTINGS:
            raise InputError(
                f"unknown accounting {accounting!r}", hint="one of " + ", ".join(ACCOUNTINGS)
            )
        if optimizer is None:
            raise InputError("a plan is for training, which takes an optimizer", hint="such as sgd")
        check_trainable(model)
        kind = next(model.parameters()).device.type if device is None else device
        if kind not in MARGIN:
            raise InputError(f"no accounting for device {kind!r}", hint="use 'cpu' or 'cuda'")
        self.allowed = Allowed.of(allow)
        self.batch_norm = any(is_normalization(m) and m.training for m in model.modules())
        self._model, self._optimizer = model, optimizer
        try:
            examples = examples_of(batch)
        except InputError:  # cannot be cut
            examples = None
        if examples == 0:
            raise InputError("the batch has no examples", hint="plan with one that is trained on")
        self._examples = examples
        self.split = split if split is not None else find_units(model, batch, loss)
        """Whether microbatches add up to the batch, as tested on real values."""
        self._fundamental = accounting == "fundamental"
        self._narrow = "fp16"
        self.margin = 0.0 if self._fundamental else MARGIN[kind]
        common: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "examples": examples}
        self.estimates: DeviceEstimates | FundamentalEstimates
        if self._fundamental:

            def schedules() -> Iterable[Checkpointing]:
                return _suggested(model, batch, loss)

            self.estimates = FundamentalEstimates(model, batch, schedules=schedules, **common)
        else:
            known = costs or costs_of(kind)
            self._narrow = known.narrow
            self.estimates = DeviceEstimates(model, batch, device=kind, costs=known, **common)
        if self.estimates.writers:  # other statistics are as BatchNorm's are to microbatches
            self.batch_norm = True

    def plan(
        self, budget_bytes: int, among: Callable[[Setting], bool] = lambda setting: True
    ) -> BudgetPlan:
        """The best of some settings that fits; BudgetError if nothing does."""
        limit = int(budget_bytes * (1 - self.margin))
        plain = self.estimates.plain
        if plain.peak_bytes <= limit and among(Setting()):
            kept = Candidate(Setting(), None, plain.peak_bytes, plain.seconds, plain.flops)
            return self._result(Found(kept, plain), budget_bytes)
        some = [s for s in self._settings(self.allowed) if among(s)]
        found = search(self.estimates, some, limit)
        if found is None:
            found = smallest(self.estimates, some)
            if found is None or found.predicted.peak_bytes > limit:
                raise self._too_small(budget_bytes, found)
        return self._result(found, budget_bytes)

    def smallest_bytes(self) -> int:
        """The smallest budget for which there is a plan."""
        least = smallest(self.estimates, self._settings(self.allowed))
        found = self.estimates.plain if least is None else least.predicted
        return budget_for(found.peak_bytes, self.margin)

    def front(self) -> tuple[FrontPoint, ...]:
        """Memory against time of lossless, near-lossless and lossy plans, by their own steps."""
        made: list[FrontPoint] = []
        for _, some in groupby(self._settings(self.allowed), key=lambda s: s.kind):
            every = {_point(c): c for s in some for c in self.estimates.front(s)}
            estimated = pareto(list(every))
            apart = max(len(estimated) - 1, 1) / (_POINTS - 1)
            for index in sorted({round(i * apart) for i in range(_POINTS)}):
                if index < len(estimated):
                    candidate = every[estimated[index]]
                    predicted = self.estimates.predict(candidate)
                    if predicted is not None:
                        made.append(_exact(Found(candidate, predicted)))
        kinds = dict.fromkeys(p.kind for p in made)
        return tuple(p for kind in kinds for p in pareto([q for q in made if q.kind == kind]))

    def _settings(self, allowed: Allowed) -> list[Setting]:
        made = settings(
            allowed,
            self._examples,
            batch_norm=self.batch_norm,
            sparsifiable=self.estimates.sparsifiable,
            ragged=not self._fundamental,
            narrow=self._narrow,
            units=str(self.split.units),
            splits=self.split.splits is not False,
        )
        refused = {s for s in {replace(s, microbatch=None, parts=1, loss=0.0) for s in made}
                   if not self._applies(s)}  # fmt: skip
        return [s for s in made if replace(s, microbatch=None, parts=1, loss=0.0) not in refused]

    def _applies(self, setting: Setting) -> bool:
        """Whether the techniques accept the model and the optimizer."""
        given = self._optimizer
        known = isinstance(given, torch.optim.Optimizer)
        updates = given if known else make_optimizer(given, self._model, {})
        assert isinstance(updates, torch.optim.Optimizer)
        setup = Setup(self._model, updates, lambda b: b, lambda b: (), lambda v: None, lambda: None)
        try:
            for technique in setting.plan().techniques:
                technique.check(setup)
        except InputError:
            return False
        return True

    def _result(self, found: Found, budget_bytes: int) -> BudgetPlan:
        candidate = found.candidate
        points = [_point(c) for c in self.estimates.around(candidate)]
        chosen = {
            name: getattr(candidate.plan, name)
            for name in ("sparsity", "precision", "checkpointing", "microbatching")
        }
        return BudgetPlan(
            **chosen,
            budget_bytes=budget_bytes,
            margin=self.margin,
            predicted=found.predicted,
            plain=self.estimates.plain,
            choices=choices(
                candidate,
                self.estimates,
                self.batch_norm,
                self._settings(Allowed()),
                int(budget_bytes * (1 - self.margin)),
                self._examples,
                self.split,
            ),
            front=pareto([_exact(found), *points]),
        )

    def _too_small(self, budget_bytes: int, least: Found | None) -> BudgetError:
        hints = []
        known = budget_bytes if least is None else least.predicted.peak_bytes
        allowed = self.allowed
        for name in self.allowed.missing(self.batch_norm):
            change = name.replace("-", "_")
            allowed = replace(allowed, **{change: change != "exact"})
            lossiest = self._settings(allowed)[-1]
            lower = self._tightest(lossiest, replace(lossiest, precision=None))
            if lower is not None and lower < known:
                # As asked for, with what was allowed before.
                hints.append((str(allowed), budget_for(lower, self.margin)))
                known = lower
        return budget_error(
            budget_bytes,
            self.margin,
            least,
            hints,
            splits=self._examples is not None,
            why=self.split.why if self.split.splits is False else "",
        )

    def _tightest(self, *settings: Setting) -> int | None:
        """Peak of the smallest plan by either, from its own step where that can run."""
        found = [front[0] for s in settings if (front := self.estimates.front(s))]
        if not found:
            return None
        least = min(found, key=lambda c: c.peak_bytes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # left out, and why
            predicted = self.estimates.predict(least)
        return least.peak_bytes if predicted is None else predicted.peak_bytes


def _point(candidate: Candidate) -> FrontPoint:
    kind = candidate.setting.kind
    return FrontPoint(candidate.plan, candidate.peak_bytes, candidate.seconds, False, kind)


def _exact(found: Found) -> FrontPoint:
    plan, kind, predicted = found.candidate.plan, found.candidate.setting.kind, found.predicted
    return FrontPoint(plan, predicted.peak_bytes, predicted.seconds, True, kind)


def _suggested(model: nn.Module, batch: Any, loss: Loss) -> Iterable[Checkpointing]:
    """Schedules along the front of the model's chain, and the report's for its first blocks."""
    try:
        chain = measure_chain(Plan(), model, batch, loss=loss, optimizer=None)
    except InputError:
        return
    paths = tuple(stage.name for stage in chain.blocks)
    found = front(chain)
    for schedule in found[:: max(1, len(found) // _SCHEDULES)]:
        yield Checkpointing.of(schedule.items, paths)
    joins = [stage.joins for stage in chain.blocks]
    for size in (1, 2, 3):
        for count in range(size, len(paths) + 1, max(size, len(paths) // 12)):
            rest: tuple[Item, ...] = ("cheap",) * (len(paths) - count)
            yield Checkpointing.of((*_groups(joins[:count], size), *rest), paths)


def _groups(joins: list[bool], size: int) -> list[Item]:
    """residual-M* of so many blocks: nested regions of M, fewer where blocks do not join."""
    made: list[Item] = []
    group: list[Item] = []
    for joined in joins:
        group.append(("cheap",))
        if len(group) == size or not joined:
            made.append(tuple(group) if len(group) > 1 else group[0])
            group = []
    return [*made, *group]
