"""Tensors without memory, and what they raise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.utils
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch._subclasses.fake_tensor import in_kernel_invocation_manager as _in_kernel


def constant_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The known value of a fake tensor: `torch.tensor(1.0)` in a model's code."""
    return getattr(tensor, "constant", None)


def forget_constant(tensor: FakeTensor) -> None:
    """Forget it for this tensor and its views; otherwise code would read the old value."""
    if tensor.constant is not None:
        tensor.fake_mode.fake_tensor_converter.invalidate_constant_aliases(tensor.constant)
        tensor.constant = None


def make_fake(
    mode: FakeTensorMode,
    device: torch.device,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    storage: torch.UntypedStorage | None = None,
    offset: int = 0,
) -> FakeTensor:
    """A fake tensor of this form, in a storage of its own or in one that there is."""
    with _in_kernel(mode):
        empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if storage is not None:
            empty.set_(storage, offset, shape, stride)
    return FakeTensor(mode, empty, device)


def as_parameter(fake: FakeTensor, requires_grad: bool) -> FakeTensor:
    """The same as `nn.Parameter(fake, requires_grad)`, without a second tensor."""
    fake._is_param = True
    fake.requires_grad_(requires_grad)
    return fake


@contextmanager
def converted_in_place() -> Iterator[None]:
    """Have `Module.to`, `.half` and the like convert fake parameters.

    PyTorch swaps them with others, which it refuses where a tensor has weak references; a fake mode
    itself holds some.
    """
    plain = torch.utils.swap_tensors

    def swapped(one: torch.Tensor, other: torch.Tensor) -> None:
        if isinstance(one, FakeTensor):
            one.data = other.data
        else:
            plain(one, other)

    torch.utils.swap_tensors = swapped
    try:
        yield
    finally:
        torch.utils.swap_tensors = plain


__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "as_parameter",
    "constant_of",
    "converted_in_place",
    "forget_constant",
    "make_fake",
]
