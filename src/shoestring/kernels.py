"""Whether there are kernels of our own: Triton comes with PyTorch for CUDA, and not with others."""

from __future__ import annotations

import importlib.util
from functools import cache


@cache
def has_triton() -> bool:
    """Whether it is installed; modules of kernels are imported where it is, and used."""
    return importlib.util.find_spec("triton") is not None
