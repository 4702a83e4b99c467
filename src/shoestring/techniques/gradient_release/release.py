"""Update each parameter as soon as its gradient is final, and let the gradient go.

Autograd calls a hook when the gradient of a parameter has been added up in `.grad`. In the last
part of a batch that is the whole gradient, and the optimizer updates this parameter alone:

    backward     gradient of layer 3 ──► update layer 3 ──► gradient of layer 3 is freed
                 gradient of layer 2 ──► update layer 2 ──► …

In the parts before, gradients add up as ever; for Adam nothing else is exact. SGD's momentum is
linear: parts can be added to the buffer itself, so that no gradient outlives its layer. With
b' = μ·b + g₁ + … + gₙ the update p ← p - lr·b' needs b' alone. Nesterov's is p - lr·(g + μ·b') =
p - lr·((1 + μ)·b' - μ·b): it needs b beside b', which the first part has overwritten. So Nesterov's
momentum keeps the sum, too.

Sums can lie on the host (`sums.py`): each part's gradient goes there, and the last part's meets it
here.

Where gradients are clipped by the norm of all, the passes run twice: the first time each gradient
leaves its norm and goes, the second time it is clipped, and updates. In several parts the sum is
kept anyway, so there the update waits for it, and nothing runs twice. Where sums lie on the host,
all gradients wait there for their norm.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_

from ...errors import InputError
from ...trace.fakes import hooks_its_step
from ..apart import run_alone
from ..base import Setup, total_norm
from ..parameter_hooks import when_accumulated
from ..splitting.weights import weighted_loss
from .folding import fold_adam, fold_momentum, folds, move_by_adam, move_by_momentum
from .rehearsal import taken_back
from .sums import HostSums


class Release:
    """The updates of a step, one parameter at a time."""

    def __init__(self, setup: Setup, *, fold: bool | str, sums: HostSums | None = None) -> None:
        self._setup = weakref.ref(setup)  # hooks hold this, and are held by the model
        self._update, self._split = setup.update, setup.split
        self._wanted, self._host = fold, sums
        self._norms: dict[torch.Tensor, torch.Tensor] | None = None
        """Of gradients, while the passes run for them alone."""
        self._waiting: dict[torch.Tensor, torch.Tensor] = {}
        """Gradients that wait for the norm of all, with their own."""
        self._waits = False
        """Gradients are clipped when all are there."""
        self._active = self._last = self._first = False
        self._released: set[torch.Tensor] = set()
        self._folding: dict[torch.Tensor, None] = {}
        """Parameters with a gradient in an earlier part: which parts have one may differ."""
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._broken: str | None = None
        self._groups: dict[torch.Tensor, dict[str, Any]] = {}
        self._hooked: set[torch.Tensor] = set()
        self._look_at_groups(setup)
        setup.split, setup.update = self.split, self.finish
        if sums is not None:
            setup.sums = sums
            setup.before_update.append(self._find_norm_there)

    def _look_at_groups(self, setup: Setup) -> None:
        """As they are now: loading a state replaces groups, and parameters may come to them."""
        groups = setup.optimizer.param_groups
        self._groups = {p: group for group in groups for p in group["params"]}
        arrivals = setup.arrivals
        self.fold = arrivals is None and folds(setup, self._wanted)  # ranks add whole gradients
        for parameter in self._groups:
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked.add(parameter)
                watched = parameter if arrivals is None else arrivals.watched(parameter)
                setup.undo.append(when_accumulated(watched, self._take).remove)

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        setup = self._setup()
        assert setup is not None
        return setup.optimizer

    def split(self, batch: Any) -> Iterator[Any]:
        """The same parts; which one is the last is known one part ahead."""
        if self._broken is not None:
            raise InputError(self._broken, hint="load a snapshot into a new step")
        self._check_hooks()
        self._released, self._active, self._first, self._sums = set(), True, True, {}
        self._folding, self._waiting = {}, {}
        setup = self._setup()
        assert setup is not None
        self._look_at_groups(setup)
        setup.norm, clip = None, setup.clip
        if self._host is not None:
            self._host.begin()
        if setup.arrivals is not None:
            setup.arrivals.begin()
        parts = iter(self._split(batch))
        finished = False
        try:
            ahead = next(parts, None)
            while ahead is not None:
                here, ahead = ahead, next(parts, None)
                self._last = ahead is None and not setup.accumulates
                setup.part_begins(self._last)
                if self._first and clip is not None:
                    several = not self._last
                    if setup.arrivals is not None:
                        several = setup.arrivals.anywhere(several)
                    if self._host is not None:
                        self.fold = False
                    elif several:
                        self._waits = True
                    elif clip.norm is not None:
                        self._find_norm(setup, here)
                yield here
                self._first = False
            finished = True
        finally:
            self._active = self._waits = False
            if self._host is not None:
                self._host.end()
            moved = self._released | self._folding.keys()
            if not finished and moved:
                self._broken = (
                    f"an earlier step failed after {len(moved)} of {len(self._groups)} "
                    "parameters were updated"
                )

    def _find_norm(self, setup: Setup, part: tuple[Any, Any]) -> None:
        """Run the passes for the norm of all gradients; nothing else is left of them."""
        self._norms, arrivals = {}, setup.arrivals
        try:
            with taken_back(setup):
                setup.backward(weighted_loss(setup.run(part[0]), part[1]))
                held = setup.model.parameters() if arrivals is None else arrivals.rest()
                for parameter in held:  # that the optimizer does not hold, too
                    if parameter.grad is not None:
                        self._note_norm(parameter, setup.clip.norm_type)
            if arrivals is not None:
                setup.norm = arrivals.norm(self._norms, setup.clip.norm_type)
                arrivals.begin()
                return
            order = [p for p in setup.model.parameters() if p in self._norms]
            setup.norm = total_norm([self._norms[p] for p in order], setup.clip.norm_type)
        finally:
            self._norms = None

    def _note_norm(self, parameter: torch.Tensor, kind: float) -> None:
        assert self._norms is not None and parameter.grad is not None
        self._norms[parameter] = torch.linalg.vector_norm(parameter.grad, kind)
        parameter.grad = None

    @torch.no_grad()
    def _find_norm_there(self) -> None:
        """Of all gradients, those that wait on the host and those that are here."""
        setup = self._setup()
        assert setup is not None and self._host is not None
        clip = setup.clip
        if clip is None or clip.norm is None:
            return
        for parameter in self._host:
            if parameter not in self._waiting:
                self._wait_for_norm(parameter, clip.norm_type)
        norms = self._waiting
        for parameter in setup.model.parameters():
            if parameter.grad is not None:
                norms[parameter] = torch.linalg.vector_norm(parameter.grad, clip.norm_type)
        order = [p for p in setup.model.parameters() if p in norms]
        setup.norm, self._waiting = total_norm([norms[p] for p in order], clip.norm_type), {}

    def _wait_for_norm(self, parameter: torch.Tensor, kind: float) -> None:
        """On the host, but for one that is small or has no room there."""
        assert self._host is not None
        self._host.finish(parameter)
        assert parameter.grad is not None
        self._waiting[parameter] = torch.linalg.vector_norm(parameter.grad, kind)
        self._host.add(parameter)

    @torch.no_grad()
    def finish(self) -> None:
        """Update what the last part had no gradient of, and what waits for its norm."""
        for parameter in [p for p in self._folding if p not in self._released]:
            self._moved(parameter)
        if self._host is not None:
            self._finish_there(self._host)
        if any(parameter.grad is not None for parameter in self._groups):
            self._update()
        self._optimizer._opt_called = True  # type: ignore[attr-defined] # asked by LR schedulers

    def _finish_there(self, sums: HostSums) -> None:
        setup = self._setup()
        assert setup is not None
        for parameter in sums:
            sums.finish(parameter)
            self._clip(setup, [parameter])
            self._alone(parameter)
            parameter.grad = None
        sums.end()
        self._clip(setup, [p for p in self._groups if p.grad is not None])

    def _check_hooks(self) -> None:
        if hooks_its_step(self._optimizer):
            raise InputError(
                "a hook of the optimizer's step would see one gradient at a time: released "
                "gradients cannot be clipped by their common norm, or looked at together",
                hint="remove the hook, or leave out gradient_release",
            )

    @torch.no_grad()
    def _take(self, watched: torch.Tensor) -> None:
        if not self._active or watched.grad is None or self._waits:
            return
        setup = self._setup()
        assert setup is not None
        if setup.arrivals is None:
            self._final(setup, watched)
        elif self._last:
            for parameter in setup.arrivals.arrived(watched):
                self._final(setup, parameter)

    def _final(self, setup: Setup, parameter: torch.Tensor) -> None:
        if self._norms is not None:
            self._note_norm(parameter, setup.clip.norm_type)
            return
        if parameter in self._released:
            raise InputError(
                "a parameter got a second gradient after its update",
                hint="checkpoint with use_reentrant=False, or leave out gradient_release",
            )
        if self._host is not None and not self.fold:
            if not self._last:
                self._host.add(parameter)
                return
            if setup.clip is not None and setup.clip.norm is not None:
                self._wait_for_norm(parameter, setup.clip.norm_type)
                return
            self._host.finish(parameter)
        self._clip(setup, [parameter])
        if self.fold and self._folded(parameter):
            if self._last:
                self._released.add(parameter)
            return
        if self._last:
            self._released.add(parameter)
            setup.updating = True
            self._alone(parameter)
            parameter.grad = None

    def _clip(self, setup: Setup, parameters: list[torch.Tensor]) -> None:
        if setup.clip is None or not parameters:
            return
        if setup.norm is None:
            clip_grad_value_(parameters, setup.clip.value)
        else:
            clip_grads_with_norm_(parameters, setup.clip.norm, setup.norm)

    def _alone(self, parameter: torch.Tensor) -> None:
        """The update, as if the optimizer held this parameter only."""
        run_alone(self._optimizer, (self._groups[parameter], [parameter]), self._update)

    def _folded(self, parameter: torch.Tensor) -> bool:
        """Add the gradient to the moments; the last part moves the parameter."""
        group, gradient = self._groups[parameter], parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided or (self._first and self._last):
            return False
        state = self._optimizer.state[parameter]
        setup = self._setup()
        assert setup is not None
        setup.updating = True
        self._sum_up(parameter, gradient)
        if group["maximize"]:
            gradient = gradient.neg()
        fold = fold_adam if "betas" in group else fold_momentum
        fold(parameter, gradient, state, group, first=parameter not in self._folding)
        self._folding[parameter] = None
        parameter.grad = None
        if self._last:
            self._moved(parameter)
        return True

    def _moved(self, parameter: torch.Tensor) -> None:
        """By its moments, which have all parts."""
        group = self._groups[parameter]
        move = move_by_adam if "betas" in group else move_by_momentum
        if parameter in self._sums:  # hooks want the whole gradient
            parameter.grad = self._sums.pop(parameter)
            for hook in self._optimizer._optimizer_step_pre_hooks.values():
                hook(self._optimizer, (), {})
            parameter.grad = None
        move(parameter, self._optimizer.state[parameter], group)

    def _sum_up(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """For hooks alone."""
        if self._optimizer._optimizer_step_pre_hooks:
            known = self._sums.get(parameter)
            self._sums[parameter] = gradient.clone() if known is None else known.add_(gradient)
