"""Functions of PyTorch that ask a tensor what it is, and read none of its numbers."""

from __future__ import annotations

import torch

_T = torch.Tensor

METADATA = {
    *(
        getattr(_T, name).__get__
        for name in "shape dtype device layout ndim requires_grad is_leaf is_cuda is_cpu "
        "is_meta is_sparse is_quantized is_mkldnn is_nested _version".split()
    ),
    _T.size, _T.dim, _T.numel, _T.is_floating_point, _T.is_complex, _T.__len__,
    _T.element_size, _T.nelement, _T.ndimension, _T.get_device, _T.untyped_storage,
    torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip

LAYOUT = {_T.stride, _T.is_contiguous, _T.storage_offset}
"""Those that ask how it lies in memory."""
