"""FP32 statistics that 16-bit normalizations keep; PyTorch's shape functions say 16 bits."""

from __future__ import annotations

from typing import Any

import torch

from ..torch_private.fake_tensors import FakeTensor

_aten = torch.ops.aten
_WEIGHTS = {
    _aten.native_layer_norm.default: 2,
    _aten.native_group_norm.default: 1,
    _aten.native_batch_norm.default: 1,
}
_NARROW = (torch.float16, torch.bfloat16)


def with_wide_statistics(func: Any, args: tuple[Any, ...], out: Any, *, cuda: bool = False) -> Any:
    """Make mean and deviation FP32, as the real ones are beside weights of FP32 (autocast).

    CUDA's are FP32 whatever the weights are, but for those of groups.
    """
    position = _WEIGHTS.get(func)
    if position is None or not isinstance(args[0], FakeTensor) or args[0].dtype not in _NARROW:
        return out
    weight = args[position]
    mixed = weight is not None and weight.dtype is torch.float32
    if not mixed and (not cuda or func is _aten.native_group_norm.default):
        return out
    return (out[0], *(kept.new_empty(kept.shape, dtype=torch.float32) for kept in out[1:]))
