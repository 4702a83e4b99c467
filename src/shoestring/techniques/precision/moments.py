"""How an optimizer's state is stored in 16 bits, and read again in FP32.

FP16 ends at 6e-8, and a gradient of 1e-4 has a second moment of 1e-8. So each block of a moment
has an exponent beside it, `exp_avg_exponent`, chosen such that the largest element lies in
[2^14, 2^15); second moments are stored as square roots, which span no more powers of two than the
gradients themselves; and both are rounded at random, or a slow average would stand still.
Exponents are whole numbers in the parameter's own type: `Optimizer.load_state_dict` casts them to
it, and that must lose nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .rounding import Noise

BLOCK_ELEMENTS = 2**18
"""A tensor is updated in blocks of rows of about this many elements, so FP32 copies are small."""

SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta"})
SUFFIX = "_exponent"

Rows = Any  # a slice, or all


def blocks(tensor: torch.Tensor) -> Iterator[Rows]:
    """Consecutive rows, about `BLOCK_ELEMENTS` at a time."""
    if tensor.numel() <= BLOCK_ELEMENTS:
        yield ...
        return
    rows = max(1, BLOCK_ELEMENTS * tensor.shape[0] // tensor.numel())
    for start in range(0, tensor.shape[0], rows):
        yield slice(start, start + rows)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in FP32, made of its bits: exact on every device."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


class Storage:
    """Writes FP32 tensors into 16-bit ones, block by block, and reads them."""

    def __init__(self, noise: Noise | None, *, scaled: bool) -> None:
        self._noise, self._scaled = noise, scaled

    def make(self, state: dict[str, Any], key: str, like: torch.Tensor, count: int) -> None:
        """Room for one state tensor in `count` blocks."""
        state[key] = torch.zeros_like(like)
        if self._scaled and like.dtype is torch.float16:
            state[key + SUFFIX] = torch.zeros(count, dtype=like.dtype, device=like.device)

    def read(self, state: dict[str, Any], key: str, rows: Rows, index: int) -> torch.Tensor:
        """A block in FP32, a copy."""
        wide = state[key][rows].to(torch.float32, copy=True)
        if key + SUFFIX not in state:
            return wide
        wide.mul_(power_of_two(-state[key + SUFFIX][index]))
        return wide.square_() if key in SQUARES else wide

    def write(
        self,
        state: dict[str, Any],
        key: str,
        rows: Rows,
        index: int,
        value: torch.Tensor,
        skip: torch.Tensor | None,
    ) -> None:
        """A block of FP32 values; where `skip` says so, everything stays as it is."""
        stored = state[key]
        if stored.dtype is torch.float32:
            write(stored[rows], value, skip)
            return
        if key + SUFFIX in state:
            value = value.sqrt() if key in SQUARES else value
            top = torch.frexp(value.abs().max())[1]
            exponent = (15 - top).clamp_(-120, 120)
            value = value * power_of_two(exponent)
            slot = state[key + SUFFIX][index]
            write(slot, exponent.to(slot.dtype), skip)
        narrow = None if self._noise is None else self._noise.rounded(value, stored.dtype)
        write(stored[rows], value.to(stored.dtype) if narrow is None else narrow, skip)


def write(target: torch.Tensor, value: torch.Tensor, skip: torch.Tensor | None) -> None:
    """target ← value, unless `skip`."""
    target.copy_(value if skip is None else torch.where(skip, target, value))
