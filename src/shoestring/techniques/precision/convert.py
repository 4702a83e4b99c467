"""Give a model's tensors another type, in place, so that optimizers and ties keep their hold."""

from __future__ import annotations

import torch
from torch import nn
from torch.backends import cudnn
from torch.backends.cudnn.rnn import get_cudnn_mode

from ...torch_private.kernels import cudnn_rnn_flatten_weight
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
            weights = [weight for weight in module._flat_weights if weight is not None]
            if weights[0].is_cuda and weights[0].dtype is torch.bfloat16:
                _flatten_bf16(module, weights)


def _flatten_bf16(module: nn.RNNBase, weights: list[torch.Tensor]) -> None:
    """`flatten_parameters` leaves BF16 out, though cuDNN takes it."""
    shared = len({weight.data_ptr() for weight in weights}) < len(weights)
    if shared or not cudnn.is_available():
        return
    with torch.no_grad():
        cudnn_rnn_flatten_weight(
            weights,
            (4 if module.bias else 2) + (1 if module.proj_size else 0),
            module.input_size,
            get_cudnn_mode(module.mode),
            module.hidden_size,
            module.proj_size,
            module.num_layers,
            module.batch_first,
            module.bidirectional,
        )
