"""A minibatch of crops in one pass on CUDA, in Triton: read as bytes, written as the step reads it.

Nothing else is made: neither padded images, nor positions, nor a copy in FP32, which together take
several times the memory of the minibatch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _crop_kernel(  # type: ignore[no-untyped-def]
    images, drawn, scale, shift, out, elements,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PADDING: tl.constexpr,
    CHOSEN: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Elements in the order of memory, channels-last or not."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < elements
    example = at // (CHANNELS * HEIGHT * WIDTH)
    if LAST:
        channel = at % CHANNELS
        pixel = at // CHANNELS % (HEIGHT * WIDTH)
    else:
        channel = at // (HEIGHT * WIDTH) % CHANNELS
        pixel = at % (HEIGHT * WIDTH)
    row, column = pixel // WIDTH, pixel % WIDTH
    own = drawn + 3 * example
    row += tl.load(own + 1, mask=there, other=0) - PADDING
    start = tl.load(own + 2, mask=there, other=0)
    mirrored = start > 2 * PADDING
    column = tl.where(mirrored, WIDTH - 1 - column, column)
    column += tl.where(mirrored, start - (2 * PADDING + 1), start) - PADDING
    image = tl.load(own, mask=there, other=0) if CHOSEN else example
    inside = there & (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
    place = ((image.to(tl.int64) * CHANNELS + channel) * HEIGHT + row) * WIDTH + column
    value = tl.load(images + place, mask=inside, other=0).to(tl.float32)
    value = value * tl.load(scale + channel) + tl.load(shift + channel)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=there)


def crop(
    images: torch.Tensor,
    drawn: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    padding: int,
    out: torch.Tensor,
    *,
    chosen: bool,
    channels_last: bool,
) -> None:
    """Of every example (which image, first row, first column) in `drawn`, the crop, normalized.

    A first column behind the last says that the crop is mirrored. Unless `chosen`, the images are
    those of the examples already.
    """
    _, channels, height, width = images.shape
    with torch.cuda.device_of(out):
        _crop_kernel[(triton.cdiv(out.numel(), BLOCK),)](
            images, drawn, scale, shift, out, out.numel(),
            CHANNELS=channels, HEIGHT=height, WIDTH=width, PADDING=padding,
            CHOSEN=chosen, LAST=channels_last, BLOCK=BLOCK,
        )  # fmt: skip
