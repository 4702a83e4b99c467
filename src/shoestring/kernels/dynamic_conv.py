"""Dynamic convolution on CUDA, in Triton: one kernel forward and one backward, nothing unfolded.

A program makes a few positions of one head of one sentence. It reads the shifted rows of its
neighbors once a tap, which the cache holds, and sums in FP32. There are no atomic additions: the
same input gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..devices import gpu

TILE = 2048
"""Elements a program sums at once, where there is work for all processors."""
SMALL_TILE = 512
UNROLL = tl.constexpr(4)
"""Taps whose loads are under way at once. All 31 would make compiling take many times as long."""


@triton.jit
def _rows(start, positions, time, channel, there, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The channels at each position in FP32, zeros where there is none."""
    inside = ((positions >= 0) & (positions < time))[:, None] & there[None, :]
    place = positions[:, None] * WIDTH + channel[None, :]
    return tl.load(start + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _tap(start, positions, time, k, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weight of tap k at each position in FP32, zeros where there is none."""
    inside = (positions >= 0) & (positions < time)
    return tl.load(start + positions * STEP + k, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["time", "left"])
def _forward_kernel(  # type: ignore[no-untyped-def]
    x, weights, out, time, left,
    HEADS: tl.constexpr, EACH: tl.constexpr, TAPS: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(time, ROWS)
    head, sentence = tl.program_id(1), (tl.program_id(0) // tiles).to(tl.int64)
    t = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, LANES)
    WIDTH: tl.constexpr = HEADS * EACH
    STEP: tl.constexpr = HEADS * TAPS
    first = sentence * time * WIDTH + head * EACH
    taps = weights + sentence * time * STEP + head * TAPS
    total = tl.zeros([ROWS, LANES], tl.float32)
    for k in tl.range(0, TAPS, loop_unroll_factor=UNROLL):
        value = _rows(x + first, t + (k - left), time, c, c < EACH, WIDTH)
        total += _tap(taps, t, time, k, STEP)[:, None] * value
    place = out + first + t[:, None] * WIDTH + c[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(t < time)[:, None] & (c < EACH)[None, :])


@triton.jit(do_not_specialize=["time", "left"])
def _backward_kernel(  # type: ignore[no-untyped-def]
    x, weights, grad, grad_x, grad_weights, time, left,
    HEADS: tl.constexpr, EACH: tl.constexpr, TAPS: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, FOR_X: tl.constexpr, FOR_WEIGHTS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(time, ROWS)
    head, sentence = tl.program_id(1), (tl.program_id(0) // tiles).to(tl.int64)
    t = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, LANES)
    WIDTH: tl.constexpr = HEADS * EACH
    STEP: tl.constexpr = HEADS * TAPS
    first = sentence * time * WIDTH + head * EACH
    taps = sentence * time * STEP + head * TAPS
    total = tl.zeros([ROWS, LANES], tl.float32)
    here = _rows(grad + first, t, time, c, c < EACH, WIDTH)
    for k in tl.range(0, TAPS, loop_unroll_factor=UNROLL):
        if FOR_X:
            reader = t - (k - left)  # the position that tap k brought this one to
            value = _rows(grad + first, reader, time, c, c < EACH, WIDTH)
            total += _tap(weights + taps, reader, time, k, STEP)[:, None] * value
        if FOR_WEIGHTS:
            product = tl.sum(here * _rows(x + first, t + (k - left), time, c, c < EACH, WIDTH), 1)
            place = grad_weights + taps + t * STEP + k
            tl.store(place, product.to(grad_weights.dtype.element_ty), mask=t < time)
    if FOR_X:
        place = grad_x + first + t[:, None] * WIDTH + c[None, :]
        inside = (t < time)[:, None] & (c < EACH)[None, :]
        tl.store(place, total.to(grad_x.dtype.element_ty), mask=inside)


def _launch(x: torch.Tensor, weights: torch.Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, and what the kernels are made for."""
    (batch, time, width), (heads, taps) = x.shape, weights.shape[2:]
    lanes = triton.next_power_of_2(width // heads)
    rows = max(TILE // lanes, 1)
    if batch * triton.cdiv(time, rows) * heads < 2 * gpu().multiprocessors:  # too few programs
        rows = max(SMALL_TILE // lanes, 1)
    settings = {
        "HEADS": heads,
        "EACH": width // heads,
        "TAPS": taps,
        "ROWS": rows,
        "LANES": lanes,
        "num_warps": 4,
    }
    return (batch * triton.cdiv(time, rows), heads), settings


def convolve(x: torch.Tensor, weights: torch.Tensor, left: int) -> torch.Tensor:
    """The convolution of (batch, time, channels) by (batch, time, heads, taps)."""
    x, weights = x.contiguous(), weights.contiguous()
    out = torch.empty_like(x)
    grid, settings = _launch(x, weights)
    with torch.cuda.device_of(x):
        _forward_kernel[grid](x, weights, out, x.shape[1], left, **settings)
    return out


def gradients(
    x: torch.Tensor,
    weights: torch.Tensor,
    grad: torch.Tensor,
    left: int,
    for_x: bool = True,
    for_weights: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x and of the weights, or None where it is not asked for."""
    x, weights, grad = x.contiguous(), weights.contiguous(), grad.contiguous()
    grad_x = torch.empty_like(x) if for_x else None
    grad_weights = torch.empty_like(weights) if for_weights else None
    grid, settings = _launch(x, weights)
    with torch.cuda.device_of(x):
        _backward_kernel[grid](
            x, weights, grad, grad_x if for_x else x, grad_weights if for_weights else weights,
            x.shape[1], left, FOR_X=for_x, FOR_WEIGHTS=for_weights, **settings,
        )  # fmt: skip
    return grad_x, grad_weights
