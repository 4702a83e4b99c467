"""Operations that refuse operands of two types, which PyTorch's shape functions let pass.

Without this a 16-bit plan could be chosen that fails in its first step: the loss may hold a network
in FP32 and give it what the 16-bit model returns.
"""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten
_SAME: dict[Any, tuple[int, ...]] = {
    _aten.mm.default: (0, 1),
    _aten.addmm.default: (0, 1, 2),
    _aten.mv.default: (0, 1),
    _aten.addmv.default: (0, 1, 2),
    _aten.bmm.default: (0, 1),
    _aten.baddbmm.default: (0, 1, 2),
    _aten.convolution.default: (0, 1, 2),
    _aten.index_add.default: (0, 3),
    _aten.index_add_.default: (0, 3),
    _aten.index_put.default: (0, 2),
    _aten.index_put_.default: (0, 2),
    _aten.binary_cross_entropy.default: (0, 1),
    _aten.nll_loss_forward.default: (0, 2),
    _aten.grid_sampler_2d.default: (0, 1),
    _aten.grid_sampler_3d.default: (0, 1),
}
"""Positions of the arguments that must be of one type."""


def check_types(func: Any, args: tuple[Any, ...]) -> None:
    """Raise what the real operation would."""
    positions = _SAME.get(func)
    if positions is None:
        return
    given = [args[p] for p in positions if p < len(args) and isinstance(args[p], torch.Tensor)]
    kinds = {tensor.dtype for tensor in given if tensor.is_floating_point()}
    if len(kinds) > 1:
        names = " and ".join(sorted(map(str, kinds)))
        raise RuntimeError(f"{func._opname} expects one dtype, but got {names}")
