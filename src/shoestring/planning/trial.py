"""Ask the device: run the step of a plan a few times, correct what was predicted, plan again.

    plan by rules ──► run its step on the device ──► does it hold? how long did it take?
          ▲                                                      │
          └── predictions of such plans, corrected ◄─────────────┘

Rules predict a step from its trace. What they get wrong on a model nobody has seen (gaps between
blocks, workspaces, the host's time for every kernel) a device that is there can say. A trial takes
what the plan takes and no more: the step runs under the budget. Afterwards weights, buffers,
streams and attributes are as they were. A trial costs a few steps, so only the plans that come out
best are tried.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import BudgetError, ShoestringError, first_line
from ..memory.prediction import Prediction
from ..step.holding import out_of_memory
from ..step.step import Step, apply_alone
from ..techniques.plan import Plan
from ..torch_private.cuda_memory import at_most, expand_segments
from ..trace.batches import tensors_of
from ..trace.fakes import (
    adds_to_the_step,
    copied_optimizer,
    is_fake,
    make_optimizer,
    unwrapped,
)
from ..trace.tracing import Loss
from ..trace.untouched import (
    Bystanders,
    NotWritten,
    WritesElsewhere,
    as_it_was,
    hooks_of,
    storages_now,
    storages_of,
)
from ..units import format_size, plural
from .result import BudgetPlan, Trial
from .settings import Setting

if TYPE_CHECKING:
    from .planner import Planner

MOST = 3
"""Plans that are tried because they may be faster."""
MOST_UNTIL_ONE_HOLDS = 8
"""Plans that are made while none was tried that holds."""
FASTER = 0.95
"""Of the time of a plan that holds: another one is taken only if it needs less than that."""
CLOSE = 1.25
"""Of the predicted time: a trial that took no more needs no other beside it."""
_WARM, _TIMED = 4, 3
"""Steps: the first makes state, the third is captured; then those that are timed."""
_PATIENCE_SECONDS = 8.0
"""After which no more steps of one trial begin."""
_MISSED = 0.03
"""Of the budget, taken to be missing where a step ran out of memory."""


class Trials:
    """Runs steps of plans on the user's own model and puts everything back."""

    waiting = False
    """Gradients of another batch are there when a step begins."""

    def __init__(self, model: nn.Module, batch: Any, loss: Loss, optimizer: Any) -> None:
        self._model, self._batch, self._loss = model, batch, loss
        self._optimizer = unwrapped(optimizer)
        self._device = next(model.parameters()).device
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    @classmethod
    def of(cls, model: nn.Module, batch: Any, loss: Loss, optimizer: Any) -> Trials | None:
        """None where a trial could not run, or could not be taken back.

        The optimizer's state and gradients that are there would need room twice.
        """
        tensors = [*model.parameters(), *model.buffers(), *tensors_of(batch)]
        if any(is_fake(t) or t.is_meta for t in tensors) or adds_to_the_step(optimizer):
            return None
        if len({p.device for p in model.parameters()}) != 1:
            return None
        if isinstance(optimizer, str):
            optimizer = make_optimizer(optimizer, model, {})
        inner = unwrapped(optimizer)
        if not isinstance(inner, torch.optim.Optimizer) or any(inner.state.values()):
            return None
        if any(p.grad is not None for p in model.parameters()):
            return None
        return cls(model, batch, loss, inner)

    def __enter__(self) -> Trials:
        """Copy weights and buffers to the host."""
        model = self._model
        unique = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self._kept = [(t, _on_host(t)) for t in unique.values()]
        return self

    def __exit__(self, *error: Any) -> None:
        """Put them back."""
        with torch.no_grad():
            for tensor, copied in self._kept:
                tensor.copy_(copied)
        self._kept = []

    def run(self, plan: BudgetPlan) -> Trial | None:
        """Some steps by the plan, within its budget; None where that is too little.

        ShoestringError where the plan does not run at all.
        """
        model = self._model
        others = Bystanders([self._loss, *hooks_of(model)], [model])
        on = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        with as_it_was(model, others), on, self._limited(plan.budget_bytes):
            return self._steps(plan)

    def _steps(self, plan: BudgetPlan) -> Trial | None:
        there = storages_now() - storages_of(self._model)
        step = self._applied(plan)
        try:
            return self._measured(step, there)
        except Exception as error:
            if not out_of_memory(error):
                raise
            return None
        finally:
            for undo in reversed(step._setup.undo):
                undo()
            step.optimizer.state.clear()

    def _applied(self, plan: BudgetPlan) -> Step:
        own: dict[int, torch.Tensor] = {
            id(p): p for group in self._optimizer.param_groups for p in group["params"]
        }
        copied = copied_optimizer(self._optimizer, own, {})
        for group in copied.param_groups:  # moves nothing, as far as numbers are finite
            if isinstance(group.get("lr"), float):
                group["lr"] = 0.0
        step = apply_alone(
            Plan(plan.techniques), self._model, copied, loss=self._loss, keep_undo=True
        )
        if not plan.predicted.captured:
            step.use_graph(False)
        return step

    def _measured(self, step: Step, there: Collection[int]) -> Trial:
        began, fastest, peak = time.perf_counter(), float("inf"), 0
        cuda = self._device.type == "cuda"
        others = self._reserved() if cuda else 0
        for number in range(_WARM + _TIMED):
            if number and self.waiting:
                step(self._batch, update=False)
            start = time.perf_counter()
            if number == 0:
                self._first(step, there)
            elif cuda or number != 1:
                step(self._batch)
            else:
                found = step.measure(self._batch)
                peak = found.peak_bytes + found.scratch_bytes
            if cuda:
                torch.cuda.synchronize(self._device)
            if number == 0:  # some compile first, or make state
                began = time.perf_counter()
            took = time.perf_counter() - start
            if number >= _WARM or number == 0:
                fastest = min(fastest, took)
            if number >= 2 and time.perf_counter() - began > _PATIENCE_SECONDS:
                fastest = min(fastest, took)
                break
        if cuda:
            peak = torch.cuda.max_memory_reserved(self._device) - others
        return Trial(peak, fastest, step.captured)

    def _first(self, step: Step, there: Collection[int]) -> None:
        """One step, watched: it ends before it writes what is not the model's."""
        with NotWritten(there):
            step(self._batch)

    def _reserved(self) -> int:
        """Reset the peak; bytes of what is there and is neither the model's nor the batch's."""
        own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
               for t in (*self._model.parameters(), *self._model.buffers(),
                         *tensors_of(self._batch)) if t.is_cuda}  # fmt: skip
        torch.cuda.reset_peak_memory_stats(self._device)
        return max(torch.cuda.memory_allocated(self._device) - sum(own.values()), 0)

    @contextmanager
    def _limited(self, budget_bytes: int | None) -> Iterator[None]:
        """As `Hold` has it: the allocator is held to the budget, beside what is not the step's."""
        if self._device.type != "cuda" or budget_bytes is None:
            yield
            return
        with torch.cuda.device(self._device):
            expand_segments()
            torch.cuda.empty_cache()
            try:
                with at_most(budget_bytes + self._reserved(), self._device):
                    yield
            finally:
                gc.collect()
                torch.cuda.empty_cache()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy there; zeros first, by all threads: one copy finds pages far slower."""
    return torch.zeros_like(tensor, device="cpu").copy_(tensor.detach())


def trials_for(
    wanted: bool | None,
    budget_of: str,
    model: nn.Module,
    batch: Any,
    loss: Loss,
    optimizer: Any,
    *,
    waiting: bool = False,
) -> Trials | None:
    """By default on CUDA; None where they are not wanted, or cannot be.

    A trial sees what is reserved, which a budget of allocated bytes does not count.
    """
    on_cuda = next(model.parameters()).is_cuda
    if wanted is False or (wanted is None and not on_cuda) or (on_cuda and budget_of != "reserved"):
        return None
    found = Trials.of(model, batch, loss, optimizer)
    if found is not None:
        found.waiting = waiting
    return found


def plan_on_device(
    planner: Planner,
    trials: Trials,
    budget_bytes: int,
    among: Callable[[Setting], bool] = lambda setting: True,
) -> BudgetPlan:
    """The fastest of the plans that were tried and held; BudgetError if none does.

    A plan whose step refuses to run, which its trace did not foresee, gives way to one of other
    techniques. If trials fail otherwise, or such plans do, too, it is returned as predicted.
    """
    tried: list[Plan] = []
    best: tuple[BudgetPlan, Trial] | None = None
    failed: tuple[BudgetPlan, str] | None = None
    refused: set[tuple[str, ...]] = set()
    with ExitStack() as stack:
        try:
            stack.enter_context(trials)
        except (MemoryError, RuntimeError):  # the host has no room for a copy of the weights
            return planner.plan(budget_bytes, among=among)
        for _ in range(MOST_UNTIL_ONE_HOLDS):
            try:
                found = planner.plan(
                    budget_bytes, among=lambda s: s.names not in refused and among(s)
                )
            except BudgetError:
                if best is None and failed is None:
                    raise
                break
            if any(t.replaces_parameters for t in found.techniques):
                if best is None:
                    return found
                break
            if found.plan in tried:
                if best is not None:
                    break
                planner.correct(found, int(_MISSED * budget_bytes), 1.0)  # it did not hold
                continue
            try:
                trial = trials.run(found)
            except Exception as error:  # a plan must not fail because its trial does
                failed = failed or (found, first_line(error))
                refused.add(planner.names_of(found))
                if best is not None or len(refused) >= MOST or not _refuses(error):
                    break
                continue
            tried.append(found.plan)
            more, factor = _off(found, trial, budget_bytes)
            planner.correct(found, more, factor)
            if trial is not None and trial.needed_bytes <= budget_bytes:
                if best is None or trial.seconds < FASTER * best[1].seconds:
                    best = found, trial
                if factor <= CLOSE:
                    break
            if best is not None and len(tried) >= MOST:
                break
    if best is None and failed is not None:
        plan, why = failed
        warnings.warn(f"not tried, {plan.short()}: {why}", RuntimeWarning, stacklevel=3)
        return plan
    if best is None:
        raise BudgetError(
            f"none of {plural(len(tried), 'plan')} that were predicted to fit "
            f"{format_size(budget_bytes)} held when its step ran on the device",
            hint="a larger budget; or trial=False, to use predictions only",
        )
    plan, held = best
    return replace(
        plan,
        predicted=_as_tried(plan.predicted, held),
        plain=planner.corrected(plan.plain),
        trial=held,
    )


def _refuses(error: Exception) -> bool:
    """Whether it is the step that does not run, and not what surrounds it."""
    return isinstance(error, ShoestringError) and not isinstance(error, WritesElsewhere)


def _off(found: BudgetPlan, trial: Trial | None, budget_bytes: int) -> tuple[int, float]:
    """Bytes that were missing in the prediction, and the factor to its seconds."""
    if trial is None:
        return int(_MISSED * budget_bytes), 1.0
    assert found.predicted.seconds is not None
    more = trial.needed_bytes - found.predicted.needed_bytes
    return max(more, 0), trial.seconds / max(found.predicted.seconds, 1e-9)


def _as_tried(predicted: Prediction, trial: Trial) -> Prediction:
    more: dict[str, Any] = {"seconds": trial.seconds, "costs": "a trial on the device"}
    if predicted.device == "cuda" and predicted.reserved_bytes:
        more |= {"reserved_bytes": trial.needed_bytes, "captured": trial.captured}
        more["peak_bytes"] = min(predicted.peak_bytes, trial.needed_bytes)
    return replace(predicted, **more)
