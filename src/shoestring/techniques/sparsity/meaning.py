"""How a sparse model compares with the dense one: at its nonzeros."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..base import Meaning
from .modules import sparse_tensors


class AtNonzeros(Meaning):
    """Gradients are those of the dense model that is zero elsewhere."""

    def __init__(self, model: nn.Module) -> None:
        self._sparse = sparse_tensors(model)

    def prepare_plain(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Set to zero what the sparse model does not have."""
        with torch.no_grad():
            for name, tensor in self._sparse.items():
                parameters[name].mul_(tensor.mask().view(tensor.shape))
        return bool(self._sparse)

    def expected(self, name: str, plain: torch.Tensor) -> torch.Tensor:
        """The values at the nonzeros."""
        tensor = self._sparse.get(name)
        fits = tensor is not None and plain.shape == tensor.shape
        return tensor.gather(plain) if tensor is not None and fits else plain
