"""Give a model's tensors another type, in place, so that optimizers and ties keep their hold."""

from __future__ import annotations

import torch
from torch import nn

from ...trace.blocks import is_normalization
from ..base import Setup


def lower_model(setup: Setup, dtype: torch.dtype) -> int:
    """Parameters and buffers to `dtype`, those of BatchNorm to FP32; how many parameters changed.

    The originals live until `setup.undo` is dropped.
    """
    model = setup.model
    kept = {
        id(tensor)
        for module in model.modules()
        if is_normalization(module)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }
    originals: list[tuple[torch.Tensor, torch.Tensor]] = []

    def undo() -> None:
        for tensor, data in originals:
            tensor.data = data
        _flatten(model)

    setup.undo.append(undo)
    lowered = 0
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_floating_point():
            continue
        target = torch.float32 if id(tensor) in kept else dtype
        if tensor.dtype != target:
            originals.append((tensor, tensor.data))
            tensor.data = cast(tensor.data, target)
        lowered += target is dtype and isinstance(tensor, nn.Parameter)
    _flatten(model)
    return lowered


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast; a finite number too large (a mask of -1e9) becomes the largest there is, not inf."""
    top = torch.finfo(dtype).max
    if torch.finfo(tensor.dtype).max > top:
        tensor = torch.where(tensor.isinf(), tensor, tensor.clamp(-top, top))
    return tensor.to(dtype)


def _flatten(model: nn.Module) -> None:
    """cuDNN wants the weights of a recurrent layer in one piece of memory, and now they moved."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
