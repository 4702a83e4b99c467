"""Step: forward, backward, update on real tensors, as a plan transformed them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..memory.live.live import LivePeak, live_at_peak
from ..memory.live.measure import Measurement, track
from ..techniques.base import Run, Setup, Technique
from ..techniques.plan import Plan
from ..trace.capture import Loss, check_loss, check_trainable
from ..trace.fakes import adds_to_the_step, check_optimizer, is_fake, unwrapped
from ..trace.graph import Phase
from .graph import GraphRunner, on_device, why_not
from .holding import Hold


class Step:
    """One training step under a plan; call it with a minibatch."""

    def __init__(self, setup: Setup, plan: Plan) -> None:
        self._setup = setup
        self.plan = plan
        self._in_place = False
        self._graph = self._runner()
        self.measured: Measurement | None = None
        """What the last `measure` found."""
        self.loss: torch.Tensor | None = None
        """Of the minibatch that `measure` ran, detached."""
        self._hold: Hold | None = None
        """Watches the budget the plan is for, if it is for one."""
        self._base: Base | None = None
        """What `revise` goes back to."""

    def _runner(self) -> GraphRunner | None:
        if why_not(self._setup) is not None:
            return None
        return GraphRunner(self._setup, self._compute, in_place=self._in_place)

    @property
    def model(self) -> nn.Module:
        """The model, transformed."""
        return self._setup.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer, over the transformed parameters."""
        return self._setup.optimizer

    def __call__(self, batch: Any) -> torch.Tensor:
        """Forward, backward, update; returns the loss of the minibatch, detached."""
        self._drop_gradients()  # a backward pass of the user's own may have left some
        with self._on_model_device():
            return self._run(batch) if self._hold is None else self._hold(batch)

    def _on_model_device(self) -> AbstractContextManager[Any]:
        """On the model's GPU, which need not be the current one."""
        first = next(self.model.parameters())
        real = first.is_cuda and not is_fake(first)
        return torch.cuda.device(first.device) if real else nullcontext()

    def _run(self, batch: Any) -> torch.Tensor:
        if self._graph is None:
            loss = self._compute(batch)
        else:
            loss = self._graph(batch)
        if self._after() and self._graph is not None:
            self._graph.drop()
        return loss

    @property
    def captured(self) -> bool:
        """Whether the step runs as one CUDA graph now."""
        return self._graph is not None and self._graph.captured

    @property
    def why_not_captured(self) -> str | None:
        """Why the step does not run as one CUDA graph now; None where it does."""
        return why_not(self._setup) if self._graph is None else self._graph.why_not

    def use_graph(self, wanted: bool, why: str = "use_graph(False) was called") -> None:
        """On CUDA: capture the step where its shapes allow it (the default), or run it eagerly."""
        if self._graph is not None:
            self._graph.drop()
            self._graph.enabled = wanted
            self._graph.refused = None if wanted else why

    def expect_in_place(self) -> None:
        """Every batch will be written over the last one: no captured step copies it."""
        self._in_place = True
        if self._graph is not None:
            self._graph.in_place = True

    @property
    def measurable(self) -> bool:
        """Whether `measure` can say what a step needs."""
        return True

    def measure(self, batch: Any) -> Measurement:
        """Run one step and return its peak, tracked storage by storage or by the allocator.

        Meant in steady state: call the step at least once before.
        """
        self._drop_gradients()
        gc.collect()
        if next(self.model.parameters()).device.type == "cuda":
            with self._on_model_device():
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                self.loss = self._run(batch)
                torch.cuda.synchronize()
                peak_bytes = max(self.captured_peak_bytes, torch.cuda.max_memory_allocated())
            self.measured = Measurement("cuda", peak_bytes, {})
        else:
            self.measured = track(
                lambda entering: self._kept(self._compute(batch, entering)),
                self.model,
                batch,
                self.optimizer,
            )
            self._after()
        return self.measured

    def live(self, batch: Any) -> LivePeak:
        """On CUDA: run one step eagerly and say what was allocated at its peak."""
        self._drop_gradients()
        device = next(self.model.parameters()).device
        moved = on_device(device, batch)
        with self._on_model_device():
            found = live_at_peak(
                lambda entering: self._compute(moved, entering), self.model, moved, self.optimizer
            )
        self._after()
        return found

    def _kept(self, loss: torch.Tensor) -> None:
        self.loss = loss

    @property
    def loss_scale(self) -> torch.Tensor | None:
        """What the loss is multiplied by before the backward pass; None without a scale."""
        scaling = self._setup.loss_scale
        return None if scaling is None else scaling.scale

    @property
    def counts(self) -> dict[str, int]:
        """What techniques counted since the first update, by name; waits for the device."""
        made: dict[str, int] = {}
        for item in self._setup.state.values():
            made |= getattr(item, "counts", dict)()
        return made

    @property
    def captured_peak_bytes(self) -> int:
        """Allocated at most while the graph in use was captured; 0 without one."""
        return 0 if self._graph is None else self._graph.peak_bytes

    def _after(self) -> bool:
        """What follows the update; whether it changed the tensors a captured step refers to."""
        return any([bool(call()) for call in self._setup.after_update])

    def _compute(
        self, batch: Any, entering: Callable[[Phase], None] = lambda phase: None
    ) -> torch.Tensor:
        try:
            return self._computed(batch, entering)
        except BaseException:  # the next step must not add to what this one left
            self._drop_gradients()
            raise

    def _drop_gradients(self) -> None:
        """Those too of parameters that the optimizer does not hold."""
        self._setup.optimizer.zero_grad(set_to_none=True)
        for parameter in self._setup.model.parameters():
            parameter.grad = None

    def _computed(self, batch: Any, entering: Callable[[Phase], None]) -> torch.Tensor:
        setup = self._setup
        total: torch.Tensor | None = None
        for part, weight in setup.split(batch):
            entering(Phase.FORWARD)
            value = setup.run(part)
            check_loss(value)
            weighted = _weighted(value, weight)
            entering(Phase.BACKWARD)
            setup.backward(weighted)
            shown = weighted.detach()
            total = shown if total is None else total + shown
            del value, weighted
        entering(Phase.OPTIMIZER)
        setup.update()
        self._drop_gradients()
        assert total is not None
        return total

    def revise(self, plan: Plan) -> None:
        """Go on by a plan that differs in what can be changed between two updates."""
        before = self.plan
        if self._base is None or not revisable(before, plan):
            fixed = [t.name for t in before.techniques if not t.revisable]
            raise InputError(
                f"a step cannot change its {' or '.join(fixed) or 'plan'}",
                hint="train on from the weights with a new model and a new step",
            )
        self._base.restore(self._setup)
        held = [t.name for t in before.techniques if not t.revisable]
        try:
            self._base = transform(self._setup, plan.without(*held).techniques)
        except BaseException:
            self._base = transform(self._setup, before.without(*held).techniques)
            raise
        self.plan = plan
        self._graph = self._runner()

    def __deepcopy__(self, memo: Any) -> Step:
        raise InputError(
            "a step cannot be copied: it would go on training the model it was made for",
            hint="copy the model, and apply the plan to the copy with an optimizer of its own",
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that outlives a step."""
        own = {name: item.state_dict() for name, item in self._setup.state.items()}
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "techniques": own,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of a step with the same plan.

        InputError for another one, before anything changes.
        """
        if lacking := [name for name in self._setup.state if name not in state["techniques"]]:
            raise InputError(
                f"the state has no {', '.join(lacking)}: a step of another plan saved it",
                hint="load its 'model' into step.model, and start the optimizer anew",
            )
        if more := [name for name in state["techniques"] if name not in self._setup.state]:
            raise InputError(
                f"the state has {', '.join(more)}, which this step has not: a step of another plan "
                "saved it, and stored its numbers otherwise",
                hint="apply the plan it was saved under",
            )
        for item in self._setup.state.values():
            check = getattr(item, "check_state", None)
            if check is not None:
                check(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, item in self._setup.state.items():
            item.load_state_dict(state["techniques"][name])


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
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held.isdisjoint(map(id, model.parameters())):
        raise InputError(
            "the optimizer holds none of the model's parameters: the model would not train",
            hint="build the optimizer from model.parameters()",
        )
    chosen = plan if isinstance(plan, Plan) else Plan(plan)
    own = unwrapped(optimizer)
    stepping = optimizer if adds_to_the_step(optimizer) else own
    setup = Setup(
        model=model,
        optimizer=own,
        run=lambda batch: loss(model, batch),
        split=_whole,
        backward=lambda value: value.backward(),
        update=lambda: stepping.step() and None,
        wrapper=None if stepping is own else optimizer,
        loss=loss,
    )
    return chosen, setup


def apply_alone(
    plan: Plan | Iterable[Technique],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss: Loss,
) -> Step:
    """The step of one process; see `apply`."""
    chosen, setup = prepare(plan, model, optimizer, loss=loss)
    base = transform(setup, chosen.techniques)
    step = Step(setup, chosen)
    step._base = base
    if chosen.budget_bytes is not None:
        step._hold = Hold(step, chosen)
        if not chosen.predicted.captured:
            step.use_graph(False, "the budget has no room for a graph")
    return step


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
    undone: int
    """Steps back that belong to what came before."""

    @classmethod
    def of(cls, setup: Setup) -> Base:
        """As it is now."""
        return cls(setup.run, setup.split, setup.backward, setup.update, len(setup.undo))

    def restore(self, setup: Setup) -> None:
        """Take away what came after."""
        for undo in reversed(setup.undo):
            undo()
        setup.undo.clear()
        setup.run, setup.split = self.run, self.split
        setup.backward, setup.update = self.backward, self.update


def transform(setup: Setup, parts: Iterable[Any]) -> Base:
    """Apply all parts or none."""
    for part in parts:
        part.check(setup)
    base: Base | None = None
    try:
        for part in parts:
            if base is None and getattr(part, "revisable", False):
                base = Base.of(setup)
            part.apply(setup)
    except BaseException:
        for undo in reversed(setup.undo):
            undo()
        raise
    base = base or Base.of(setup)
    # The steps back before it hold what the model was, in memory the plan has spent otherwise.
    del setup.undo[: base.undone]
    return base


def _weighted(loss: torch.Tensor, weight: float | torch.Tensor | None) -> torch.Tensor:
    """A part's loss in the loss of its minibatch; of a part that has no unit, 0/0, nothing.

    A weight on the CPU beside a loss elsewhere is a number to its kernel, and known not to be zero.
    """
    if weight is None:
        return loss
    if not isinstance(weight, torch.Tensor):
        return loss * weight
    weighted = loss * weight.to(loss.dtype)
    return weighted.masked_fill(weight == 0, 0) if weight.device == loss.device else weighted


def _whole(batch: Any) -> Iterator[tuple[Any, Any]]:
    yield batch, None
