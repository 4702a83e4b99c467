"""How a moment lies in `optimizer.state`: codes under its own name, scales beside it.

    state["exp_avg"]         int8 or uint8, flat, whole blocks
    state["exp_avg_scale"]   FP32, one number a block

Tensors of fewer than `smallest` elements keep FP32 moments of their own shape, and no scale.
Elements are in the order of the parameter's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels.codes import blocks_of, code_bytes, decode, encode, state_bytes
from ...trace.cuda import is_dense
from ..base import Meaning
from ..optimizers import whole_elements

SCALE = "_scale"
SIGNED = {"exp_avg": True, "momentum_buffer": True, "exp_avg_sq": False}
"""Moments that are stored so; second moments as roots, which have no sign."""


@dataclass(frozen=True)
class MomentCodes:
    """Bits, and from how many elements on."""

    bits: int
    smallest: int

    def quantizes(self, elements: int) -> bool:
        """Whether a tensor of so many elements has its moments in few bits."""
        return elements >= self.smallest

    def nbytes(self, elements: int) -> int:
        """Of one moment."""
        return state_bytes(elements, self.bits) if self.quantizes(elements) else 4 * elements

    def make(self, state: dict[str, Any], key: str, parameter: torch.Tensor) -> None:
        """A moment of zeros."""
        elements, device = parameter.numel(), parameter.device
        if not self.quantizes(whole_elements(parameter)):
            wide = torch.promote_types(parameter.dtype, torch.float32)
            state[key] = dense_like(parameter, wide).zero_()
            return
        kind = torch.int8 if SIGNED[key] and self.bits == 8 else torch.uint8
        zero = 0x88 if SIGNED[key] and self.bits == 4 else 0
        size = code_bytes(elements, self.bits)
        state[key] = torch.full((size,), zero, dtype=kind, device=device)
        blocks = blocks_of(elements, self.bits)
        state[key + SCALE] = torch.zeros(blocks, dtype=torch.float32, device=device)

    @torch.no_grad()
    def write(
        self, state: dict[str, Any], key: str, parameter: torch.Tensor, value: torch.Tensor
    ) -> None:
        """A moment of this shape, rounded to the nearest."""
        self.make(state, key, parameter)
        if key + SCALE not in state:
            state[key].copy_(value)
            return
        flat = flat_of(dense_like(parameter, torch.float32).copy_(value))
        blocks = state[key + SCALE].numel()
        rows = flat.new_zeros(blocks * (state[key].numel() * 8 // self.bits // blocks))
        rows[: flat.numel()] = flat if SIGNED[key] else flat.clamp_min(0).sqrt()
        codes, scale = encode(rows.view(blocks, -1), 0.5, self.bits, signed=SIGNED[key])
        state[key].copy_(codes)
        state[key + SCALE].copy_(scale)

    @torch.no_grad()
    def read(self, state: Mapping[str, Any], key: str, parameter: torch.Tensor) -> torch.Tensor:
        """A moment as it is meant, in the parameter's shape."""
        if key + SCALE not in state:
            held: torch.Tensor = state[key]
            return held
        codes, scale = (state[k].to(parameter.device) for k in (key, key + SCALE))
        rows = decode(codes, scale, self.bits, signed=SIGNED[key])
        made = dense_like(parameter, torch.float32)
        flat_of(made).copy_(rows.view(-1)[: parameter.numel()])
        return made if SIGNED[key] else made.square_()


class CodedMoments(Meaning):
    """State in codes, as it is meant."""

    def __init__(self, codes: MomentCodes) -> None:
        self._codes = codes

    def state(
        self, like: torch.Tensor, key: str, held: torch.Tensor, beside: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """Decoded; scales are not state of plain training."""
        if key.removesuffix(SCALE) in SIGNED and key.endswith(SCALE):
            return None
        return self._codes.read(beside, key, like) if key in SIGNED else held


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor in the order of its memory: a view."""
    assert is_dense(tensor)
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def dense_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Room for another tensor that lies as this one, or is contiguous where this has gaps."""
    form = torch.preserve_format if is_dense(tensor) else torch.contiguous_format
    return torch.empty_like(tensor.detach(), dtype=dtype, memory_format=form)
