"""A step inside somebody else's training loop.

The trainer goes on to clip, to update, to schedule, to log and to save. A hosted step runs the
forward and backward passes by the plan, and takes part in `optimizer.step()` where the plan has an
update of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import BudgetError, InputError
from ..planning.fit import fitted
from ..planning.settings import Setting
from ..step.clipping import Clip, clip_gradients
from ..step.step import Step, apply_alone
from ..techniques.base import Technique
from ..techniques.plan import Plan
from ..trace.batches import map_tensors
from ..trace.fakes import passing_on, unwrapped
from ..trace.tracing import Loss
from ..units import format_size, parse_size

Undo = Callable[[], None]


@dataclass(frozen=True)
class Wanted:
    """The user's request to a trainer: a budget, or a plan."""

    budget_bytes: int | None = None
    plan: Plan | None = None
    allow: str | Iterable[str] | None = "lossless"

    @classmethod
    def of(
        cls,
        budget: str | int | None,
        plan: Plan | Iterable[Technique] | str | None,
        allow: str | Iterable[str] | None,
    ) -> Wanted:
        """Read it; a plan may be the name of its file."""
        if (budget is None) == (plan is None):
            raise InputError(
                "a trainer takes a budget or a plan",
                hint='budget="24 GB", or plan=ss.plan(…), a list of techniques, or "plan.toml"',
            )
        if isinstance(plan, str):
            plan = Plan.load(plan)
        chosen = None if plan is None else plan if isinstance(plan, Plan) else Plan(plan)
        return cls(None if budget is None else parse_size(budget), chosen, allow)


def hosted_step(
    wanted: Wanted,
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[torch.Tensor], None] | None = None,
    held_bytes: int = 0,
    waiting: bool = False,
    same_state: bool = False,
) -> Step:
    """The step that the trainer will call with `update=False`.

    `same_state`: the trainer itself works on weights and gradients, as DDP and scalers do.

    `held_bytes`: what the trainer itself keeps on the device, such as DDP's buckets. `waiting`: it
    adds the gradients of several batches.
    """
    inner = unwrapped(optimizer)

    def made(plan: Plan) -> Step:
        return apply_alone(plan, model, inner, loss=loss, backward=backward)

    def among(setting: Setting) -> bool:
        """Gradients wait for the trainer's update."""
        gone = any(t.updates_in_backward for t in setting.techniques)
        return not gone and not (same_state and changes_state(setting.plan()))

    if wanted.plan is not None:
        if same_state and changes_state(wanted.plan):
            raise InputError(
                f"on several ranks or beside a gradient scaler a trainer cannot train by "
                f"{wanted.plan.short()}",
                hint='leave what changes weights or state out of the plan: allow="lossless"',
            )
        if any(t.updates_in_backward for t in wanted.plan.techniques):
            raise InputError(
                f"a trainer updates after the backward pass, {wanted.plan.short()} within it",
                hint="leave that out of the plan, or use ss.apply in a loop of your own",
            )
        step = made(wanted.plan)
    else:
        assert wanted.budget_bytes is not None
        try:
            step = fitted(
                model, batch, loss=loss, optimizer=inner, allow=wanted.allow, made=made,
                budget_bytes=wanted.budget_bytes, held_bytes=held_bytes, waiting=waiting,
                among=among,
            )  # fmt: skip
        except BudgetError as error:
            if held_bytes:
                error.add_note(f"{format_size(held_bytes)} of the budget are DDP's buckets")
            raise
    step.use_graph(False)  # the trainer updates, outside of it
    return step


def route_updates(optimizer: torch.optim.Optimizer, step_of: Callable[[], Step | None]) -> Undo:
    """Have `optimizer.step()` make the step's update, once; gradients stay for who looks at them.

    To be called before the trainer calls `optimizer.step`: a closure may only then make the step.
    The step's own update may call the optimizer's: that call is the plain one.
    """
    plain, inside = optimizer.step, False

    def routed(_: Any, closure: Callable[[], float] | None = None) -> Any:
        nonlocal inside
        if inside:
            return plain(closure)
        found = None if closure is None else closure()
        step = step_of()
        if step is None or not step.accumulated:
            plain()
            return found
        inside = True
        try:
            step._update()
            step._after_update()
        finally:
            inside = False
        return found

    method = MethodType(passing_on(routed, plain), optimizer)  # as schedulers ask
    optimizer.step = method  # type: ignore[method-assign]

    def undo() -> None:
        optimizer.step = plain  # type: ignore[method-assign]

    return undo


def release(step: Step) -> None:
    """Leave the model as it was, but for weights that the plan stores otherwise."""
    if step._base is not None and not changes_state(step.plan):
        step._base.restore(step._setup)


def synchronized(model: DistributedDataParallel, split: Any) -> Any:
    """The same parts; the ranks exchange gradients in the backward pass of the last one only."""

    def parts(batch: Any) -> Any:
        wanted = model.require_backward_grad_sync  # False within the Trainer's own no_sync
        given = iter(split(batch))
        part = next(given, None)
        try:
            while part is not None:
                following = next(given, None)
                model.require_backward_grad_sync = wanted and following is None
                yield part
                part = following
        finally:
            model.require_backward_grad_sync = wanted

    return parts


def as_given(step: Step, batch: Any) -> Any:
    """A batch that does not train, in the type that the plan gives those that do."""
    kinds = [t.input_dtype for t in step.plan.techniques if not t.is_neutral]
    target = next(filter(None, kinds), None)
    if target is None:
        return batch
    return map_tensors(lambda t: t.to(target) if t.is_floating_point() else t, batch)


def clip_scaled(step: Step, norm: float) -> torch.Tensor | None:
    """Clip gradients that the plan scales; None where it scales none, and the trainer can."""
    if step.loss_scale is None:
        return None
    return clip_gradients(Clip(norm=norm), step.model.parameters(), step.loss_scale)


@dataclass
class Part:
    """A microbatch: how much it counts in means, and its loss."""

    weight: Any
    loss: torch.Tensor | None = None


class BatchCount:
    """Whole numbers of an object that count its batches: the parts of a batch count as one.

    A number that grows by one in each part is such a count; other sums stay those of all parts.
    """

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._before = _whole_numbers(owner)

    def part_begins(self) -> None:
        """Take back what the part before it counted."""
        for name, value in _whole_numbers(self._owner).items():
            before = self._before.get(name, getattr(type(self._owner), name, None))
            if type(before) is int and value == before + 1:
                setattr(self._owner, name, before)


def _whole_numbers(owner: object) -> dict[str, int]:
    return {name: value for name, value in vars(owner).items() if type(value) is int}


def of_whole(values: list[Any], parts: list[Part], total: torch.Tensor) -> Any:
    """The value a batch logs, by its microbatches' values; if these are not numbers, the last.

    A value that is in every part the same multiple of the part's loss is that multiple of the
    batch's, which may be the sum of theirs. Any other is the mean, weighed; where all weights are
    zero, as of parts without a label, the plain one.
    """
    if not all(isinstance(value, (int, float, torch.Tensor)) for value in values):
        return values[-1]
    weights = [torch.as_tensor(part.weight, dtype=torch.float64) for part in parts]
    if not any(weights):
        weights = [torch.ones_like(weight) for weight in weights]
    kept = [torch.as_tensor(value).detach() for value in values]
    shares = torch.stack(weights) / sum(weights)
    held = torch.stack([value.double() for value in kept])
    whole = torch.tensordot(shares.to(held.device), held, dims=1)
    losses = [part.loss for part in parts if part.loss is not None]
    if len(losses) == len(values) and not kept[0].dim():
        each = torch.stack(losses).detach().to(held)
        times = (held / each)[each.abs().argmax()]  # a part without labels may have a loss of zero
        alike = ((held - times * each).abs() <= _ALIKE * held.abs()).all()
        whole = torch.where(alike, times * total.to(held), whole)
    if not isinstance(values[0], torch.Tensor):
        return whole.item()
    return whole.to(kept[0].dtype if kept[0].is_floating_point() else torch.float32)


_ALIKE = 1e-5
"""Two quotients that differ by rounding."""


def changes_state(plan: Plan) -> bool:
    """Whether weights or optimizer state differ from those of plain training in how they lie."""
    return any(not t.same_state and not t.is_neutral for t in plan.techniques)


@contextmanager
def library(name: str, least: str, extra: str) -> Iterator[None]:
    """Around the import of a library: one line where it is missing or too old."""
    hint = f"pip install 'shoestring[{extra}]'"
    try:
        found = version(name)
    except PackageNotFoundError:
        raise InputError(f"this needs {name}, which is not installed", hint=hint) from None
    if _numbers(found) < _numbers(least):
        raise InputError(
            f"this needs {name} {least} or later, {found} is installed",
            hint=f"pip install --upgrade '{name}>={least}'",
        )
    try:
        yield
    except ImportError as error:
        raise InputError(f"{name} cannot be imported: {error}", hint=hint) from None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
