"""Tensors of a batch that hold positions of its own rows: pairs, edges, permutations.

Cut with the batch they would point at rows of another part, or past its end. How a tensor is used
shows what it is: the trace says which of them index the first dimension of something that has as
many rows as the batch. Labels and tokens never do.
"""

from __future__ import annotations

import torch

from .graph import Op, Role, Trace

_FIRST = frozenset(
    "index_select index_add index_copy index_fill gather scatter scatter_add scatter_reduce".split()
)
"""With a `dim`, and the positions in `index`."""
_LISTS = frozenset("index index_put _index_put_impl _unsafe_index".split())
"""With a tensor of positions for each dimension in `indices`."""

_PLACES = {
    **dict.fromkeys("argsort argmax argmin nonzero searchsorted bucketize".split(), 0),
    **dict.fromkeys("sort topk max min kthvalue median mode".split(), 1),
    "_pack_padded_sequence": 0,
}
"""Operations that find positions in what they are given, and so in a part: which output is the
first that holds them."""


def index_like(trace: Trace, examples: int) -> list[int]:
    """Numbers of the batch's tensors that index rows of the batch."""
    source = {value: {number} for number, value in enumerate(trace.inputs)}
    found: set[int] = set()
    for op in trace.forward_ops:
        reads = [number for _, spec in op.inputs for number in source.get(spec.value, ())]
        if not reads:
            continue
        for name, spec in op.inputs:
            mask = spec.dtype in (torch.bool, torch.uint8)  # it is cut with what it masks
            if spec.value in source and not mask and _indexes_rows(trace, op, name, examples):
                found |= source[spec.value]
        made = _PLACES.get(op.name.partition(".")[2])
        for number, spec in enumerate(op.outputs):
            if not spec.dtype.is_floating_point and (made is None or number < made):
                source.setdefault(spec.value, set()).update(reads)
    return sorted(found)


def _indexes_rows(trace: Trace, op: Op, name: str, examples: int) -> bool:
    plain = op.name.partition(".")[2].rstrip("_")
    rows = dict(op.inputs).get("self")
    if rows is None or not rows.shape or rows.shape[0] != examples:
        return False
    if trace.storages[trace.values[rows.value].storage].role is Role.MODEL:
        return False  # a table of parameters that happens to be as long
    if plain in _FIRST and name == "index":
        dim = dict(op.settings).get("dim", 0)
        return dim in (0, -len(rows.shape))
    return plain in _LISTS and name == "indices.0"
