"""`plan`: model + batch + loss + optimizer + budget → BudgetPlan, from traces alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import Any, cast

import torch
from torch import nn

from ..devices import Device
from ..errors import BudgetError, InputError, UnprovenWarning
from ..memory.cpu.scratch import scratch_above
from ..memory.device import device_timeline
from ..memory.model import ACCOUNTINGS, Accounting
from ..memory.prediction import Prediction
from ..memory.reserved import reserved
from ..memory.work import Work
from ..step.shares import ShardingName
from ..step.trace_step import trace_plan
from ..techniques import registered
from ..techniques.base import LossUnits, Setup
from ..techniques.claims import Level
from ..techniques.offers import Context, Offer
from ..techniques.plan import Plan
from ..techniques.splitting import SplitFound
from ..techniques.splitting.find import find_units
from ..techniques.splitting.units import AUTO, EXAMPLES
from ..trace.batches import tensors_of
from ..trace.blocks import is_normalization
from ..trace.failures import check_trainable
from ..trace.fakes import OptimizerLike, adds_to_the_step, make_optimizer
from ..trace.garbage import only_new_garbage
from ..trace.graph import Trace
from ..trace.hooked import gradient_hooks
from ..trace.positions import index_like
from ..trace.settling import growing
from ..trace.split import examples_of
from ..trace.tracing import Loss, trace_model
from ..units import parse_size
from .allow import Allowed
from .batches import largest, plan_for_all, usual_elements
from .by_running import plan_by_running, untraced
from .cost import IDEAL, NOMINAL, Costs, costs_of
from .device_estimates import DeviceEstimates
from .fundamental import FundamentalEstimates
from .margin import Margin
from .prices import prices as find_prices
from .ranks import SharedStep, plan_for_ranks
from .reasons import choices
from .result import BudgetOf, BudgetPlan, FrontPoint
from .search import FASTER, Candidate, Found, budget_error, pareto, search, smallest
from .settings import Setting, settings
from .trial import plan_on_device, trials_for

MARGIN = {"cpu": 0.01, "cuda": 0.04}
"""Fraction left free in the device accounting. On the CPU of the whole budget: scratch of kernels
is bounded by rule. On CUDA of what a budget holds beside parameters, state and gradients: what is
reserved was up to 2.8% above its prediction in 25 measured steps."""

_ABOUT = 0.05
"""How much above the least memory a plan may be that a hint names."""
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
    accounting: Accounting = "device",
    device: Device | None = None,
    budget_of: BudgetOf = "reserved",
    batches: Iterable[Any] | None = None,
    ranks: int = 1,
    sharding: ShardingName = "ddp",
    prices: bool = False,
    trial: bool | None = None,
    units: LossUnits = AUTO,
) -> BudgetPlan:
    """Find the plan of least predicted time that fits the budget, lossless if there is one.

    `plan` does not change the model. It tests the loss on a few real examples; if the loss does not
    split into parts, plans have no microbatches. If a GPU is present, a few operations and each
    convolution run once to be measured. If the model is on it, a few steps of the plan run, too.

    If a model cannot be traced, `plan` runs it instead: it measures steps with recomputed blocks
    and microbatches, and restores everything.

    Args:
        model: Not changed; on any device, or on fake tensors.
        batch: One batch, as your training loop has it.
        loss: `(model, batch) -> scalar`.
        optimizer: Yours, or a name such as "adamw".
        budget: Bytes, or text such as "8 GB".
        allow: How far from plain training the plan may be: "exact", "lossless" or "near" (the
            default, which permits 16 bits); and lossy techniques by name. Text with commas, or
            several.
        accounting: "device" is what PyTorch's allocator shows, "fundamental" the report's.
        device: "cpu" or "cuda"; by default where the model is. You need not have it.
        budget_of: On CUDA, what the budget counts: "reserved" is what PyTorch's allocator takes
            from the card, "allocated" what tensors use of that.
        batches: Others that are trained on, such as a data loader, which is read to its end: the
            plan holds for all of them.
        ranks: Processes that share every batch; the budget is that of each.
        sharding: As for `parallel` of `apply`: "ddp", or "fsdp" to split the model, too.
        prices: Also plan for one and two tenths less and more: what that would cost and buy. Of one
            batch; none for a model that cannot be traced.
        trial: Run a few steps by the plan, on the model itself and within the budget, correct the
            prediction by them, and put everything back. By default where the model is on a GPU.
        units: What the loss is averaged over, as for `Microbatching`: found on the batch, or told.

    Returns:
        A `BudgetPlan`: techniques, what is predicted with and without them, and why.

    Raises:
        BudgetError: Nothing fits; it names the smallest budget that works.

    Examples:
        >>> plan = ss.plan(model, batch, loss=loss, optimizer="adamw", budget="8 GB")
    """
    budget_bytes = parse_size(budget)
    shared = SharedStep(ranks, sharding)
    if batches is not None and prices:
        raise InputError("prices are of one batch", hint="leave out batches, or give the longest")
    if batches is not None:
        if not isinstance(batches, Iterable) or isinstance(batches, (str, Mapping, torch.Tensor)):
            raise InputError(
                f"batches is a {type(batches).__name__}, not several batches",
                hint="give a list or a data loader",
            )
        if ranks > 1:
            raise InputError(
                "batches= is for one rank", hint="give the largest batch to plan(…, ranks=…)"
            )
        given: dict[str, Any] = {
            "loss": loss, "optimizer": optimizer, "allow": allow, "accounting": accounting,
            "device": device, "budget_of": budget_of, "trial": trial, "units": units,
        }  # fmt: skip
        every = [batch, *batches]
        return plan_for_all(
            largest(every),
            lambda one: plan(model, one, budget=budget_bytes, **given),
            lambda found, one: needed_bytes(
                found, model, one, loss=loss, optimizer=optimizer, device=device
            ),
            budget_bytes,
            usual_elements(every),
        )
    if ranks > 1 and accounting != "device":
        raise InputError("several ranks have devices", hint="accounting='device'")
    try:
        planner = Planner(
            model, shared.share(batch) if ranks > 1 else batch, loss=loss, optimizer=optimizer,
            allow=allow, accounting=accounting, device=device, budget_of=budget_of, units=units,
        )  # fmt: skip
        if ranks > 1:
            return plan_for_ranks(planner, shared, budget_bytes, loss)
        trials = None
        if accounting == "device" and device in (None, next(model.parameters()).device.type):
            trials = trials_for(trial, budget_of, model, batch, loss, optimizer)
        if trials is None:
            found = planner.plan(budget_bytes)
        else:
            found = plan_on_device(planner, trials, budget_bytes)
        return planner.priced(found) if prices else found
    except Exception as error:
        because = untraced(error)
        here = next(model.parameters()).device.type if because is not None else ""
        if because is None or accounting != "device" or device not in (None, here) or ranks > 1:
            raise
        return plan_by_running(
            model, batch, loss=loss, optimizer=optimizer, budget_bytes=budget_bytes,
            margin=MARGIN[here], allow=allow, because=because, units=units,
        )  # fmt: skip


def _split(model: nn.Module, batch: Any, loss: Loss, units: LossUnits) -> SplitFound:
    """How the loss splits, for a plan: what a hook may do with a part's sum is not assumed."""
    if any(gradient_hooks(p)[1] for p in model.parameters()):
        return SplitFound(EXAMPLES, False, "a hook on summed gradients would run for each part")
    return find_units(model, batch, loss, told=units)


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
        budget_of: str = "reserved",
        by_norm: bool = False,
        waiting: bool = False,
        units: LossUnits = AUTO,
    ) -> None:
        if budget_of not in ("reserved", "allocated"):
            raise InputError(f"no budget of {budget_of!r}", hint="reserved or allocated")
        self.budget_of = cast(BudgetOf, budget_of)
        if accounting not in ACCOUNTINGS:
            raise InputError(
                f"unknown accounting {accounting!r}", hint="one of " + ", ".join(ACCOUNTINGS)
            )
        if optimizer is None:
            raise InputError("a plan is for training, which takes an optimizer", hint="such as sgd")
        check_trainable(model)
        kind = next(model.parameters()).device.type if device is None else device
        if kind not in MARGIN:
            raise InputError(f"unknown device {kind!r}", hint="cpu or cuda")
        self.allowed = Allowed.of(allow)
        self._wrapper = optimizer if adds_to_the_step(optimizer) else None
        try:
            examples = examples_of(batch)
        except InputError:  # cannot be cut
            examples = None
        if examples == 0:
            raise InputError("the batch has no examples", hint="plan with one that is trained on")
        fundamental = accounting == "fundamental"
        known = costs or (NOMINAL["cuda"] if fundamental else costs_of(kind))
        self._rates = (IDEAL if fundamental else known).as_dict()

        def trace_step(plan: Plan, *, optimizer: OptimizerLike = None, **others: Any) -> Trace:
            return trace_plan(
                plan, model, batch, loss=loss, optimizer=optimizer, device=kind,
                trained_by=updates, **others,
            )  # fmt: skip

        updates = make_optimizer(optimizer, model, {id(p): p for p in model.parameters()})
        assert updates is not None
        self.context = Context(
            model, batch, updates, trace_step,
            device=kind, examples=examples, ragged=not fundamental,
            batch_norm=any(is_normalization(m) and m.training for m in model.modules()),
            narrow="fp16" if fundamental else known.narrow,
            reserved=budget_of == "reserved", accounting=accounting,
            split=_split(model, batch, loss, units) if split is None else split,
            loss=loss, near=self.allowed.level >= Level.NEAR,
        )  # fmt: skip
        self._settings_of: dict[Plan, Setting] = {}
        """Of the plans that were found, without their schedules."""
        self.estimates: DeviceEstimates | FundamentalEstimates
        with only_new_garbage():
            if fundamental:
                self.estimates = FundamentalEstimates(
                    self.context,
                    lambda part: trace_model(model, part, loss=loss, optimizer=optimizer),
                )
            else:
                self.estimates = DeviceEstimates(
                    self.context, known, by_norm=by_norm, waiting=waiting
                )
            self.margin = Margin(0.0 if fundamental else MARGIN[kind], self._known_bytes())
        self._keep_positions_whole(batch)
        for line in growing(model):
            warnings.warn(line, UnprovenWarning, stacklevel=4)

    def _known_bytes(self) -> int:
        """On CUDA: what is there through the update, whatever the schedule."""
        if not isinstance(self.estimates, DeviceEstimates) or self.context.device != "cuda":
            return 0
        return self.estimates.floor_bytes(self._settings(self.allowed)[0])

    def _keep_positions_whole(self, batch: Any) -> None:
        """Offer no microbatches where the batch has tensors that index its own rows."""
        examples = self.context.examples
        tensors = tensors_of(batch)
        whole = [t for t in tensors if t.dim() and not t.is_floating_point()]
        if examples is None or not whole:
            return
        for number in index_like(self.context.trace, examples):
            tensor = tensors[number]
            if tensor.is_floating_point() or not tensor.dim():
                continue
            warnings.warn(
                f"tensor {number} of the batch ({str(tensor.dtype).removeprefix('torch.')}, shape "
                f"{tuple(tensor.shape)}) indexes rows of the batch, so it is not cut into "
                "microbatches; where every part points at itself only, apply Microbatching by hand",
                RuntimeWarning,
                stacklevel=4,
            )
            self.context.examples = None

    @only_new_garbage()
    def plan(
        self, budget_bytes: int, among: Callable[[Setting], bool] = lambda setting: True
    ) -> BudgetPlan:
        """The best of some settings that fits; BudgetError if nothing does."""
        limit = self.margin.limit(budget_bytes)
        plain = self.estimates.plain
        self.estimates.room_bytes = limit
        some = [s for s in self._settings(self.allowed) if among(s)]
        if plain.needed_bytes <= limit and some:
            kept = self._kept(some[0])
            if kept is not None and kept.predicted.needed_bytes <= limit:
                return self._result(kept, budget_bytes)
        assert plain.seconds is not None
        slow = plain.seconds / FASTER if self.allowed.near_to_be_faster else math.inf
        found = search(self.estimates, some, limit, self.context.circumstances, slow)
        if found is None:
            found = smallest(self.estimates, some)
            if found is None or found.predicted.needed_bytes > limit:
                raise self._too_small(budget_bytes, found)
        return self._result(found, budget_bytes)

    def correct(self, plan: BudgetPlan, more_bytes: int, factor: float) -> None:
        """A step like this one took so many bytes more than predicted, and so much its time."""
        assert isinstance(self.estimates, DeviceEstimates)
        self.estimates.correct(self._settings_of[plan.plan], more_bytes, factor)

    def names_of(self, plan: BudgetPlan) -> tuple[str, ...]:
        """Techniques of a plan that was found, beside its schedule."""
        return self._settings_of[plan.plan].names

    def corrected(self, predicted: Prediction) -> Prediction:
        """Another step's time, as far as those that were tried tell."""
        assert isinstance(self.estimates, DeviceEstimates) and predicted.seconds is not None
        return replace(predicted, seconds=predicted.seconds * self.estimates.least_factor)

    def priced(self, plan: BudgetPlan) -> BudgetPlan:
        """The same plan with what somewhat less and more memory would cost and buy."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # said for the plan itself
            return replace(plan, prices=find_prices(plan, self.plan))

    def _kept(self, mildest: Setting) -> Found | None:
        """Nothing but what costs nothing."""
        plain = self.estimates.plain
        assert plain.seconds is not None and plain.flops is not None
        work = Work(plain.flops)
        found = Candidate(mildest, None, plain.peak_bytes, plain.seconds, work)
        if not mildest.offers:
            return Found(found, plain)
        if any(not offer.dominates for offer in mildest.offers):
            return None
        predicted = self.estimates.predict(replace(found, work=self.estimates.passes))
        return None if predicted is None else Found(found, predicted)

    @only_new_garbage()
    def smallest_bytes(self) -> int:
        """The smallest budget for which there is a plan."""
        least = smallest(self.estimates, self._settings(self.allowed))
        found = self.estimates.plain if least is None else least.predicted
        return self.margin.budget_for(found.needed_bytes)

    @only_new_garbage()
    def front(self) -> tuple[FrontPoint, ...]:
        """Memory against time of lossless, near-lossless and lossy plans, by their own steps."""
        made: list[FrontPoint] = []
        at = self.context.circumstances
        for _, some in groupby(self._settings(self.allowed), key=lambda s: s.level(at).kind):
            every = {self._point(c): c for s in some for c in self.estimates.front(s)}
            estimated = pareto(list(every))
            apart = max(len(estimated) - 1, 1) / (_POINTS - 1)
            for index in sorted({round(i * apart) for i in range(_POINTS)}):
                if index < len(estimated):
                    candidate = every[estimated[index]]
                    predicted = self.estimates.predict(candidate)
                    if predicted is not None:
                        made.append(self._exact(Found(candidate, predicted)))
        kinds = dict.fromkeys(p.kind for p in made)
        return tuple(p for kind in kinds for p in pareto([q for q in made if q.kind == kind]))

    @cached_property
    def _offers(self) -> list[list[Offer]]:
        """Settings each technique offers for this step, less those it refuses itself."""
        ladders = [list(kind.offers(self.context)) for kind in registered().values()]
        return [[o for o in ladder if self._applies(o)] for ladder in ladders if ladder]

    def _settings(self, allowed: Allowed) -> list[Setting]:
        return settings(self._offers, allowed, self.context.circumstances)

    def _applies(self, offer: Offer) -> bool:
        """Whether the technique accepts the model and the optimizer."""
        setup = Setup(
            self.context.model, self.context.optimizer,
            lambda b: b, lambda b: (), lambda v: None, lambda: None, wrapper=self._wrapper,
        )  # fmt: skip
        try:
            offer.technique.check(setup)
        except InputError:
            return False
        return True

    def _result(self, found: Found, budget_bytes: int) -> BudgetPlan:
        candidate = found.candidate
        self._settings_of[candidate.plan] = candidate.setting
        points = [self._point(c) for c in self.estimates.around(candidate)]
        return BudgetPlan(
            candidate.plan.techniques,
            budget_bytes=budget_bytes,
            budget_of=self.budget_of,
            margin=self.margin.fraction(budget_bytes),
            predicted=found.predicted,
            plain=self.estimates.plain,
            choices=choices(
                candidate,
                self.estimates,
                self.context.circumstances,
                self._settings(Allowed()),
                self.margin.limit(budget_bytes),
                found.lossless_seconds,
            ),
            front=pareto([self._exact(found), *points]),
            rates=self._rates,
        )

    def _too_small(self, budget_bytes: int, least: Found | None) -> BudgetError:
        limit = self.margin.limit(budget_bytes)
        known = budget_bytes if least is None else least.predicted.needed_bytes
        wider = [w for w in self._wider() if least is None or w[1].plan != least.candidate.plan]
        near = [(name, one) for name, one in wider if one.peak_bytes <= limit]
        hints: list[tuple[str, int]] = []
        for name, candidate in near or wider:  # an estimate that does not fit is not traced
            lower = self._tightest(candidate)
            if lower < known:
                # As asked for, with what was allowed before.
                hints.append((name, self.margin.budget_for(lower)))
                known = lower
            if lower <= limit:
                break  # enough: what is lossier still need not be named
        return budget_error(
            budget_bytes,
            self.margin,
            least,
            hints,
            splits=self.context.examples is not None,
            why=self.context.split.why if self.context.split.splits is False else "",
        )

    def _wider(self) -> list[tuple[str, Candidate]]:
        """Options that could be allowed, least lossy first, each with its smallest plan."""
        at = self.context.circumstances
        every = [offer for ladder in self._offers for offer in ladder]
        made: dict[Plan, tuple[str, Candidate]] = {}
        for allowed in self.allowed.wider(every, at):
            lossiest = max(self._settings(allowed)[::-1], key=lambda s: s.rank(at)[::2])
            lossy = lossiest.but(o for o in lossiest.offers if o.level(at) is not Level.NEAR)
            found = [self.estimates.least(s, _ABOUT) for s in (lossiest, lossy)]
            some = [one for one in found if one is not None]
            if some:
                least = min(some, key=lambda c: c.peak_bytes)
                made.setdefault(least.plan, (str(allowed), least))
        return list(made.values())

    def _tightest(self, least: Candidate) -> int:
        """Peak of the smallest plan, from its own step where that can run."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # left out, and why
            predicted = self.estimates.predict(least)
        return least.peak_bytes if predicted is None else predicted.needed_bytes

    def _point(self, candidate: Candidate) -> FrontPoint:
        kind = candidate.setting.level(self.context.circumstances).kind
        return FrontPoint(candidate.plan, candidate.peak_bytes, candidate.seconds, False, kind)

    def _exact(self, found: Found) -> FrontPoint:
        plan, predicted = found.candidate.plan, found.predicted
        assert predicted.seconds is not None
        kind = found.candidate.setting.level(self.context.circumstances).kind
        return FrontPoint(plan, predicted.peak_bytes, predicted.seconds, True, kind)


def needed_bytes(
    plan: BudgetPlan,
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    optimizer: OptimizerLike,
    device: str | None,
) -> int:
    """Bytes a budget must have for another batch by the same plan."""
    kind = next(model.parameters()).device.type if device is None else device
    trace = trace_plan(plan.plan, model, batch, loss=loss, optimizer=optimizer, device=kind)
    totals = device_timeline(trace).totals
    peak = int(totals.max(initial=0))
    if kind == "cpu":
        return peak + scratch_above(trace, totals)
    if plan.budget_of == "allocated":
        return peak
    first = any(technique.state_first for technique in plan.techniques)
    card = reserved(trace, limit_bytes=plan.budget_bytes, state_first=first)
    return card.captured_bytes if plan.predicted.captured else card.eager_bytes
