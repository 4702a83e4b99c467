"""Which kernels this CPU runs for 16-bit tensors (`torch.cpu`, `torch.ops.mkldnn`)."""

from __future__ import annotations

from typing import Literal

import torch

SixteenBits = Literal["native", "sums", "blocks", "unknown"]
"""PyTorch's own kernels; oneDNN's with FP32 sums of the whole result, as where bf16 is emulated;
oneDNN's block by block; or oneDNN's of a kind that was not measured."""


def sixteen_bits(dtype: torch.dtype) -> SixteenBits:
    """Of matrix products and convolutions in `dtype`, in this process."""
    if not (torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()):
        return "native"
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    if not getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")():
        return "native"
    if name == "fp16" or not _has("avx512") or _has("amx_tile"):
        return "unknown"
    return "blocks" if _has("avx512_bf16") else "sums"


def _has(feature: str) -> bool:
    return bool(getattr(torch.cpu, f"_is_{feature}_supported")())
