"""Tensors that the CPU's oneDNN kernels keep and PyTorch's shape functions do not know."""

from __future__ import annotations

from typing import Any

import torch

from ..torch_private.fake_tensors import FakeTensor


def with_workspace(args: tuple[Any, ...], out: Any) -> Any:
    """Give a fake oneDNN LSTM layer the workspace a real one keeps for its backward.

    The shape function of PyTorch returns an empty one. Gradients off, the real one is not kept.
    """
    inputs, hidden_weight = args[0], args[2]
    if not isinstance(inputs, FakeTensor) or not torch.is_grad_enabled():
        return out
    length, batch, width = inputs.shape
    nbytes = lstm_workspace_bytes(
        length, batch, width, hidden_weight.shape[1], inputs.element_size()
    )
    return (*out[:3], inputs.new_empty(nbytes, dtype=torch.uint8))


def lstm_workspace_bytes(length: int, batch: int, inputs: int, hidden: int, itemsize: int) -> int:
    """Bytes oneDNN keeps of one direction of one LSTM layer in training.

    Fitted to what oneDNN 3.12 returns in float32 and bfloat16, and tested against it: the gates
    and an extra row of the hidden width, three states of the wider side, two of the hidden width,
    each on pages of its own. States cover both ends of the layer and the step before the first.
    """

    def padded(width: int, size: int) -> int:
        line = 64 // size
        width = -(-width // line) * line
        return size * (width + line if width % 256 == 0 else width)

    cells, states, widest = length * batch, 2 * (length + 1) * batch, max(inputs, hidden)
    areas = (
        cells * padded(4 * hidden, itemsize),
        cells * padded(hidden, itemsize),
        states * padded(widest, itemsize),
        states * padded(widest, 4),
        states * padded(widest, 4),
        states * hidden * itemsize,
        states * hidden * 4,
    )
    page = 4096
    return sum(-(-area // page) * page for area in areas)
