"""A plan for several ranks, from one process: what each of them takes is predicted by rule.

The search knows steps of one process. What a rank has less, or more, than one process with the same
share of the batch is added to the budget, the plan that is found is predicted as one of the ranks,
and where that is too much the search goes on with so much less.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ..errors import BudgetError, InputError
from ..memory.cpu.scratch import scratch_above
from ..memory.device import device_timeline
from ..memory.prediction import Prediction
from ..memory.reserved import reserved
from ..memory.sharded import replicated, sharded
from ..step.group import KINDS
from ..step.trace_step import trace_plan
from ..techniques.base import Setup
from ..techniques.plan import Plan
from ..trace.graph import Trace
from ..trace.split import cut, examples_of
from ..units import format_size
from .result import BudgetPlan
from .settings import Setting

_TRIES = 6


class SharedStep:
    """How many processes share a step, and how."""

    def __init__(self, count: int, sharding: str) -> None:
        if not isinstance(count, int) or not 1 <= count <= 100_000:
            raise InputError(f"no step has {count} ranks", hint="a whole number from 1")
        if sharding not in KINDS:
            raise InputError(f"unknown sharding {sharding!r}", hint="'ddp' or 'fsdp'")
        self.count, self.sharding = count, sharding

    def share(self, batch: Any) -> Any:
        """The largest part of a batch that one of them runs."""
        examples = examples_of(batch)
        if examples is None or examples < self.count:
            raise InputError(
                f"a minibatch of {examples} has no share for each of {self.count} ranks",
                hint="a larger minibatch or fewer ranks",
            )
        return cut(batch, 0, -(-examples // self.count))

    def refuses(self, plan: Plan, model: nn.Module, optimizer: Any) -> InputError | None:
        """Why ranks cannot share a step by the plan; None where they can."""
        setup = Setup(model, optimizer, lambda b: b, lambda b: (), lambda v: None, lambda: None)
        try:
            for technique in plan.techniques:
                technique.check_ranks(setup, self.sharding)
            if self.sharding == "fsdp":
                from ..step.sharding import check_sharding  # half a second to import

                check_sharding(setup, plan)
        except InputError as error:
            return error
        return None

    def of_one(self, trace: Trace, plan: Plan, model: nn.Module, batch: Any) -> Trace:
        """The step of the rank with the largest share, from that of one process with it."""
        if self.count == 1:
            return trace
        if self.sharding == "ddp":
            return replicated(trace)
        from ..step.sharding import gathered_units

        at_once, examples = plan.examples_at_once(batch), examples_of(batch) or 1
        return sharded(
            trace, self.count, gathered_units(model, plan),
            keeps_gathered=any(technique.keeps_gathered for technique in plan.techniques),
            accumulates=at_once is not None and at_once < examples,
            releases=any(t.updates_in_backward and not t.is_neutral for t in plan.techniques),
        )  # fmt: skip


def plan_for_ranks(planner: Any, ranks: SharedStep, budget_bytes: int, loss: Any) -> BudgetPlan:
    """The plan of a planner, which is for a rank's share of the batch, that fits every rank."""
    context = planner.context
    model, batch, device = context.model, context.batch, context.device
    if (why := ranks.refuses(Plan(), model, context.optimizer)) is not None:
        raise why
    planner.estimates.captures = False  # collectives are not captured

    def predicted(plan: Plan, like: Prediction) -> Prediction:
        trace = trace_plan(
            plan, model, batch, loss=loss, optimizer=context.optimizer, device=device,
            captured=False if device == "cuda" else None,
        )  # fmt: skip
        own = ranks.of_one(trace, plan, model, batch)
        totals = device_timeline(own).totals
        first = any(technique.state_first for technique in plan.techniques)
        of_card = device == "cuda" and planner.budget_of == "reserved"
        return replace(
            like, peak_bytes=int(totals.max(initial=0)), captured=False, graph_bytes=0,
            scratch_bytes=scratch_above(own, totals) if device == "cpu" else 0,
            reserved_bytes=reserved(own, state_first=first).eager_bytes if of_card else 0,
        )  # fmt: skip

    def allowed(setting: Setting) -> bool:
        return ranks.refuses(setting.plan(), model, context.optimizer) is None

    limit = int(budget_bytes * (1 - planner.margin.share))
    alone = planner.estimates.plain
    plain = predicted(Plan(), alone)
    less = alone.needed_bytes - plain.needed_bytes
    for _ in range(_TRIES):
        try:
            found = planner.plan(max(budget_bytes + less, 1), among=allowed)
        except BudgetError as error:
            raise _too_small(error, ranks, budget_bytes, less) from None
        own = predicted(found.plan, found.predicted)
        if own.needed_bytes <= limit:
            return replace(
                found, budget_bytes=budget_bytes, predicted=own, plain=plain, front=(),
                margin=planner.margin.share, ranks=ranks.count, sharding=ranks.sharding,
            )  # fmt: skip
        less -= max(own.needed_bytes - limit, budget_bytes // 200)
    raise _too_small(None, ranks, budget_bytes, less)


def _too_small(
    error: BudgetError | None, ranks: SharedStep, budget_bytes: int, less: int
) -> BudgetError:
    told = (
        f"no plan fits {format_size(budget_bytes)} on each of {ranks.count} {ranks.sharding} ranks"
    )
    smallest = None if error is None else error.smallest_bytes
    if smallest is not None and smallest > less:
        told += f"; the smallest found is about {format_size(smallest - less)}"
    hint = "more ranks, or sharding='fsdp'" if ranks.sharding == "ddp" else "more ranks"
    return BudgetError(told, hint=f"{hint}; or a smaller batch")
