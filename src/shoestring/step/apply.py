"""Plan + model + optimizer + loss → step: forward, backward, update, on real tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import InputError
from ..memory.live.live import LivePeak, live_at_peak
from ..memory.live.measure import Measurement, track
from ..planning.result import BudgetPlan
from ..techniques import Checkpointing, Microbatching
from ..techniques.base import Run, Setup, Technique
from ..techniques.plan import Plan
from ..trace.capture import Loss, check_loss, check_trainable
from ..trace.fakes import check_optimizer, is_fake
from ..trace.graph import Phase
from .graph import GraphRunner, can_capture, on_device
from .holding import Hold

if TYPE_CHECKING:
    from .distributed import Ranks
    from .shares import Parallel


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
        precision = self.plan.precision
        kind = "fp32" if precision is None else precision.kind
        if not can_capture(self._setup, kind):
            return None
        noisy = precision is not None and precision.rounding == "stochastic"
        return GraphRunner(self._setup, self._compute, kind, noisy=noisy, in_place=self._in_place)

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
        with self._there():
            return self._run(batch) if self._hold is None else self._hold(batch)

    def _there(self) -> AbstractContextManager[Any]:
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

    def use_graph(self, wanted: bool) -> None:
        """On CUDA: capture the step where its shapes allow it (the default), or run it eagerly."""
        if self._graph is not None:
            self._graph.drop()
            self._graph.enabled = wanted

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
            with self._there():
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
        with self._there():
            found = live_at_peak(
                lambda entering: self._compute(moved, entering), self.model, moved, self.optimizer
            )
        self._after()
        return found

    def _kept(self, loss: torch.Tensor) -> None:
        self.loss = loss

    @property
    def loss_scale(self) -> torch.Tensor | None:
        """What FP16's loss is multiplied by now; None without one."""
        return getattr(getattr(self._setup.state.get("precision"), "scale", None), "scale", None)

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
        """Go on by a plan that differs in checkpointing, microbatches, or adds a precision."""
        before = self.plan
        changed = before.precision is not None and plan.precision != before.precision
        if self._base is None or changed or plan.sparsity != before.sparsity:
            raise InputError(
                "a step cannot change its density, nor a precision it has",
                hint="train on from the weights with a new model and a new step",
            )
        self._base.restore(self._setup)
        new = plan if before.precision is None else replace(plan, precision=None)
        try:
            self._base = _transform(self._setup, replace(new, sparsity=None).techniques)
        except BaseException:
            old = replace(before, sparsity=None, precision=None)
            self._base = _transform(self._setup, old.techniques)
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
        """Go on from a `state_dict`."""
        if lacking := [name for name in self._setup.state if name not in state["techniques"]]:
            raise InputError(
                f"the state has no {', '.join(lacking)}: a step of another plan saved it",
                hint="load its 'model' into step.model, and start the optimizer anew",
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, item in self._setup.state.items():
            item.load_state_dict(state["techniques"][name])


def apply(
    plan: Plan | Iterable[Technique],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss: Loss,
    parallel: str | Parallel | None = None,
) -> Step:
    """Transform the model and optimizer in place and return the step that trains them.

    Everything is checked before anything is changed; if a technique still fails, those before it
    are undone and the model and optimizer are as they were. `parallel`, "ddp" or "fsdp", makes it
    one step of all ranks of the process group.
    """
    check_trainable(model)
    check_optimizer(optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held.isdisjoint(map(id, model.parameters())):
        raise InputError(
            "the optimizer holds none of the model's parameters: the model would not train",
            hint="build the optimizer from model.parameters()",
        )
    chosen = plan if isinstance(plan, Plan) else Plan.of(plan)
    setup = Setup(
        model=model,
        optimizer=optimizer,
        run=lambda batch: loss(model, batch),
        split=_whole,
        backward=lambda value: value.backward(),
        update=lambda: optimizer.step() and None,
        loss=loss,
    )
    ranks = None if parallel is None else _ranks(parallel, chosen)
    parts: list[Any] = list(chosen.techniques)
    if ranks is not None:  # microbatches come last: ranks add what all of theirs accumulated
        parts.insert(len(parts) - (chosen.microbatching is not None), ranks)
    base = _transform(setup, parts)
    if ranks is not None:
        return ranks.step(setup)
    step = Step(setup, chosen)
    step._base = base
    if isinstance(chosen, BudgetPlan):
        step._hold = Hold(step, chosen)
    return step


@dataclass(frozen=True)
class Base:
    """A setup before its schedule: checkpointing and microbatches can be put on it anew."""

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
        """Take the schedule away."""
        for undo in reversed(setup.undo):
            undo()
        setup.undo.clear()
        setup.run, setup.split = self.run, self.split
        setup.backward, setup.update = self.backward, self.update


def _transform(setup: Setup, parts: Iterable[Any]) -> Base:
    """Apply all parts or none."""
    for part in parts:
        part.check(setup)
    base: Base | None = None
    try:
        for part in parts:
            if base is None and isinstance(part, (Checkpointing, Microbatching)):
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


def _ranks(parallel: str | Parallel, plan: Plan) -> Ranks | None:
    from .distributed import Ranks, parallel_of  # it builds on Step

    chosen = parallel_of(parallel)
    return None if chosen is None else Ranks(chosen, plan)


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
