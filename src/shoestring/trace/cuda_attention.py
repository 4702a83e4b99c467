"""Which attention kernel PyTorch would choose on the GPU, and what is handed to it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..devices import gpu

_HALF = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten


def attention(
    original: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The kernel PyTorch would choose: cuDNN's or flash for half precision, else the
    memory-efficient one, and plain matrix products where none of them can run."""
    mask = attn_mask
    fused = _fusable(query, key, value, enable_gqa)
    if mask is not None and (is_causal or (mask.stride(-1) != 1 and mask.shape[-1] != 1)):
        fused = False
    if mask is not None and mask.dtype is torch.bool:
        minus_infinity = torch.scalar_tensor(float("-inf"), dtype=query.dtype)
        mask = torch.where(mask, torch.scalar_tensor(0.0, dtype=query.dtype), minus_infinity)
    needs = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if fused and _cudnn(query, value, mask):
        return _aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, needs, dropout_p, is_causal, False, scale=scale
        )[0]
    if fused and mask is None and _flash(query, value):
        width = query.shape[-1]
        padding = -width % 8
        padded = [F.pad(t, (0, padding)) if padding else t for t in (query, key, value)]
        out = _aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, False, scale=scale or width**-0.5
        )[0]
        return out[..., :width] if padding else out
    if fused and _efficient(query, value) and query.shape[1] == key.shape[1]:
        if mask is not None:
            mask = _aligned(mask).expand(*query.shape[:-1], key.shape[-2])
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, needs, dropout_p, is_causal, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def _fusable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gqa: bool) -> bool:
    same_heads = query.shape[1:2] == key.shape[1:2] == value.shape[1:2]
    return (
        query.dim() == key.dim() == value.dim() == 4
        and query.shape[0] == key.shape[0] == value.shape[0]
        and (same_heads or (gqa and query.dtype in _HALF))
        and query.shape[-1] == key.shape[-1]
        and min(query.shape[-2], key.shape[-2], query.numel(), value.numel()) > 0
        and all(t.stride(-1) == 1 for t in (query, key, value))
    )


def _cudnn(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    return (
        "cudnn" in gpu().attention_kernels
        and torch.backends.cuda.cudnn_sdp_enabled()
        and query.dtype in _HALF
        and not (mask is not None and mask.requires_grad)
        and all(t.shape[-1] % 8 == 0 and t.shape[-1] <= gpu().widest_head for t in (query, value))
    )


def _flash(query: torch.Tensor, value: torch.Tensor) -> bool:
    return (
        "flash" in gpu().attention_kernels
        and torch.backends.cuda.flash_sdp_enabled()
        and query.dtype in _HALF
        and query.shape[-1] == value.shape[-1] <= gpu().widest_head
    )


def _efficient(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Widths must fill 16-byte accesses."""
    alignment = 8 if query.dtype in _HALF else 4
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dtype in (*_HALF, torch.float32)
        and query.shape[-1] % alignment == 0
        and value.shape[-1] % alignment == 0
    )


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """Rows of a bias must start at multiples of 16 elements; others are copied with padding."""
    if mask.stride(-1) == 1 and all(s % 16 == 0 for s in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return F.pad(mask, (0, 16 - length % 16))[..., :length]
