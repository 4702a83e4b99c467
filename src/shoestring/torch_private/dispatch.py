"""Modes that see every operation below autograd, the way around modes, and tensors of our own."""

import torch
from torch.overrides import _len_torch_function_stack as function_modes
from torch.overrides import _pop_mode_temporarily as without_innermost_function_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

make_wrapper_subclass = torch.Tensor._make_wrapper_subclass

__all__ = [
    "TorchDispatchMode",
    "function_modes",
    "make_wrapper_subclass",
    "without_innermost_function_mode",
    "without_modes",
]
