"""Whether there are kernels of our own: Triton comes with PyTorch for CUDA, and not with others."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from .trace.cuda import on_cuda


@cache
def has_triton() -> bool:
    """Whether it is installed; modules of kernels are imported where it is, and used."""
    return importlib.util.find_spec("triton") is not None


def in_prediction(fake: torch.Tensor) -> bool:
    """Whether what a fake tensor stands for has them: on CUDA, unless the GPU here has none."""
    return on_cuda(fake) and expected()


def expected() -> bool:
    """Whether a step on CUDA has them: here, or wherever it will run."""
    return has_triton() or not torch.cuda.is_available()
