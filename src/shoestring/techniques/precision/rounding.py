"""Stochastic rounding: up or down at random, so that the expected value is the number itself.

Half an ulp of a BF16 weight is 0.2 to 0.4% of it, of an FP16 weight 0.02 to 0.05%; to the nearest,
a smaller update is lost every time, while at random it arrives as often as it should.
"""

from __future__ import annotations

from typing import Any

import torch

_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""Of FP32's 23 bits of mantissa."""


class Noise:
    """A random stream of its own, so that dropout draws the same masks with or without it."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)

    def rounded(
        self, x: torch.Tensor, dtype: torch.dtype, *, keep_nan: bool = True
    ) -> torch.Tensor:
        """FP32 → `dtype`, at random between the two neighbours.

        Random bits are added below the last bit kept, then cut off; on the bits of NaN that can
        make a number, which `keep_nan` prevents. FP16's subnormal numbers (under 6.1e-5) are
        rounded to the nearest.
        """
        bits = _DROPPED_BITS[dtype]
        noise = torch.empty_like(x, dtype=torch.int32)
        noise.random_(0, 1 << bits, generator=self.generator)
        noise.add_(x.view(torch.int32)).bitwise_and_(-(1 << bits))
        rounded = noise.view(torch.float32)
        return (torch.where(x.isfinite(), rounded, x) if keep_nan else rounded).to(dtype)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.generator.set_state(state["generator"].cpu())
