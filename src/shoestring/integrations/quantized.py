"""Frozen linear layers in 4 bits, sized as bitsandbytes stores and uses them.

A prediction needs the bytes, not the numbers: two weights a byte; for every 64 of them one 8-bit
scale, for every 256 of those a 32-bit one (NF4 with double quantization, as QLoRA trains), or for
every 64 a 32-bit scale without it. The whole weight exists only while its layer runs, and again in
the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import InputError

BLOCK, SCALES_BLOCK = 64, 256


@dataclass(frozen=True)
class FourBits:
    """How bitsandbytes stores the weights of linear layers."""

    nested: bool = True
    """The scales are quantized, too."""
    whole: tuple[str, ...] = ()
    """Names of modules that are left as they are, beside the head."""


class Nf4Linear(nn.Linear):
    """A linear layer whose weight is packed; on fake tensors alone."""

    def __init__(self, plain: nn.Linear, dtype: torch.dtype, nested: bool = True) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        elements = plain.weight.numel()
        scales = -(-elements // BLOCK)
        self.weight = nn.Parameter(torch.empty(-(-elements // 2), 1, dtype=torch.uint8), False)
        kind = torch.uint8 if nested else torch.float32
        self.register_buffer("absmax", torch.empty(scales, dtype=kind))
        if nested:
            self.register_buffer("absmax_of_absmax", torch.empty(-(-scales // SCALES_BLOCK)))
        self.bias, self._dtype = plain.bias, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As `bitsandbytes.matmul_4bit`."""
        shape = self.out_features, self.in_features
        out = _Multiply.apply(x.to(self._dtype), self.weight, shape, self._dtype)
        return out if self.bias is None else out + self.bias


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, shape: Any, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.packed, ctx.shape = packed, shape
        return F.linear(x, packed.new_empty(shape, dtype=dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return gradient @ ctx.packed.new_empty(ctx.shape, dtype=gradient.dtype), None, None, None


def quantization_of(config: Any, name: str) -> FourBits | None:
    """How a configuration says its weights are stored; None for whole numbers.

    `from_pretrained` would load them so, in a fraction of the bytes. Stores whose bytes are not
    known here are refused: weights of full size would be predicted without a word.
    """
    given = getattr(config, "quantization_config", None)
    if not given:
        return None
    said = given if isinstance(given, dict) else getattr(given, "to_dict", dict)()
    if said.get("load_in_4bit") or said.get("_load_in_4bit"):
        whole = said.get("llm_int8_skip_modules") or ()
        names = tuple(map(str, whole)) if isinstance(whole, (list, tuple)) else (str(whole),)
        return FourBits(bool(said.get("bnb_4bit_use_double_quant")), names)
    method = said.get("quant_method") or "a method it does not name"
    if said.get("load_in_8bit") or said.get("_load_in_8bit"):
        method = "bitsandbytes in 8 bits"
    raise InputError(
        f"{name} is quantized by {getattr(method, 'value', method)}, whose sizes are not known",
        hint="take quantization_config out of config.json; --quantize nf4 is known",
    )


def quantize_linear(model: nn.Module, dtype: torch.dtype, how: FourBits) -> None:
    """Pack every linear layer but the last, the head, which libraries leave as it is."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            left = any(f".{part}." in f".{path}.{name}." for part in how.whole)
            if type(child) is nn.Linear and child is not head and not left:
                setattr(module, name, Nf4Linear(child, dtype, how.nested))
