"""Add the gradients of microbatches with Kahan's correction, in the parameter's own type.

total ← total + (gradient − lost) rounds in 16 bits; what it rounded away is kept in `lost`, one
more tensor per parameter, and goes into the next addition. The error of a sum of n gradients is
then about two roundings instead of n (Section 3.3 adds plainly).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..base import Setup


class Compensated:
    """Takes every gradient as it is made, and gives the sum back before the update."""

    def __init__(self, setup: Setup) -> None:
        self._active = False
        self._sums: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._split, self._update = setup.split, setup.update
        for parameter in setup.model.parameters():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._take)
                setup.undo.append(handle.remove)
        setup.split, setup.update = self.split, self.update

    def split(self, batch: Any) -> Iterator[Any]:
        """The same parts; gradients made outside of a step are left alone."""
        self._sums.clear()
        self._active = True
        try:
            yield from self._split(batch)
        finally:
            self._active = False

    def update(self) -> None:
        """Gradients back where the update looks for them; the corrections are freed."""
        for parameter, (total, _) in self._sums.items():
            parameter.grad = total
        self._sums.clear()
        self._update()

    @torch.no_grad()
    def _take(self, parameter: torch.Tensor) -> None:
        if not self._active or parameter.grad is None:
            return
        gradient, parameter.grad = parameter.grad, None
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
