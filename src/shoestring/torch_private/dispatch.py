"""Modes that see every operation below autograd, the way around them, and tensors of our own."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

make_wrapper_subclass = torch.Tensor._make_wrapper_subclass

__all__ = ["TorchDispatchMode", "make_wrapper_subclass", "without_modes"]
