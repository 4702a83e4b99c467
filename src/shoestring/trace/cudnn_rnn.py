"""Shapes of cuDNN's fused recurrent layers, which PyTorch knows only on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

MODES = {"relu": 0, "tanh": 1, "lstm": 2, "gru": 3}
_KEPT_PER_ELEMENT = {0: 1, 1: 1, 2: 5, 3: 6}


def reserve_bytes(
    mode: int,
    steps: int,
    batch: int,
    hidden: int,
    layers: int,
    directions: int,
    dropout: float,
    itemsize: int,
) -> int:
    """Bytes the forward pass keeps for the backward one (measured on cuDNN 9.19, exact there).

    The gates of each layer, what each layer hands to the next, and a bit for each dropped element.
    """
    elements = steps * batch * hidden * directions
    kept = (_KEPT_PER_ELEMENT[mode] * layers + layers - 1) * elements * itemsize
    if dropout > 0:
        kept += (layers - 1) * directions * -(-elements // 8)
    return kept + 256


def recurrent_forward(
    input: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_stride0: int,
    weight_buf: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    dropout_state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Output, last states, what is kept for backward, and the weights' buffer."""
    batch, directions = hx.shape[1], 2 if bidirectional else 1
    width = (proj_size or hidden_size) * directions
    if batch_sizes:
        steps = -(-input.shape[0] // batch)  # all sequences as long as the mean
        output = input.new_empty(input.shape[0], width)
    else:
        steps = input.shape[1 if batch_first else 0]
        output = input.new_empty(steps, batch, width)
        if batch_first:
            output = output.transpose(0, 1)
    states = num_layers * directions
    hy = hx.new_empty(states, batch, proj_size or hidden_size)
    cy = input.new_empty(0) if cx is None else cx.new_empty(states, batch, hidden_size)
    kept = 0
    if train:
        kept = reserve_bytes(
            mode,
            steps,
            batch,
            hidden_size,
            num_layers,
            directions,
            dropout,
            input.element_size(),
        )
    reserve = input.new_empty(kept, dtype=torch.uint8)
    return output, hy, cy, reserve, weight_buf


def recurrent_backward(
    input: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_stride0: int,
    weight_buf: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Gradients of input, states and weights; those of the weights are views of one buffer."""
    mask = rest[-1]
    grad_input = torch.empty_like(input, memory_format=torch.contiguous_format)
    if rest[8] and not rest[12]:  # batch_first, and not packed: laid out by time steps
        grad_input = grad_input.new_empty(
            input.shape[1], input.shape[0], *input.shape[2:]
        ).transpose(0, 1)
    grad_hx = hx.new_empty(hx.shape)
    grad_cx = input.new_empty(0) if cx is None else cx.new_empty(cx.shape)
    grads: list[torch.Tensor] = []
    if mask[3]:
        flat = weight[0].new_empty(sum(w.numel() for w in weight))
        start = 0
        for w in weight:
            grads.append(flat[start : start + w.numel()].view(w.shape))
            start += w.numel()
    return grad_input, grad_hx, grad_cx, grads
