"""How the gradients of microbatches are added up, where autograd's own way is not the best.

*Compensated* adds with Kahan's correction, in the parameter's own type: total ← total + (gradient −
lost) rounds in 16 bits; what it rounded away is kept in `lost`, one more tensor per parameter, and
goes into the next addition. The error of a sum of n gradients is then about two roundings instead
of n (Section 3.3 adds plainly).

*Together* adds as autograd does, but small gradients many at a time. On a GPU each addition is a
kernel, and takes as long for ten numbers as for ten thousand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...trace.fakes import is_fake
from ..base import Setup

DEVICES = ("cuda",)
"""Where it pays to add small gradients together."""
SMALL = 16_384
"""Elements of a gradient that is small: one block of threads adds them in a few rounds."""
WAITING = 64 * 1024
"""Bytes of small gradients that wait for others at most."""


class _Taken:
    """Takes every gradient of some parameters as it is made; gives sums back before the update."""

    def __init__(self, setup: Setup, parameters: Iterable[nn.Parameter]) -> None:
        self._active = False
        self._split, self._update = setup.split, setup.update
        for parameter in parameters:
            handle = parameter.register_post_accumulate_grad_hook(self._take)
            setup.undo.append(handle.remove)
        setup.split, setup.update = self.split, self.update

    def split(self, batch: Any) -> Iterator[Any]:
        """The same parts; gradients made outside of a step are left alone."""
        self._forget()
        self._active = True
        try:
            yield from self._split(batch)
        except BaseException:  # the step failed; what it added up must not take memory
            self._forget()
            raise
        finally:
            self._active = False

    def update(self) -> None:
        """Gradients back where the update looks for them; all else is freed."""
        for parameter, total in self._totals():
            parameter.grad = total
        self._forget()
        self._update()

    @torch.no_grad()
    def _take(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if self._active and gradient is not None and gradient.layout is torch.strided:
            parameter.grad = None
            self._add(parameter, gradient)

    def _add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        raise NotImplementedError

    def _totals(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        raise NotImplementedError

    def _forget(self) -> None:
        raise NotImplementedError


class Compensated(_Taken):
    """With what the last addition rounded away."""

    def __init__(self, setup: Setup) -> None:
        self._sums: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor | None]] = {}
        super().__init__(setup, [p for p in setup.model.parameters() if p.requires_grad])

    def _add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if parameter not in self._sums:
            self._sums[parameter] = gradient, None
            return
        total, lost = self._sums[parameter]
        if lost is None:
            lost = torch.zeros_like(total)
        gradient.sub_(lost)
        added = total + gradient
        torch.sub(added, total, out=lost).sub_(gradient)
        self._sums[parameter] = added, lost

    def _totals(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        return [(parameter, total) for parameter, (total, _) in self._sums.items()]

    def _forget(self) -> None:
        self._sums.clear()


class Together(_Taken):
    """Small gradients in one kernel, as soon as there are enough or one of them comes again."""

    def __init__(self, setup: Setup, parameters: list[nn.Parameter]) -> None:
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._waiting: dict[torch.Tensor, torch.Tensor] = {}
        self._bytes = 0
        super().__init__(setup, parameters)

    def _add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if parameter not in self._sums:
            self._sums[parameter] = gradient
            return
        if parameter in self._waiting or self._bytes + gradient.nbytes > WAITING:
            self._bring_together()
        self._waiting[parameter] = gradient
        self._bytes += gradient.nbytes

    def _bring_together(self) -> None:
        alike: dict[Any, list[torch.Tensor]] = {}
        for parameter, gradient in self._waiting.items():
            alike.setdefault((gradient.dtype, gradient.device), []).append(parameter)
        for parameters in alike.values():
            totals = [self._sums[parameter] for parameter in parameters]
            torch._foreach_add_(totals, [self._waiting[parameter] for parameter in parameters])
        self._waiting.clear()
        self._bytes = 0

    def _totals(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        with torch.no_grad():
            self._bring_together()
        return self._sums.items()

    def _forget(self) -> None:
        self._sums.clear()
        self._waiting.clear()
        self._bytes = 0


def small_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those whose gradients are better added together, and are watched by nobody else."""
    return [
        p
        for p in model.parameters()
        if p.requires_grad
        and p.numel() <= SMALL
        and not is_fake(p)  # a prediction looks for gradients at their parameters
        and p.device.type in DEVICES
        and not getattr(p, "_post_accumulate_grad_hooks", None)
    ]
