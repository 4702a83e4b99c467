"""Modes that see every operation below autograd, the way around modes, and tensors of our own."""

import sys
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import _len_torch_function_stack as function_modes
from torch.overrides import _pop_mode_temporarily as without_innermost_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as without_modes

make_wrapper_subclass = torch.Tensor._make_wrapper_subclass


class OperationMode(TorchDispatchMode):
    """A mode that sees every operation, and is called without a detour.

    PyTorch wraps modes so that they are never compiled, and passes through the wrapper with every
    operation. Without it, a mode that a compiled model calls would be compiled with each of its
    operations, which takes minutes. So within a mode nothing is: compiled functions run as they are
    written. Where `_should_skip_dynamo` is gone, modes are slower and no different.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Self:
        # Without the compiler's module nothing was compiled, and its import takes a second.
        loaded = "torch._dynamo" in sys.modules
        stance = torch.compiler.set_stance("force_eager") if loaded else nullcontext()
        stance.__enter__()
        self.__dict__.setdefault("_stances", []).append(stance)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.__dict__["_stances"].pop().__exit__(*error)


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors inside a wrapper subclass; the tensor itself if it is an ordinary one."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [inner for name in names for inner in inner_tensors(getattr(tensor, name))]


__all__ = [
    "OpOverload",
    "OpOverloadPacket",
    "OperationMode",
    "TorchDispatchMode",
    "function_modes",
    "inner_tensors",
    "make_wrapper_subclass",
    "without_innermost_function_mode",
    "without_modes",
]
