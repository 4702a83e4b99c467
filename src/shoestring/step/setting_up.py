"""From a plan to a setup: the plain step, and the techniques that transform it in their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..techniques.base import Run, Setup, Technique
from ..techniques.plan import Plan
from ..trace.failures import check_trainable, closure_named
from ..trace.fakes import adds_to_the_step, check_optimizer, unwrapped
from ..trace.tracing import Loss


def prepare(
    plan: Plan | Iterable[Technique],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss: Loss,
) -> tuple[Plan, Setup]:
    """Check what is given; the plan, and the setup of a plain step that it will transform."""
    check_trainable(model)
    check_optimizer(optimizer)
    if not callable(loss):
        raise InputError(f"{loss!r} is not a loss", hint="a function (model, batch) -> scalar")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held.isdisjoint(map(id, model.parameters())):
        raise InputError(
            "the optimizer holds none of the model's parameters: the model would not train",
            hint="build the optimizer from model.parameters()",
        )
    chosen = plan if isinstance(plan, Plan) else Plan(plan)
    own = unwrapped(optimizer)
    stepping = optimizer if adds_to_the_step(optimizer) else own

    def update() -> None:
        with closure_named(stepping):
            stepping.step()

    setup = Setup(
        model=model,
        optimizer=own,
        run=lambda batch: loss(model, batch),
        split=_whole,
        backward=lambda value: value.backward(),
        update=update,
        wrapper=optimizer if adds_to_the_step(optimizer) else None,
        loss=loss,
    )
    return chosen, setup


def revisable(before: Plan, after: Plan) -> bool:
    """Whether a step by the first plan can go on by the second: fixed techniques stay or come."""

    def fixed(plan: Plan) -> dict[str, Technique]:
        return {t.name: t for t in plan.techniques if not t.revisable}

    old, new = fixed(before), fixed(after)
    added = [new[name] for name in new.keys() - old.keys()]
    kept = all(new.get(name) == technique for name, technique in old.items())
    return kept and all(technique.addable for technique in added)


@dataclass(frozen=True)
class Base:
    """A setup before what can be revised: schedule and microbatches can be put on it anew."""

    run: Run
    split: Any
    backward: Any
    update: Any
    rounds_saved: bool
    undone: int
    """Steps back that belong to what came before."""

    @classmethod
    def of(cls, setup: Setup) -> Base:
        """As it is now."""
        undone = len(setup.undo)
        return cls(setup.run, setup.split, setup.backward, setup.update, setup.rounds_saved, undone)

    def restore(self, setup: Setup) -> None:
        """Take away what came after."""
        for undo in reversed(setup.undo):
            undo()
        setup.undo.clear()
        setup.run, setup.split = self.run, self.split
        setup.backward, setup.update = self.backward, self.update
        setup.rounds_saved = self.rounds_saved


def transform(setup: Setup, parts: Iterable[Any], *, keep_undo: bool = False) -> Base:
    """Apply all parts or none; `keep_undo` to take all of them back, not only what is revisable."""
    for part in parts:
        part.check(setup)
    base: Base | None = None
    try:
        for part in parts:
            if base is None and getattr(part, "revisable", False):
                base = Base.of(setup)
            part.apply(setup)
            setup.rounds_saved |= getattr(part, "rounds_saved", False)
    except BaseException:
        for undo in reversed(setup.undo):
            undo()
        raise
    base = base or Base.of(setup)
    # The steps back before it hold what the model was, in memory the plan has spent otherwise.
    if not keep_undo:
        del setup.undo[: base.undone]
    return base


def _whole(batch: Any) -> Iterator[tuple[Any, Any]]:
    yield batch, None
