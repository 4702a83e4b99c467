"""What CUDA runs where the CPU would run something else.

A machine without CUDA cannot run fake CUDA tensors backward, but autograd and the shape functions
of CUDA's own operators are there: each function below is replaced by the operator PyTorch would
choose on the GPU, so a trace made anywhere has the saves and temporaries of a CUDA step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def _dropout(original: Any, input: torch.Tensor, p: float, train: bool) -> Any:
    """One fused kernel with a byte mask, instead of a float mask and a product."""
    if not train or p == 0 or p == 1 or input.numel() == 0:
        return original(input, p, train)
    return torch.native_dropout(input, p, train)[0]


_REPLACED: dict[Any, Callable[..., Any]] = {
    torch.dropout: _dropout,
}


class CudaKernels(TorchFunctionMode):
    """Replace the functions whose CUDA operator differs from the CPU's."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        replacement = _REPLACED.get(func)
        if replacement is not None:
            return replacement(func, *args, **kwargs)
        return func(*args, **kwargs)
