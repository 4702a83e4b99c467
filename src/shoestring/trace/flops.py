"""Floating-point operations of one dispatched operation.

Matrix products and convolutions by `torch.utils.flop_counter`; what neither it nor a rule here
knows is elementwise or a reduction, and counted by its elements, so that recomputing a
normalization is cheap but not free (the report: under 1% of the total, Section 3.4).
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ..torch_private.trees import tensor_leaves

_COPIES = frozenset(
    "clone copy_ _to_copy empty empty_like empty_strided new_empty new_empty_strided zeros "
    "zeros_like new_zeros ones ones_like full full_like fill_ zero_ arange detach cat stack "
    "constant_pad_nd index_select embedding gather native_dropout bernoulli_ repeat slice_backward "
    "select_backward embedding_dense_backward sparse_scatter sparse_gather".split()
)

# Operations per element of the largest tensor, counted from the formula of each.
_PER_ELEMENT = {
    "native_batch_norm": 7,
    "_native_batch_norm_legit": 7,
    "cudnn_batch_norm": 7,
    "native_layer_norm": 7,
    "native_group_norm": 7,
    "native_batch_norm_backward": 9,
    "cudnn_batch_norm_backward": 9,
    "bn_statistics": 3,
    "bn_normalize": 4,
    "bn_sums": 4,
    "bn_gradient": 5,
    "native_layer_norm_backward": 11,
    "native_group_norm_backward": 11,
    "_softmax": 4,
    "_log_softmax": 4,
    "_softmax_backward_data": 4,
    "_log_softmax_backward_data": 4,
    "gelu": 8,
    "gelu_backward": 12,
}


def _recurrent(opname: str, args: tuple[Any, ...]) -> int | None:
    """Gate products of a fused recurrent layer: 2·(input+hidden)·gates·hidden a time step."""
    if opname not in ("mkldnn_rnn_layer", "_cudnn_rnn"):
        return None
    inputs = args[0]
    weights = args[1:3] if opname == "mkldnn_rnn_layer" else args[1]
    steps = inputs.shape[0] * inputs.shape[1]
    matrices = [w for w in weights if isinstance(w, torch.Tensor) and w.dim() > 1]
    return 2 * steps * sum(w.numel() for w in matrices)


def _attention(opname: str, args: tuple[Any, ...]) -> int | None:
    """Two products of a fused attention, five of its gradient; torch 2.11 counts equal heads only.

    Keys and values of fewer heads than the queries are read once for each of these.
    """
    if not opname.startswith("_scaled_dot_product_"):  # nearly always
        return None
    if not re.fullmatch(r"_scaled_dot_product_\w+_attention(_for_cpu)?(_backward)?", opname):
        return None
    backward = opname.endswith("_backward")
    query, key, value = args[1:4] if backward else args[:3]
    batch, heads, queries, width = query.shape
    pairs = int(batch * heads * queries * key.shape[2])
    by_keys, by_values = (3, 2) if backward else (1, 1)
    return 2 * pairs * (by_keys * int(width) + by_values * int(value.shape[3]))


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Floating-point operations of this call."""
    if (attention := _attention(func._opname, args)) is not None:
        return attention
    if func._opname == "_grouped_mm":  # every row, or column, is in one group
        left, right = args[:2]
        rows = left[0] if (left.dim(), right.dim()) == (3, 2) else left
        return 2 * int(rows.numel()) * int(right.shape[-1])
    counter = flop_registry.get(func._overloadpacket)
    if counter is not None:
        return int(counter(*args, **kwargs, out_val=out))
    opname = func._opname
    if opname in _COPIES:
        return 0
    recurrent = _recurrent(opname, args)
    if recurrent is not None:
        return recurrent
    if opname == "mkldnn_rnn_layer_backward":
        steps = args[0].shape[0] * args[0].shape[1]
        return 4 * steps * sum(w.numel() for w in args[1:3])
    largest = max((t.numel() for t in tensor_leaves((args, out))), default=0)
    return int(largest) * _PER_ELEMENT.get(opname, 1)
