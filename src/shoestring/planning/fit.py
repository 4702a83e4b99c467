"""`fit`: plan for a budget and apply; where a step does not stay within it, tighten and go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import BudgetError, InputError, TraceError
from ..step.apply import apply
from ..step.clipping import Clip
from ..step.holding import Hold, shapes_of
from ..step.setting_up import revisable
from ..step.step import Step
from ..techniques.base import LossUnits
from ..techniques.splitting.find import find_units
from ..techniques.splitting.units import AUTO
from ..torch_private.fake_tensors import FakeTensorMode
from ..trace.failures import check_trainable
from ..trace.fakes import check_optimizer, fake_batch, fake_model, make_optimizer
from ..trace.tracing import Loss
from ..units import format_size, parse_size
from .by_running import plan_by_running, untraced
from .planner import MARGIN, Planner
from .result import BudgetOf, BudgetPlan
from .settings import Setting
from .trial import Trials, plan_on_device, trials_for

_LESS = 0.9
"""Of the predicted peak, planned for when the device ran out of memory."""
_SPARE = 0.99


def fit(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    budget: str | int,
    allow: str | Iterable[str] | None = None,
    enforce: bool = False,
    budget_of: BudgetOf = "reserved",
    clip: float | Clip | None = None,
    units: LossUnits = AUTO,
) -> Step:
    """Make a training step that stays within the budget: `plan`, then `apply`.

    If a step needs more than the budget, or the device runs out of memory, the step warns with
    the numbers (BudgetWarning), restores weights, buffers and random streams, and repeats the
    minibatch by a tighter plan: no minibatch is lost. For a model that cannot be traced, `fit`
    finds the plan by running it, and has no tighter one.

    Args:
        model: Changed in place.
        batch: One batch, as your training loop has it; others may have other shapes.
        loss: `(model, batch) -> scalar`.
        optimizer: Over the model's parameters; changed in place.
        budget: Bytes, or text such as "8 GB".
        allow: As for `plan`.
        enforce: CUDA's allocator gives out no more than the budget.
        budget_of: As for `plan`.
        clip: As for `apply`.
        units: As for `plan`.

    Returns:
        A `Step`; `step(batch)` is forward, backward and update.

    Examples:
        >>> step = ss.fit(model, batch, loss=loss, optimizer=optimizer, budget="8 GB")
    """
    check_trainable(model)
    device = next(model.parameters()).device
    if enforce and device.type != "cuda":
        raise InputError(
            "only CUDA's allocator can enforce a budget",
            hint="on the CPU limit the process, with a cgroup or ulimit -d",
        )
    budget_bytes = parse_size(budget)
    step = fitted(
        model, batch, loss=loss, optimizer=optimizer, budget_bytes=budget_bytes, allow=allow,
        budget_of=budget_of, made=lambda plan: apply(plan, model, optimizer, loss=loss, clip=clip),
        by_norm=getattr(Clip.of(clip), "norm", None) is not None, units=units,
    )  # fmt: skip
    if enforce:
        _enforce(device, budget_bytes)
    return step


def fitted(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    budget_bytes: int,
    allow: str | Iterable[str] | None,
    made: Callable[[BudgetPlan], Step],
    budget_of: str = "reserved",
    held_bytes: int = 0,
    waiting: bool = False,
    among: Callable[[Setting], bool] = lambda setting: True,
    by_norm: bool = False,
    units: LossUnits = AUTO,
) -> Step:
    """Plan, have the step `made` from the plan, and watch it; see `fit`.

    `held_bytes` of the budget are somebody else's while the step runs; gradients of earlier batches
    may be `waiting`; `among` are the settings that may be taken; gradients are clipped `by_norm`.
    """
    check_trainable(model)
    check_optimizer(optimizer)
    device = next(model.parameters()).device
    split = find_units(model, batch, loss, told=units)  # here, on real values: planning has none
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake, mapping = fake_model(model, mode)  # what is planned for stays, whatever becomes of it

    def planner_for(batch: Any) -> Planner:
        given: dict[str, Any] = {
            "loss": loss, "allow": allow, "device": device.type, "split": split,
            "budget_of": budget_of, "by_norm": by_norm, "waiting": waiting,
        }  # fmt: skip
        updates = make_optimizer(optimizer, fake, mapping)
        try:
            return Planner(fake, fake_batch(batch, mode), optimizer=updates, **given)
        except TraceError as error:
            if not error.values:
                raise
        return Planner(model, batch, optimizer=optimizer, **given)  # its values are needed

    try:
        trials = trials_for(None, budget_of, model, batch, loss, optimizer, waiting=waiting)
        tighter = _Tighter(planner_for, batch, budget_bytes, held_bytes, among, trials)
    except Exception as error:
        because = untraced(error)
        if because is None:
            raise
        if waiting:  # steps are measured without them
            held_bytes += gradient_bytes(model)
        found = plan_by_running(
            model, batch, loss=loss, optimizer=optimizer, budget_bytes=budget_bytes - held_bytes,
            margin=MARGIN[device.type], allow=allow, because=because, units=units,
        )  # fmt: skip
        return made(found)
    step = made(tighter.first)
    assert isinstance(step.plan, BudgetPlan)
    step._hold = Hold(step, step.plan, tighter)
    return step


def gradient_bytes(model: nn.Module) -> int:
    """Of all that trains."""
    return sum(p.nbytes for p in model.parameters() if p.requires_grad)


class _Tighter:
    """Plans again until what is measured fits the budget that was asked for.

    For a batch of other shapes than the last plan was for, that is a plan for the same budget; for
    one of the same shapes, a plan for less.
    """

    def __init__(
        self,
        planner_for: Callable[[Any], Planner],
        batch: Any,
        budget_bytes: int,
        held_bytes: int = 0,
        among: Callable[[Setting], bool] = lambda setting: True,
        trials: Trials | None = None,
    ) -> None:
        self._among = among
        self._planner_for, self._budget_bytes = planner_for, budget_bytes
        self._first_bytes = max(budget_bytes - held_bytes, 0)
        self._shapes, self._planner = shapes_of(batch), planner_for(batch)
        self._planned_bytes = {self._shapes: self._first_bytes}
        if trials is None:
            found = self._planner.plan(self._first_bytes, among=among)
        else:
            found = plan_on_device(self._planner, trials, self._first_bytes, among)
        self.first = replace(found, budget_bytes=budget_bytes)

    def __call__(self, step: Step, batch: Any, peak_bytes: int | None) -> None:
        now, shapes = step.plan, shapes_of(batch)
        assert isinstance(now, BudgetPlan)
        if shapes != self._shapes:
            self._shapes, self._planner = shapes, self._planner_for(batch)
        if shapes not in self._planned_bytes:
            self._planned_bytes[shapes] = self._first_bytes
        elif peak_bytes is None:
            least = min(self._planned_bytes[shapes], now.predicted.needed_bytes)
            self._planned_bytes[shapes] = int(least * _LESS)
        else:
            off = self._budget_bytes / peak_bytes
            self._planned_bytes[shapes] = int(self._planned_bytes[shapes] * off * _SPARE)

        def alike(setting: Setting) -> bool:
            return self._among(setting) and revisable(now, setting.plan())

        try:
            found = self._planner.plan(self._planned_bytes[shapes], among=alike)
        except BudgetError as error:
            raise BudgetError(
                f"nothing tighter than {format_size(now.predicted.peak_bytes)} is left: "
                f"{error.message}",
                hint=error.hint,
                smallest_bytes=error.smallest_bytes,
            ) from None
        step.revise(replace(found, budget_bytes=self._budget_bytes))


def _enforce(device: torch.device, budget_bytes: int) -> None:
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(budget_bytes / total, 1.0), device)
