"""Dynamic loss scaling that stays on the device: nothing here waits for a value.

The scale multiplies the loss, so that gradients stay above FP16's smallest numbers. One that
overflows all the same shows as inf or NaN; that update is skipped and the scale halved. After
`growth_interval` updates without overflow it doubles (Section 3.2; Micikevicius et al., 2018).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...torch_private.kernels import find_overflow_and_unscale_, update_scale_

LARGEST = 2.0**24
LARGEST_FOR_HALF_LOSS = 2.0**15
"""The scale is the gradient of the loss, which in an FP16 loss is FP16 and ends at 65,504."""


class LossScale:
    """The scale and its counters, as tensors."""

    def __init__(self, device: torch.device, initial: float, growth_interval: int) -> None:
        self._interval = growth_interval
        self._largest = LARGEST
        self.scale = torch.full((), initial, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        """Since the last overflow or growth."""
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self.agree: Callable[[torch.Tensor], object] = lambda found_inf: None
        """Called with `found_inf`: ranks that hold different gradients skip together."""

    def loss_is(self, dtype: torch.dtype) -> None:
        """Remember how far the scale may grow."""
        self._largest = LARGEST_FOR_HALF_LOSS if dtype is torch.float16 else LARGEST

    def look_for_overflow(self, gradients: list[torch.Tensor]) -> None:
        """Set `found_inf` to one if any element of any gradient is not finite, else to zero."""
        self.found_inf.zero_()
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in gradients:
            by_type.setdefault(gradient.dtype, []).append(gradient)
        for group in by_type.values():  # times one: the kernel only looks
            find_overflow_and_unscale_(group, self.found_inf, self._one)
        self.agree(self.found_inf)

    def adjust(self) -> None:
        """Count, and move the scale."""
        self.skipped_steps.add_(self.found_inf > 0)
        update_scale_(self.scale, self.good_steps, self.found_inf, 2.0, 0.5, self._interval)
        self.scale.clamp_(max=self._largest)

    def state_dict(self) -> dict[str, Any]:
        """Scale and counters; `found_inf` is set anew in every update."""
        return {name: getattr(self, name).clone() for name in _KEPT}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with them."""
        for name in _KEPT:
            getattr(self, name).copy_(state[name])


_KEPT = ("scale", "good_steps", "skipped_steps")
