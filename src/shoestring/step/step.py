"""Step: forward, backward, update on real tensors, as a plan transformed them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..memory.live.live import LivePeak, live_at_peak
from ..memory.live.measure import Measurement, track
from ..techniques.base import Setup, Technique
from ..techniques.plan import Plan
from ..techniques.splitting.weights import weighted_loss
from ..torch_private.autograd import forget_failed_backward
from ..trace.failures import check_loss
from ..trace.fakes import is_fake
from ..trace.graph import Phase
from ..trace.tracing import Loss
from ..units import format_size, plural
from .clipping import Clip, clip_gradients
from .graph import GraphRunner, on_device, why_not
from .holding import Hold
from .setting_up import Base, prepare, revisable, transform


class Step:
    """One training step under a plan, made by `apply` or `fit`; call it with a minibatch.

    `step(batch)` is forward, backward, update. `step(batch, update=False)` adds the gradients of
    one more batch, as a plain loop does that leaves out `optimizer.step()` and `zero_grad()`.

    Args:
        setup: The step under construction, after all techniques.
        plan: The plan it follows.
        clip: A largest norm, or a `Clip`.

    Examples:
        >>> step = ss.apply(plan, model, optimizer, loss=loss)
        >>> step(batch)
        >>> step.measure(batch).peak_bytes
    """

    def __init__(self, setup: Setup, plan: Plan, clip: float | Clip | None = None) -> None:
        self._setup = setup
        self.plan = plan
        self._in_place = False
        self._accumulated = 0
        """Batches whose gradients wait for an update."""
        self._told = False
        """That gradients of the user's own were dropped."""
        self._updates = 0
        self._norm: torch.Tensor | None = None
        """Always the same tensor: a captured step writes into it, too."""
        self._clip = self._clip_for(clip)
        self._graph = self._runner()
        self.measured: Measurement | None = None
        """The result of the last `measure`."""
        self.loss: torch.Tensor | None = None
        """Of the minibatch that `measure` ran, detached."""
        self._hold: Hold | None = None
        """Watches the budget the plan is for, if it is for one."""
        self._base: Base | None = None
        """The state that `revise` restores."""

    def __repr__(self) -> str:
        name, taken = self.plan.short() or "plain", self.measured
        return (
            f"Step({name}{'' if taken is None else f', measured {format_size(taken.peak_bytes)}'})"
        )

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

    def __call__(self, batch: Any, *, update: bool = True) -> torch.Tensor:
        """Forward, backward, update; returns the loss of the minibatch, detached.

        With `update=False` the gradients wait, and those of the next batches are added: a sum, as
        `loss.backward()` makes it. The next `step(batch)`, or `step.update()`, updates from all.
        Such steps are not captured as CUDA graphs.
        """
        self._check_gradients_wait("accumulated", not update)
        if not self.accumulated and (update or not self._adds_plainly):
            self._drop_others()
        with self._on_model_device():
            if self._hold is None:
                return self._run(batch, update)
            return self._hold(batch, update)

    def update(self) -> None:
        """Clip and update from the gradients that `step(batch, update=False)` accumulated."""
        if not self.accumulated:
            raise InputError(
                "there are no gradients to update from", hint="call step(batch, update=False) first"
            )
        with self._on_model_device():
            self._update()
            self._drop_gradients()
            self._after_update()

    def zero_grad(self) -> None:
        """Forget the gradients that were accumulated."""
        self._drop_gradients()

    @property
    def accumulated(self) -> int:
        """How many batches' gradients wait for an update; 0 too after a zero_grad() of yours."""
        if self._accumulated and not self._setup.sums:
            if all(p.grad is None for p in self.model.parameters()):
                self._accumulated = 0
        return self._accumulated

    @property
    def _waiting(self) -> str:
        """Which gradients wait for an update, in words; "" where none does."""
        if self.accumulated:
            return "gradients of " + plural(self._accumulated, "batch", "batches")
        left = any(p.grad is not None for p in self.model.parameters())
        return "gradients of your own backward pass" if left else ""

    @property
    def _adds_plainly(self) -> bool:
        """Whether gradients of a backward pass of the user's own can be added to."""
        return self._setup.loss_scale is None and self._setup.arrivals is None

    def _drop_others(self) -> None:
        """Gradients that a backward pass of the user's own left."""
        if not self._told and self._waiting:
            self._told = True
            hint = ": step(batch, update=False) adds to them" if self._adds_plainly else ""
            warnings.warn(
                f"the step drops gradients that were there before it{hint}; if they are old, call "
                "optimizer.zero_grad() first",
                RuntimeWarning,
                stacklevel=3,
            )
        self._drop_gradients()

    @property
    def clip(self) -> Clip | None:
        """How gradients are clipped before the update; may be set between two steps."""
        return self._clip

    @clip.setter
    def clip(self, given: float | Clip | None) -> None:
        chosen = self._clip_for(given)
        if chosen != self._clip and self._graph is not None:
            self._graph.drop()
        self._clip = chosen
        if self._setup.clips:  # passes that run twice are not captured
            self._graph = self._runner()

    def _clip_for(self, given: float | Clip | None) -> Clip | None:
        chosen = Clip.of(given)
        if not self._setup.clips:
            self._check_gradients_wait("clipped", chosen is not None)
        self._setup.clip = chosen
        return chosen

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Norm of the gradients of the last update, before they were clipped; None without clip."""
        return None if self._norm is None else self._norm.clone()

    def _check_gradients_wait(self, what: str, wanted: bool) -> None:
        if wanted and self._setup.gradients_gone:
            raise InputError(
                f"gradients cannot be {what}: {self._setup.gradients_gone}",
                hint=f"plan without {self._setup.gradients_gone.partition(' ')[0]}",
            )

    def _on_model_device(self) -> AbstractContextManager[Any]:
        """On the model's GPU, which need not be the current one."""
        first = next(self.model.parameters())
        real = first.is_cuda and not is_fake(first)
        return torch.cuda.device(first.device) if real else nullcontext()

    def _run(self, batch: Any, update: bool = True) -> torch.Tensor:
        if self._graph is None:
            loss = self._compute(batch, update=update)
        elif update and not self.accumulated:
            loss = self._graph(batch)
        else:
            loss = self._compute(
                on_device(next(self.model.parameters()).device, batch), update=update
            )
        if update:
            self._after_update()
        return loss

    def _after_update(self) -> None:
        self._updates += 1
        if self._after() and self._graph is not None:
            self._graph.drop()

    @property
    def captured(self) -> bool:
        """Whether the step runs as one CUDA graph now."""
        return self._graph is not None and self._graph.captured

    @property
    def why_not_captured(self) -> str | None:
        """Why the step does not run as one CUDA graph now; None where it does."""
        if self.accumulated:
            return "gradients of several batches are accumulated"
        return why_not(self._setup) if self._graph is None else self._graph.why_not

    def use_graph(self, wanted: bool, why: str = "use_graph(False) was called") -> None:
        """On CUDA: capture the step where its shapes allow it (the default), or run it eagerly.

        Args:
            wanted: Whether to capture it.
            why: The reason that `why_not_captured` tells.
        """
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
    def steady(self) -> bool:
        """Whether an update was made, so that there is all of the optimizer's state."""
        return self._updates > 0 or bool(self.optimizer.state)

    @property
    def measurable(self) -> bool:
        """Whether `measure` can say what a step needs."""
        return True

    def measure(self, batch: Any, *, update: bool = True) -> Measurement:
        """Run one step and return its peak, tracked storage by storage or by the allocator.

        Meant in steady state: call the step at least once before.

        Args:
            batch: A minibatch.
            update: Whether the step updates; without, gradients are added.

        Returns:
            The peak, and the live bytes at the peak by role.
        """
        if update and not self.accumulated:
            self._drop_gradients()
        gc.collect()
        if next(self.model.parameters()).device.type == "cuda":
            with self._on_model_device():
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                self.loss = self._run(batch, update)
                torch.cuda.synchronize()
                peak_bytes = max(self.captured_peak_bytes, torch.cuda.max_memory_allocated())
            self.measured = Measurement("cuda", peak_bytes, {})
        else:
            self.measured = track(
                lambda entering: self._kept(self._compute(batch, entering, update)),
                self.model,
                batch,
                self.optimizer,
            )
            if update:
                self._after_update()
        return self.measured

    def live(self, batch: Any) -> LivePeak:
        """On CUDA: run one step eagerly and say what was allocated at its peak.

        Args:
            batch: A minibatch.

        Returns:
            Every allocated block at the peak, and the tensor it belongs to.
        """
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
        """The factor of the loss before the backward pass; None without a scale."""
        scaling = self._setup.loss_scale
        return None if scaling is None else scaling.scale

    @property
    def counts(self) -> dict[str, int]:
        """Counts of techniques since the first update, by name; waits for the device."""
        made: dict[str, int] = {}
        for item in self._setup.state.values():
            made |= getattr(item, "counts", dict)()
        return made

    @property
    def captured_peak_bytes(self) -> int:
        """Allocated at most while the graph in use was captured; 0 without one."""
        return 0 if self._graph is None else self._graph.peak_bytes

    def _after(self) -> bool:
        """Run the work after the update; return whether it replaced tensors of a captured step."""
        return any([bool(call()) for call in self._setup.after_update])

    def _compute(
        self,
        batch: Any,
        entering: Callable[[Phase], None] = lambda phase: None,
        update: bool = True,
    ) -> torch.Tensor:
        waiting = self._waiting
        try:
            return self._computed(batch, entering, update)
        except BaseException as error:  # the next step must not add to what this one left
            if waiting:
                error.add_note(
                    f"{waiting} that were accumulated before are dropped, too: run those again"
                )
            self._drop_gradients()
            forget_failed_backward()
            raise

    def _drop_gradients(self) -> None:
        """Those too of parameters that the optimizer does not hold."""
        self._accumulated = 0
        if self._setup.sums is not None:
            self._setup.sums.forget()
        self._setup.optimizer.zero_grad(set_to_none=True)
        for parameter in self._setup.model.parameters():
            parameter.grad = None

    def _computed(
        self, batch: Any, entering: Callable[[Phase], None], update: bool
    ) -> torch.Tensor:
        setup = self._setup
        setup.updating, setup.accumulates = False, not update
        total: torch.Tensor | None = None
        for part, weight in setup.split(batch):
            entering(Phase.FORWARD)
            value = setup.run(part)
            check_loss(value)
            weighted = weighted_loss(value, weight)
            entering(Phase.BACKWARD)
            setup.backward(weighted)
            shown = weighted.detach()
            total = shown if total is None else total + shown
            del value, weighted
        assert total is not None
        if not update:
            self._accumulated += 1
            return total
        entering(Phase.OPTIMIZER)
        self._update()
        self._drop_gradients()
        return total

    def _update(self) -> None:
        for call in self._setup.before_update:
            call()
        if self._clip is not None:
            found = self._setup.norm
            if found is None:
                found = self._clip_gradients(self._clip)
            if found is None:
                self._norm = None
            elif self._norm is None:
                self._norm = found.detach().clone()
            else:
                self._norm.copy_(found)
        self._setup.updating = True
        self._setup.update()

    def _clip_gradients(self, clip: Clip) -> torch.Tensor | None:
        return clip_gradients(clip, self.model.parameters(), self.loss_scale)

    def revise(self, plan: Plan) -> None:
        """Go on by a plan that differs in what can be changed between two updates.

        Args:
            plan: The next plan.
        """
        plan = plan if isinstance(plan, Plan) else Plan(plan)
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
        """Everything that outlives a step; not while gradients wait for an update."""
        if self.accumulated:
            raise InputError(
                "gradients are accumulated, and no update was made from them yet",
                hint="save after the step that updates, or call zero_grad() first",
            )
        own = {name: item.state_dict() for name, item in self._setup.state.items()}
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "techniques": own,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of a step with the same plan.

        InputError for another one, before anything changes.

        Args:
            state: What `state_dict` returned.
        """
        parts = ("model", "optimizer", "techniques")
        if not isinstance(state, Mapping) or any(part not in state for part in parts):
            raise InputError("this is not the state of a step", hint="step.state_dict() makes one")
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
        self._check_sizes(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, item in self._setup.state.items():
            item.load_state_dict(state["techniques"][name])

    def _check_sizes(self, state: Mapping[str, Any]) -> None:
        """PyTorch finds what does not fit when half of it is loaded."""
        hint = "load the state of a step with the same model and optimizer"
        own, given = self.model.state_dict(), state["model"]
        if differing := sorted(own.keys() ^ given.keys()):
            where = "has no" if differing[0] in own else "has"
            raise InputError(f"the state {where} {differing[0]}, unlike the model", hint=hint)
        moved = [getattr(item, "resized", None) for item in self._setup.state.values()]
        for name, tensor in own.items():
            shape, needed = (getattr(t, "shape", None) for t in (given[name], tensor))
            if shape != needed and not any(of and of(name) for of in moved):
                raise InputError(
                    f"the state's {name} has the shape {tuple(shape or ())}, the model's "
                    f"{tuple(needed or ())}",
                    hint=hint,
                )
        sizes = [
            [len(group["params"]) for group in groups if group["params"]]
            for groups in (state["optimizer"]["param_groups"], self.optimizer.param_groups)
        ]
        if sizes[0] != sizes[1]:
            raise InputError(
                f"the state's optimizer has groups of {sizes[0]} parameters, this one of "
                f"{sizes[1]}",
                hint=hint,
            )


def apply_alone(
    plan: Plan | Iterable[Technique],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss: Loss,
    clip: float | Clip | None = None,
    backward: Callable[[torch.Tensor], None] | None = None,
    keep_undo: bool = False,
) -> Step:
    """The step of one process; see `apply`. `backward` in place of the loss's own.

    With `keep_undo` all of the plan can be taken back, which holds on to what it replaced.
    """
    clip = Clip.of(clip)
    chosen, setup = prepare(plan, model, optimizer, loss=loss)
    if backward is not None:
        setup.backward = backward
    base = transform(setup, chosen.techniques, keep_undo=keep_undo)
    step = Step(setup, chosen, clip)
    step._base = base
    if chosen.budget_bytes is not None:
        step._hold = Hold(step, chosen)
        if not chosen.predicted.captured:
            step.use_graph(False, "the plan is for eager steps, for which alone there was room")
    return step
