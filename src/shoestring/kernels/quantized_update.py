"""SGD, Adam and AdamW with moments in few bits, in Triton: one pass over everything.

Each program takes some blocks of codes with their parameters and gradients: it unscales, decodes,
updates, rounds 16-bit weights at random, finds the new scales and encodes. Nothing is allocated.
`codes.py` is the same in PyTorch; random bits agree, so all but the last bit of a sum does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import SHIFTS
from .rounding import FIRST, SECOND, STRIDE

ROWS = {8: 8, 4: 16, 32: 8}
"""Blocks of one program, by bits."""
WARPS = 4
_STRIDE, _FIRST, _SECOND = tl.constexpr(STRIDE), tl.constexpr(FIRST), tl.constexpr(SECOND)
_FIRST_MOMENT, _SECOND_MOMENT = tl.constexpr(SHIFTS[0]), tl.constexpr(SHIFTS[1])


@triton.jit
def _random(counter, draw, place):  # type: ignore[no-untyped-def]
    """32 bits, as `codes.random_bits`."""
    x = place.to(tl.int32) + (counter + _STRIDE * (draw + 1))
    x = (x ^ ((x >> 16) & 0xFFFF)) * _FIRST
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _SECOND
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def _floats(bits, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `codes.noise_of`."""
    return (((bits >> SHIFT) & 0xFFFF).to(tl.float32) + 0.5) * (1.0 / 65536)


@triton.jit
def _decoded(  # type: ignore[no-untyped-def]
    codes, scale, start, row, column, there, first_block, blocks,
    BITS: tl.constexpr, SIGNED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    place = row * BLOCK + column
    if BITS == 32:
        return tl.load(codes + start + place, mask=there, other=0.0)
    block = first_block + tl.arange(0, ROWS)
    s = tl.load(scale + block, mask=block < blocks, other=0.0)
    whole = (block < blocks)[:, None]
    if BITS == 8:
        q = tl.load(codes + start + place, mask=whole, other=0).to(tl.float32)
    else:
        half: tl.constexpr = BLOCK // 2
        byte = tl.load(codes + start // 2 + row * half + column % half, mask=whole, other=0)
        q = ((byte.to(tl.int32) >> (4 * (column // half))) & 15).to(tl.float32)
        if SIGNED:
            q -= 8.0
    if SIGNED:
        top: tl.constexpr = 127 if BITS == 8 else 7
        return q * tl.abs(q) * (s * (1.0 / (top * top)))[:, None]
    count: tl.constexpr = 256 if BITS == 8 else 16
    q += 1.0
    return q * q * (s * (1.0 / (count * count)))[:, None]


@triton.jit
def _keep(  # type: ignore[no-untyped-def]
    value, noise, codes, scale, start, row, column, there, first_block, blocks,
    BITS: tl.constexpr, SIGNED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Encode and store."""
    place = row * BLOCK + column
    if BITS == 32:
        tl.store(codes + start + place, value, mask=there)
    else:
        size = tl.where(there, tl.abs(value), 0.0)
        s = tl.max(size, axis=1)
        block = first_block + tl.arange(0, ROWS)
        kept = block < blocks
        inverse = tl.where(s > 0, 1.0 / s, 0.0)
        if SIGNED:
            top: tl.constexpr = 127 if BITS == 8 else 7
            squares = size * (inverse * (top * top))[:, None]
            q = tl.floor(tl.sqrt(squares))
            chance = (squares - q * q) / (2.0 * q + 1.0)
            q = tl.minimum(tl.where(chance > noise, q + 1.0, q), top)
            q = tl.where(value < 0, -q, q)
        else:
            count: tl.constexpr = 256 if BITS == 8 else 16
            squares = size * (inverse * (count * count))[:, None]
            q = tl.minimum(tl.maximum(tl.floor(tl.sqrt(squares)), 1.0), count)
            low = q * q
            high = low + 2.0 * q + 1.0
            low *= low
            chance = (squares * squares - low) / (high * high - low)
            q = tl.minimum(tl.where(chance > noise, q + 1.0, q), count) - 1.0
        tl.store(scale + block, s, mask=kept)
        if BITS == 8:
            tl.store(codes + start + place, q.to(codes.dtype.element_ty), mask=kept[:, None])
        else:
            half: tl.constexpr = BLOCK // 2
            if SIGNED:
                q += 8.0
            shifted = q.to(tl.int32) << (4 * (column // half))
            byte = tl.sum(tl.reshape(shifted, (ROWS, 2, half)), axis=1)
            lines = tl.arange(0, ROWS)[:, None] * half + tl.arange(0, half)[None, :]
            tl.store(codes + start // 2 + lines, byte.to(tl.uint8), mask=kept[:, None])


@triton.jit
def _rounded(value, bits, DROPPED: tl.constexpr, KEEP_NAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """At random to a type with so many bits less."""
    noise = bits & ((1 << DROPPED) - 1)
    made = ((noise + value.to(tl.int32, bitcast=True)) & -(1 << DROPPED)).to(
        tl.float32, bitcast=True
    )
    if KEEP_NAN:
        made = tl.where(tl.abs(value) < float("inf"), made, value)
    return made


@triton.jit
def _lacking(exponent):  # type: ignore[no-untyped-def]
    """1 - e^x for x < 0, without the loss of digits near zero."""
    x = exponent
    series = 1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720))
    series = x * (1.0 + x * (0.5 + x * (1.0 / 6 + x * series)))
    return tl.where(x > -0.25, -series, 1.0 - tl.exp(x))


@triton.jit(do_not_specialize=["draw", "elements", "blocks"])
def quantized_adam_kernel(  # type: ignore[no-untyped-def]
    parameter, gradient, first, second, first_scale, second_scale, step, rate, scale, found_inf,
    counter, elements, blocks, draw,
    keep_first, add_first, keep_second, add_second, log_first, log_second, decay, eps,
    BITS: tl.constexpr, UNSCALE: tl.constexpr, COUPLED: tl.constexpr, MAXIMIZE: tl.constexpr,
    DROPPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    start = program.to(tl.int64) * (ROWS * BLOCK)
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    place = row * BLOCK + column
    there = start + place < elements
    p = tl.load(parameter + start + place, mask=there, other=0.0).to(tl.float32)
    g = tl.load(gradient + start + place, mask=there, other=0.0).to(tl.float32)
    m = _decoded(
        first, first_scale, start, row, column, there, program * ROWS, blocks,
        BITS, True, BLOCK, ROWS,
    )  # fmt: skip
    v = _decoded(
        second, second_scale, start, row, column, there, program * ROWS, blocks,
        BITS, False, BLOCK, ROWS,
    )  # fmt: skip
    if BITS != 32:
        v *= v
    if UNSCALE:
        g *= 1.0 / tl.load(scale)
        kept = (tl.load(found_inf) == 0.0).to(tl.int32)  # else nothing is written
        blocks = blocks * kept
        there = start + place < elements * kept
    if MAXIMIZE:
        g = -g
    if COUPLED:
        g += decay * p
    m = keep_first * m + add_first * g
    v = keep_second * v + add_second * (g * g)
    lr = tl.load(rate).to(tl.float32)
    t = tl.load(step) + 1.0
    root = tl.sqrt(v)
    if not COUPLED:
        p -= lr * decay * p
    p -= lr / _lacking(t * log_first) * m / (root / tl.sqrt(_lacking(t * log_second)) + eps)
    bits = _random(tl.load(counter), draw, start + place)
    if DROPPED:
        p = _rounded(p, bits, DROPPED, not UNSCALE)
    tl.store(parameter + start + place, p.to(parameter.dtype.element_ty), mask=there)
    _keep(
        m, _floats(bits, _FIRST_MOMENT), first, first_scale, start, row, column, there,
        program * ROWS, blocks, BITS, True, BLOCK, ROWS,
    )  # fmt: skip
    if BITS != 32:
        v = root
    _keep(
        v, _floats(bits, _SECOND_MOMENT), second, second_scale, start, row, column, there,
        program * ROWS, blocks, BITS, False, BLOCK, ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["draw", "elements", "blocks"])
def quantized_sgd_kernel(  # type: ignore[no-untyped-def]
    parameter, gradient, buffer, buffer_scale, rate, scale, found_inf, counter, elements, blocks,
    draw, momentum, decay,
    BITS: tl.constexpr, UNSCALE: tl.constexpr, MAXIMIZE: tl.constexpr, MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr, DROPPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    start = program.to(tl.int64) * (ROWS * BLOCK)
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    place = row * BLOCK + column
    there = start + place < elements
    p = tl.load(parameter + start + place, mask=there, other=0.0).to(tl.float32)
    g = tl.load(gradient + start + place, mask=there, other=0.0).to(tl.float32)
    if UNSCALE:
        g *= 1.0 / tl.load(scale)
        kept = (tl.load(found_inf) == 0.0).to(tl.int32)  # else nothing is written
        blocks = blocks * kept
        there = start + place < elements * kept
    if MAXIMIZE:
        g = -g
    g += decay * p
    bits = _random(tl.load(counter), draw, start + place)
    if MOMENTUM:
        m = momentum * _decoded(
            buffer, buffer_scale, start, row, column, there, program * ROWS, blocks,
            BITS, True, BLOCK, ROWS,
        ) + g  # fmt: skip
        _keep(
            m, _floats(bits, _FIRST_MOMENT), buffer, buffer_scale, start, row, column, there,
            program * ROWS, blocks, BITS, True, BLOCK, ROWS,
        )  # fmt: skip
        g = g + momentum * m if NESTEROV else m
    p -= tl.load(rate).to(tl.float32) * g
    if DROPPED:
        p = _rounded(p, bits, DROPPED, not UNSCALE)
    tl.store(parameter + start + place, p.to(parameter.dtype.element_ty), mask=there)
