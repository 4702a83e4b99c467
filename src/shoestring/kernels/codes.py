"""Moments of an optimizer in 8 or 4 bits: blocks of codes, each block with one FP32 scale.

A *signed* code q stands for sign(q)·(q/top)²·scale: fine near zero, where most elements are. An
*unsigned* code stands for ((q+1)/(top+1))²·scale, and never for zero: it holds the root of a second
moment, by which an update is divided. The scale is the largest element of the block.

Codes are rounded at random, or an average that moves by less than a code would stand still. The
chance of the next code is such that the expected moment is the moment itself; for a root that is
its square, since the average is one of squares.

Two codes of 4 bits share a byte: element j of a block and element j + half of the block.
`quantized_update` has the same in Triton, with the same random bits.
"""

from __future__ import annotations

import torch

from .rounding import FIRST, SECOND, STRIDE

BLOCK = {8: 256, 4: 128}
"""Elements that share a scale."""
TOP = {8: (127, 255), 4: (7, 15)}
"""The largest code, signed and unsigned."""


SHIFTS = (8, 16)
"""Where in the 32 random bits of an element the 16 begin that round its first and second moment.
They overlap each other, and the lowest ones that round the element: only their own mean matters."""


def blocks_of(elements: int, bits: int) -> int:
    """How many blocks hold so many elements."""
    return -(-elements // BLOCK[bits])


def code_bytes(elements: int, bits: int) -> int:
    """Bytes of the codes; the last block is whole."""
    return blocks_of(elements, bits) * BLOCK[bits] * bits // 8


def state_bytes(elements: int, bits: int) -> int:
    """Bytes of one moment: codes and scales."""
    return code_bytes(elements, bits) + 4 * blocks_of(elements, bits)


def decode(codes: torch.Tensor, scale: torch.Tensor, bits: int, *, signed: bool) -> torch.Tensor:
    """Codes of whole blocks → FP32, one row a block."""
    rows = codes.view(scale.numel(), -1)
    if bits == 4:
        low = rows.view(torch.uint8)
        numbers = torch.cat([low & 15, low >> 4], dim=1).float()
        if signed:
            numbers.sub_(8)
    else:
        numbers = rows.float()
    top = TOP[bits][0 if signed else 1]
    if signed:
        return numbers.mul_(numbers.abs()).mul_((scale / top**2)[:, None])
    return numbers.add_(1).square_().mul_((scale / (top + 1) ** 2)[:, None])


def encode(
    values: torch.Tensor, noise: torch.Tensor | float, bits: int, *, signed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 rows, which are spent → codes and scales.

    The next code is taken where `noise` in [0, 1) is less than its chance. Without a sign the
    values are roots, and not negative.
    """
    scale = values.abs().amax(1) if signed else values.amax(1)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    top = TOP[bits][0 if signed else 1]
    if signed:
        sign = values.sign()
        squares = values.abs_().mul_((inverse * top**2)[:, None])
        numbers = squares.sqrt().floor_()
        chance = squares.addcmul_(numbers, numbers, value=-1).div_(2 * numbers + 1)
        numbers.add_(chance > noise).clamp_(max=top).mul_(sign)
    else:
        squares = values.mul_((inverse * (top + 1) ** 2)[:, None])
        numbers = squares.sqrt().floor_().clamp_(1, top + 1)
        below, above = numbers.pow(4), (numbers + 1).pow_(4)
        chance = squares.square_().sub_(below).div_(above.sub_(below))
        numbers.add_(chance > noise).clamp_(max=top + 1).sub_(1)
    if bits == 8:
        return numbers.to(torch.int8 if signed else torch.uint8).view(-1), scale
    nibbles = (numbers + 8 if signed else numbers).to(torch.uint8)
    low, high = nibbles.chunk(2, dim=1)
    return (low | (high << 4)).reshape(-1), scale


def random_bits(counter: torch.Tensor, draw: int, start: int, count: int) -> torch.Tensor:
    """32 random bits for each of `count` elements from `start` on, as int32; as the kernels'."""
    x = torch.arange(count, dtype=torch.int32, device=counter.device)
    x.add_(counter + _signed(STRIDE * (draw + 1) + start))
    # A shift of the sign would fill with ones: only what lies below it is mixed in.
    x.bitwise_xor_((x >> 16) & 0xFFFF).mul_(FIRST)
    x.bitwise_xor_((x >> 15) & 0x1FFFF).mul_(SECOND)
    return x.bitwise_xor_((x >> 16) & 0xFFFF)


def noise_of(bits: torch.Tensor, shift: int) -> torch.Tensor:
    """16 of the random bits, in (0, 1)."""
    return ((bits >> shift) & 0xFFFF).float().add_(0.5).div_(65536)


def _signed(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31
