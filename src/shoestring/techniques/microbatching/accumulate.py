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

from ...torch_private.kernels import foreach_add_
from ..base import Setup
from ..parameter_hooks import when_accumulated

DEVICES = ("cuda",)
"""Where it pays to add small gradients together."""
SMALL = 16_384
"""Elements of a gradient that is small: one block of threads adds them in a few rounds."""
WAITING = 64 * 1024
"""Bytes of small gradients that wait for others at most."""


class _Taken:
    """Takes each gradient of some parameters as it is made; gives sums back after the last part."""

    def __init__(self, setup: Setup, parameters: Iterable[nn.Parameter]) -> None:
        self._active = False
        for parameter in parameters:
            handle = when_accumulated(parameter, self._take)
            setup.undo.append(handle.remove)
        self._split, setup.split = setup.split, self.split

    def split(self, batch: Any) -> Iterator[Any]:
        """The same parts; gradients made outside of a step are left alone."""
        self._forget()
        self._active = True
        try:
            yield from self._split(batch)
            self._give_back()
        finally:
            self._active = False
            self._forget()

    @torch.no_grad()
    def _give_back(self) -> None:
        """Add the totals to gradients that autograd accumulated."""
        for parameter, total in self._totals():
            parameter.grad = total if parameter.grad is None else total.add_(parameter.grad)

    @torch.no_grad()
    def _take(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if self._active and gradient is not None and self._wants(parameter, gradient):
            parameter.grad = None
            self._add(parameter, gradient)

    def _wants(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        return gradient.layout is torch.strided

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
        setup.adds_apart = True

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
        self._device = parameters[0].device
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._waiting: dict[torch.Tensor, torch.Tensor] = {}
        self._bytes = 0
        super().__init__(setup, parameters)

    def split(self, batch: Any) -> Iterator[Any]:
        """The same parts."""
        self._stream = _stream(self._device)
        return super().split(batch)

    def _wants(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Not where others look at it too, nor those of other threads and streams.

        Autograd has a thread for each device, and adds each gradient on a stream of its own.
        """
        alone = len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()) == 1
        here = gradient.device == self._device and _stream(self._device) == self._stream
        return alone and here and super()._wants(parameter, gradient)

    def _add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if parameter not in self._sums:
            self._sums[parameter] = gradient
            return
        nbytes = gradient.untyped_storage().nbytes()  # of all it is a part of
        if parameter in self._waiting or self._bytes + nbytes > WAITING:
            self._bring_together()
        self._waiting[parameter] = gradient
        self._bytes += nbytes
        if nbytes > WAITING:
            self._bring_together()

    def _bring_together(self) -> None:
        alike: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter, gradient in self._waiting.items():
            alike.setdefault(gradient.dtype, []).append(parameter)
        for parameters in alike.values():
            totals = [self._sums[parameter] for parameter in parameters]
            foreach_add_(totals, [self._waiting[parameter] for parameter in parameters])
        self._waiting.clear()
        self._bytes = 0

    def _totals(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        self._bring_together()
        return self._sums.items()

    def _forget(self) -> None:
        self._sums.clear()
        self._waiting.clear()
        self._bytes = 0


def _stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def small_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those whose gradients are better added together."""
    return [
        p
        for p in model.parameters()
        if p.requires_grad and p.numel() <= SMALL and p.device.type in DEVICES
    ]
