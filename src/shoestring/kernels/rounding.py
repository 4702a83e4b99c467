"""Stochastic rounding: up or down at random, so that the expected value is the number itself.

Half an ulp of a BF16 weight is 0.2 to 0.4% of it, of an FP16 weight 0.02 to 0.05%; to the nearest,
a smaller update is lost every time, while at random it arrives as often as it should.
"""

from __future__ import annotations

from typing import Any

import torch

DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""Of FP32's 23 bits of mantissa."""


STRIDE, FIRST, SECOND = -1640531535, 2146121005, -2073254261
"""Odd numbers of good mixing (2^32 / golden ratio; lowbias32), as 32 bits with a sign."""

_APART = 2**16 + 1
"""Draws between two calls of `Noise.skip`: more than one update makes."""


class Noise:
    """Random bits as a function of seed, draw and position, computed where they are needed.

    The state is one counter on the device, so that a captured graph draws anew at every replay, a
    snapshot goes on exactly, and dropout draws the same masks with or without it.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self.counter = torch.full((), _signed(seed * 0x632BE5AB), dtype=torch.int32, device=device)
        self._place: torch.Tensor | None = None
        """Where `skip` left the stream."""

    def bits(self, like: torch.Tensor, count: int) -> torch.Tensor:
        """As many random bits for every element, as an integer from zero."""
        x = torch.arange(like.numel(), dtype=torch.int32, device=like.device).view(like.shape)
        x.add_(self.counter.add_(STRIDE))
        x.bitwise_xor_(x >> 16).mul_(FIRST)
        x.bitwise_xor_(x >> 15).mul_(SECOND)
        x.bitwise_xor_(x >> 16)
        return x.bitwise_and_((1 << count) - 1)

    def rounded(
        self, x: torch.Tensor, dtype: torch.dtype, *, keep_nan: bool = True
    ) -> torch.Tensor:
        """FP32 → `dtype`, at random between the two neighbors.

        Random bits are added below the last bit kept, then cut off; on the bits of NaN that can
        make a number, which `keep_nan` prevents. FP16's subnormal numbers (under 6.1e-5) are
        rounded to the nearest.
        """
        dropped = DROPPED_BITS[dtype]
        noise = self.bits(x, dropped).add_(x.view(torch.int32)).bitwise_and_(-(1 << dropped))
        rounded = noise.view(torch.float32)
        return (torch.where(x.isfinite(), rounded, x) if keep_nan else rounded).to(dtype)

    def move(self, draws: int) -> None:
        """Go on as if bits had been drawn so often; someone else computed them."""
        self.counter.add_(_signed(draws * STRIDE))

    def skip(self) -> None:
        """Go on at a distance from where this was called last, whatever was drawn since."""
        if self._place is None:
            self._place = self.counter.clone()
        else:
            self._place.add_(_signed(_APART * STRIDE))
            self.counter.copy_(self._place)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is."""
        return {"noise_counter": self.counter.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.counter.copy_(state["noise_counter"])
        if self._place is not None:
            self._place.copy_(self.counter)  # where a captured step reads it


def _signed(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31
