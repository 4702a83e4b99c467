"""A step in 16 bits, emulated: every result of an operation is rounded to so many bits.

Beside the same step in FP32 it says how much 16 bits change this very step, whatever kernels do.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..torch_private.autograd import runs_backward
from ..torch_private.dispatch import OperationMode
from ..torch_private.trees import tensor_leaves

BITS = {"fp32": 23, "fp16": 11, "bf16": 8}
"""Of the significand, the leading one included; of FP32 one less, so that rounding shows."""
EPSILON = {kind: 2.0 ** (1 - bits) for kind, bits in BITS.items()}
_LEAST_EXPONENT = {"fp16": -13}
"""Of FP16's normal numbers, as `frexp` has it: smaller ones have fewer bits. BF16 has FP32's."""


class Rounded(OperationMode):
    """Rounds what every operation makes to so many bits, and overflows nowhere.

    Small numbers of FP16 lose bits in the passes, in the backward pass after they were multiplied
    by the loss `scale`. `seed` rounds up or down at random, as often as the number is near:
    another sample. Whole numbers stay: counts and places, such as the rows of each expert, which
    no step has in a type that cannot hold them.
    """

    def __init__(self, kind: str, seed: int | None = None, scale: float = 1.0) -> None:
        super().__init__()
        self._bits, self._noise = BITS[kind], None
        self._least, self._scale = _LEAST_EXPONENT.get(kind), round(math.log2(scale))
        if seed is not None:
            self._noise = torch.Generator().manual_seed(seed)

    @property
    def _exponent(self) -> int | None:
        """The least one with all bits; None in the update, whose state has scales of its own."""
        if self._least is None or runs_backward():
            return None if self._least is None else self._least - self._scale
        return self._least if torch.is_grad_enabled() else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.is_view:
            return made
        for leaf in tensor_leaves(made):
            if leaf.dtype in (torch.float32, torch.float64) and not _is_whole(leaf):
                rounded_(leaf, self._bits, self._noise, self._exponent)
        return made


def _is_whole(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    few = tensor[(0,) * (tensor.dim() - 1)] if tensor.dim() else tensor
    return bool((few == few.trunc()).all()) and bool((tensor == tensor.trunc()).all())


@torch.no_grad()
def rounded_(
    tensor: torch.Tensor,
    bits: int,
    noise: torch.Generator | None = None,
    least: int | None = None,
) -> None:
    """To the nearest number of so many bits, or to one beside it at random; in place.

    Numbers of a smaller exponent than `least` have as many places as those of that one.
    """
    if not tensor.numel() or tensor._is_zerotensor() or 0 in tensor.stride():
        return
    fraction, exponent = torch.frexp(tensor)
    if least is not None:
        lost = (least - exponent).clamp_(min=0)
        fraction, exponent = torch.ldexp(fraction, -lost), exponent + lost
    scaled = fraction * 2**bits
    if noise is None:
        scaled.round_()
    else:
        scaled.add_(torch.rand(scaled.shape, generator=noise).to(scaled)).floor_()
    made = torch.ldexp(scaled / 2**bits, exponent)
    tensor.copy_(torch.where(made.isinf(), tensor, made))  # the largest number stays finite
