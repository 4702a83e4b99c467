"""How an optimizer's state is stored in 16 bits, and read again in FP32.

FP16 ends at 6e-8, and a gradient of 1e-4 has a second moment of 1e-8. So each piece of a moment
has an exponent beside it, `exp_avg_exponent`, chosen such that the largest element lies in
[2^14, 2^15); second moments are stored as square roots, which span no more powers of two than the
gradients themselves; and both are rounded at random, or a slow average would stand still.
Exponents are whole numbers in the parameter's own type: `Optimizer.load_state_dict` casts them to
it, and that must lose nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...kernels.rounding import Noise
from ...torch_private.kernels import foreach_copy_, foreach_mul_, foreach_norm
from ..base import Meaning
from .blocks import Flat, UpdateBlock, cut, gather

SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta"})
SUFFIX = "_exponent"


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in FP32, made of its bits: exact on every device."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def exponents_for(tops: torch.Tensor) -> torch.Tensor:
    """Of each largest element, the exponent that brings it into [2^14, 2^15)."""
    return (15 - torch.frexp(tops)[1]).clamp_(-120, 120)


COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})


def is_moment(key: str, value: Any) -> bool:
    """A state tensor, and not a counter; a parameter that is one number has moments like it."""
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return floating and key not in COUNTERS


class MomentStorage:
    """Writes FP32 tensors into 16-bit ones, block by block, and reads them."""

    def __init__(self, noise: Noise | None, *, scaled: bool) -> None:
        self._noise, self.scaled = noise, scaled

    def make(self, state: dict[str, Any], key: str, like: torch.Tensor, pieces: int) -> None:
        """Room for one state tensor in so many pieces."""
        state[key] = torch.zeros_like(like)
        if self.scaled and like.dtype is torch.float16:
            state[key + SUFFIX] = torch.zeros(pieces, dtype=like.dtype, device=like.device)

    def read(self, block: UpdateBlock, states: list[dict[str, Any]], key: str) -> Flat:
        """The pieces of a block in FP32, a copy."""
        wide = gather(_pieces(block, states, key), torch.float32)
        if key + SUFFIX in states[0]:
            exponents = torch.stack(_slots(block, states, key))
            foreach_mul_(wide.views, power_of_two(-exponents).unbind())
            if key in SQUARES:
                wide.whole.square_()
        return wide

    def write(
        self,
        block: UpdateBlock,
        states: list[dict[str, Any]],
        key: str,
        wide: Flat,
        skip: torch.Tensor | None,
    ) -> None:
        """FP32 values, which are spent; where `skip` says so, everything stays as it is."""
        if key + SUFFIX in states[0]:
            if key in SQUARES:
                wide.whole.sqrt_()
            tops = torch.stack(foreach_norm(wide.views, torch.inf))
            exponents = exponents_for(tops)
            foreach_mul_(wide.views, power_of_two(exponents).unbind())
            slots = _slots(block, states, key)
            chosen = exponents.to(slots[0].dtype)
            if skip is not None:
                chosen = torch.where(skip, torch.stack(slots), chosen)
            foreach_copy_(slots, chosen.unbind())
        write(_pieces(block, states, key), wide, self._noise, skip)


class ScaledMoments(Meaning):
    """State that is stored times powers of two, second moments as roots, as it is meant."""

    def __init__(self, elements: int) -> None:
        self._elements = elements

    def state(
        self, like: torch.Tensor, key: str, held: torch.Tensor, beside: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """In FP32; the exponents are not state of plain training."""
        if key.endswith(SUFFIX):
            return None
        if key + SUFFIX not in beside:
            return held
        exponents, meant = beside[key + SUFFIX], held.float()
        rows = [...] if exponents.numel() == 1 else cut(held, self._elements)
        for part, scale in zip(rows, power_of_two(-exponents), strict=True):
            meant[part] *= scale
        return meant.square() if key in SQUARES else meant


def write(
    targets: list[torch.Tensor], wide: Flat, noise: Noise | None, skip: torch.Tensor | None
) -> None:
    """targets ← FP32 values, rounded to the nearest or with noise, unless `skip`."""
    dtype = targets[0].dtype
    if noise is None or dtype is torch.float32:
        narrow = wide.whole.to(dtype)
    else:
        # Updates that are not finite are skipped; where none can be skipped they must stay visible.
        narrow = noise.rounded(wide.whole, dtype, keep_nan=skip is None)
    if skip is not None:
        narrow = torch.where(skip, gather(targets, dtype).whole, narrow)
    foreach_copy_(targets, wide.like(narrow))


def _pieces(block: UpdateBlock, states: list[dict[str, Any]], key: str) -> list[torch.Tensor]:
    return [state[key][piece.rows] for piece, state in zip(block.pieces, states, strict=True)]


def _slots(block: UpdateBlock, states: list[dict[str, Any]], key: str) -> list[torch.Tensor]:
    """Where the exponents of a block's pieces are, each a view of one number."""
    return [
        state[key + SUFFIX][piece.index] for piece, state in zip(block.pieces, states, strict=True)
    ]
