"""SGD, Adam and AdamW on 16-bit tensors in Triton: in place, computed in FP32.

`techniques/precision/fused.py` launches them, once for each piece of a parameter. Random bits are
those of `rounding.Noise`, so the kernels compute what PyTorch's optimizer computes on FP32 copies,
but for the last bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import FIRST, SECOND, STRIDE

BLOCK = 1024
_ANYWHERE = ["first_exponent", "second_exponent"]
_STRIDE, _FIRST, _SECOND = tl.constexpr(STRIDE), tl.constexpr(FIRST), tl.constexpr(SECOND)


@triton.jit
def _power_of_two(exponent):  # type: ignore[no-untyped-def]
    return ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _moved(  # type: ignore[no-untyped-def]
    parameter, gradient, first, second, first_exponent, second_exponent, scale, place, there,
    keep_first, add_first, keep_second, add_second, decay,
    SCALED: tl.constexpr, UNSCALE: tl.constexpr, COUPLED: tl.constexpr,
):  # fmt: skip
    """The parameter, and the moments after this gradient."""
    p = tl.load(parameter + place, mask=there, other=0.0).to(tl.float32)
    g = tl.load(gradient + place, mask=there, other=0.0).to(tl.float32)
    m = tl.load(first + place, mask=there, other=0.0).to(tl.float32)
    v = tl.load(second + place, mask=there, other=0.0).to(tl.float32)
    if UNSCALE:
        g *= 1.0 / tl.load(scale)
    if COUPLED:
        g += decay * p
    if SCALED:
        m *= _power_of_two(-tl.load(first_exponent))
        v *= _power_of_two(-tl.load(second_exponent))
        v *= v
    return p, keep_first * m + add_first * g, keep_second * v + add_second * (g * g)


@triton.jit(do_not_specialize=_ANYWHERE)
def tops_kernel(  # type: ignore[no-untyped-def]
    parameter, gradient, first, second, first_exponent, second_exponent, scale, tops, elements,
    keep_first, add_first, keep_second, add_second, decay,
    UNSCALE: tl.constexpr, COUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest elements of the new moments, as they are stored."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < elements
    _, m, v = _moved(
        parameter, gradient, first, second, first_exponent, second_exponent, scale, place, there,
        keep_first, add_first, keep_second, add_second, decay, True, UNSCALE, COUPLED,
    )  # fmt: skip
    tl.atomic_max(tops, tl.max(tl.where(there, tl.abs(m), 0.0), axis=0))
    tl.atomic_max(tops + 1, tl.sqrt(tl.max(tl.where(there, v, 0.0), axis=0)))


@triton.jit
def _rounded(value, counter, draw, place, BITS: tl.constexpr, KEEP_NAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `Noise.rounded`."""
    x = place + (counter + _STRIDE * draw)
    x = (x ^ (x >> 16)) * _FIRST
    x = (x ^ (x >> 15)) * _SECOND
    x = (x ^ (x >> 16)) & ((1 << BITS) - 1)
    made = ((x + value.to(tl.int32, bitcast=True)) & -(1 << BITS)).to(tl.float32, bitcast=True)
    if KEEP_NAN:
        made = tl.where(tl.abs(value) < float("inf"), made, value)
    return made


@triton.jit(
    do_not_specialize=["first_exponent", "second_exponent", "corrections", "draw", "offset"]
)
def update_kernel(  # type: ignore[no-untyped-def]
    parameter, gradient, first, second, first_exponent, second_exponent, exponents, corrections,
    rate, scale, found_inf, counter, elements, draw, offset,
    keep_first, add_first, keep_second, add_second, decay, eps,
    SCALED: tl.constexpr, UNSCALE: tl.constexpr, COUPLED: tl.constexpr, BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr, SWAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < elements
    p, m, v = _moved(
        parameter, gradient, first, second, first_exponent, second_exponent, scale, place, there,
        keep_first, add_first, keep_second, add_second, decay, SCALED, UNSCALE, COUPLED,
    )  # fmt: skip
    if UNSCALE:
        there = there & (tl.load(found_inf + 0 * place) == 0.0)
    lr = tl.load(rate).to(tl.float32)
    root = tl.sqrt(v)
    if not COUPLED:
        p -= lr * decay * p
    p -= lr / tl.load(corrections) * m / (root / tl.load(corrections + 1) + eps)
    if SCALED:
        m *= _power_of_two(tl.load(exponents))
        v = root * _power_of_two(tl.load(exponents + 1))
    if BITS:
        at, drawn = tl.load(counter), place + offset
        if STOCHASTIC:
            p = _rounded(p, at, draw + 1, drawn, BITS, not UNSCALE)
        mine = draw + STOCHASTIC + 1
        m = _rounded(m, at, mine + SWAPPED, drawn, BITS, not UNSCALE)
        v = _rounded(v, at, mine + 1 - SWAPPED, drawn, BITS, not UNSCALE)
    tl.store(parameter + place, p.to(parameter.dtype.element_ty), mask=there)
    tl.store(first + place, m.to(first.dtype.element_ty), mask=there)
    tl.store(second + place, v.to(second.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["draw", "offset"])
def sgd_kernel(  # type: ignore[no-untyped-def]
    parameter, gradient, buffer, rate, scale, found_inf, counter, elements, draw, offset,
    momentum, decay,
    UNSCALE: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < elements
    p = tl.load(parameter + place, mask=there, other=0.0).to(tl.float32)
    g = tl.load(gradient + place, mask=there, other=0.0).to(tl.float32)
    if UNSCALE:
        g *= 1.0 / tl.load(scale)
        there = there & (tl.load(found_inf + 0 * place) == 0.0)
    g += decay * p
    at, drawn = tl.load(counter), place + offset
    if MOMENTUM:
        m = momentum * tl.load(buffer + place, mask=there, other=0.0).to(tl.float32) + g
        g = g + momentum * m if NESTEROV else m
        if BITS:
            m = _rounded(m, at, draw + 2, drawn, BITS, not UNSCALE)
        tl.store(buffer + place, m.to(buffer.dtype.element_ty), mask=there)
    p -= tl.load(rate).to(tl.float32) * g
    if BITS:
        p = _rounded(p, at, draw + 1, drawn, BITS, not UNSCALE)
    tl.store(parameter + place, p.to(parameter.dtype.element_ty), mask=there)
