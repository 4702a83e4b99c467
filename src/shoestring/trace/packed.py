"""Packed sequences on fake tensors: PyTorch's own padding reads and writes memory in C++."""

from __future__ import annotations

from typing import Any

import torch

from ..torch_private.dispatch import without_modes


def is_padding(func: Any) -> bool:
    """Whether it is `pad_packed_sequence`'s own function."""
    return getattr(func, "__name__", "") == "_pad_packed_sequence"


def padded(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences side by side and their lengths: the same copies, run by run of equal sizes."""
    with without_modes():
        sizes: list[int] = [*batch_sizes.tolist(), 0]
    steps, batch = len(sizes) - 1, sizes[0]
    shape = (max(steps, total_length), batch, *data.shape[1:])
    out = data.new_full(shape, padding_value)
    lengths: list[int] = []
    start, begun = 0, 0
    for step, size in enumerate(sizes[1:], start=1):
        before = sizes[step - 1]
        if size != before:
            stop = start + before * (step - begun)
            part = data[start:stop].view(step - begun, before, *data.shape[1:])
            out[begun:step, :before].copy_(part)
            start, begun = stop, step
        lengths += [step] * (before - size)
    with without_modes():
        real = torch.tensor(lengths[::-1])
    return out.transpose(0, 1) if batch_first else out, real
