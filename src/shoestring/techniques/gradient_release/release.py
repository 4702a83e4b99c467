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
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import SGD

from ...errors import InputError
from ..base import Setup

EACH = "each_parameter"
"""An attribute of hooks of an optimizer's step that may be called for one parameter at a time."""


class Release:
    """The updates of a step, one parameter at a time."""

    def __init__(self, setup: Setup, *, fold: bool) -> None:
        self._setup = weakref.ref(setup)  # hooks hold this, and are held by the model
        self._update, self._split = setup.update, setup.split
        self.fold = fold
        self._active = self._last = self._first = False
        self._released: set[torch.Tensor] = set()
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._broken: str | None = None
        groups = setup.optimizer.param_groups
        self._groups = {p: group for group in groups for p in group["params"]}
        for parameter in self._groups:
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._take)
                setup.undo.append(handle.remove)
        setup.split, setup.update = self.split, self.finish

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
        parts = iter(self._split(batch))
        finished = False
        try:
            ahead = next(parts, None)
            while ahead is not None:
                here, ahead = ahead, next(parts, None)
                self._last = ahead is None
                yield here
                self._first = False
            finished = True
        finally:
            self._active = False
            if not finished and self._released:
                self._broken = (
                    f"an earlier step failed after {len(self._released)} of {len(self._groups)} "
                    "parameters were updated"
                )

    def finish(self) -> None:
        """Update what still has a gradient: those that another hook took and gave back."""
        if any(parameter.grad is not None for parameter in self._groups):
            self._update()
        self._optimizer._opt_called = True  # type: ignore[attr-defined] # asked by LR schedulers

    def _check_hooks(self) -> None:
        optimizer = self._optimizer
        hooks = (*optimizer._optimizer_step_pre_hooks.values(),
                 *optimizer._optimizer_step_post_hooks.values())  # fmt: skip
        if not all(getattr(hook, EACH, False) for hook in hooks):
            raise InputError(
                "a hook of the optimizer's step would see one gradient at a time: released "
                "gradients cannot be clipped by their common norm, or looked at together",
                hint="remove the hook, or leave out gradient_release",
            )

    @torch.no_grad()
    def _take(self, parameter: torch.Tensor) -> None:
        if not self._active or parameter.grad is None:
            return
        if parameter in self._released:
            raise InputError(
                "a parameter got a second gradient after its update",
                hint="checkpoint with use_reentrant=False, or leave out gradient_release",
            )
        if self.fold and self._folded(parameter):
            if self._last:
                self._released.add(parameter)
            return
        if self._last:
            self._released.add(parameter)
            self._alone(parameter)
            parameter.grad = None

    def _alone(self, parameter: torch.Tensor) -> None:
        """The update, as if the optimizer held this parameter only."""
        optimizer = self._optimizer
        groups = optimizer.param_groups
        optimizer.param_groups = [{**self._groups[parameter], "params": [parameter]}]
        try:
            self._update()
        finally:
            optimizer.param_groups = groups

    def _folded(self, parameter: torch.Tensor) -> bool:
        """Add the gradient to the momentum; the last part moves the parameter."""
        group, gradient = self._groups[parameter], parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided or (self._first and self._last):
            return False
        state = self._optimizer.state[parameter]
        self._show(parameter, gradient)
        if group["maximize"]:
            gradient = gradient.neg()
        if self._first:
            if group["weight_decay"]:
                gradient.add_(parameter, alpha=group["weight_decay"])
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = gradient.clone()
            else:
                state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        else:
            state["momentum_buffer"].add_(gradient)
        if self._last:
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                parameter.sub_(state["momentum_buffer"] * rate)
            else:
                parameter.add_(state["momentum_buffer"], alpha=-rate)
        parameter.grad = None
        return True

    def _show(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """To hooks, which want the whole gradient: it is summed up for them alone."""
        optimizer = self._optimizer
        if not optimizer._optimizer_step_pre_hooks:
            return
        known = self._sums.get(parameter)
        self._sums[parameter] = gradient.clone() if known is None else known.add_(gradient)
        if self._last:
            parameter.grad = self._sums.pop(parameter)
            for hook in optimizer._optimizer_step_pre_hooks.values():
                hook(optimizer, (), {})
            parameter.grad = gradient


def folds(setup: Setup, plain: bool) -> bool:
    """Whether parts can be added to the momentum: heavy-ball SGD, with its own update."""
    return (
        plain
        and type(setup.optimizer) is SGD
        and all(
            group["momentum"] and not group["nesterov"] and not group["dampening"]
            for group in setup.optimizer.param_groups
        )
    )
