"""The tensors that exist between two steps, by address."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...trace.batches import tensors_of
from ...trace.blocks import is_normalization

Names = dict[int, tuple[str, str]]
"""Address → (category, name)."""


def address(tensor: torch.Tensor) -> int:
    """Of the memory behind a tensor."""
    return tensor.untyped_storage().data_ptr()


def resident_names(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None) -> Names:
    """Names of tensors that exist between two steps; an unnamed one shows its type and shape."""
    names: Names = {}
    for held in gc.get_objects():
        if type(held) in (torch.Tensor, nn.Parameter) and held.is_cuda:
            names[address(held)] = ("resident, without a name", _form(held))
    for category, name, tensor in _named(model, batch, optimizer):
        names[address(tensor)] = (category, name)
    return names


def _named(
    model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, str, torch.Tensor]]:
    for tensor in tensors_of(batch):
        yield "minibatch", _form(tensor), tensor
    for path, module in model.named_modules():
        normalizes = is_normalization(module)
        for name, parameter in module.named_parameters(path, recurse=False):
            yield "normalization parameters" if normalizes else "weights", name, parameter
        for name, buffer in module.named_buffers(path, recurse=False):
            index = name.endswith("_index")
            yield "sparse index" if index else "buffers", name, buffer
    if optimizer is not None:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield "optimizer state", key, value


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}"
