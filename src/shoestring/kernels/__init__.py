"""Kernels of our own: whether there are any, and what a prediction has in their place.

Triton comes with PyTorch for CUDA, and not with others.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache

import torch

from ..trace.cuda import CudaKernels
from ..trace.fakes import is_fake

_NAMES = (
    "bn_statistics", "bn_normalize", "bn_running", "bn_sums", "bn_gradient", "sparse_scatter",
    "sparse_gather", "quantized_update", "encode_saved", "decode_saved",
)  # fmt: skip
_library = torch.library.Library("shoestring", "DEF")
for _name in _NAMES:
    _library.define(f"{_name}(Tensor[] read, Tensor(a!)[] written) -> ()")
    torch.library.register_fake(f"shoestring::{_name}", lambda read, written: None, lib=_library)


@cache
def has_triton() -> bool:
    """Whether it is installed; modules of kernels are imported where it is, and used."""
    return importlib.util.find_spec("triton") is not None


def expected() -> bool:
    """Whether a step on CUDA has them: here, or wherever it will run."""
    return has_triton() or not torch.cuda.is_available()


def in_prediction(tensor: torch.Tensor) -> bool:
    """Whether it stands for one that they will read, in a prediction for CUDA."""
    return is_fake(tensor) and CudaKernels.depth > 0 and expected()


def launched(name: str, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
    """In a prediction: an operation of this name in the trace, where the kernel would run."""
    getattr(torch.ops.shoestring, name)(list(read), list(written))
