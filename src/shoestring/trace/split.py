"""Cut a batch along the first dimension of its tensors."""

from __future__ import annotations

from typing import Any

from ..errors import InputError
from .batches import check_layouts, map_tensors, tensors_of


def examples_of(batch: Any) -> int | None:
    """The number of examples: the first dimension of every tensor; None where there is none."""
    tensors = tensors_of(batch)
    check_layouts(tensors)
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim() > 0}
    if not sizes:
        return None
    if len(sizes) > 1:
        raise InputError(
            f"the batch's tensors differ in their first dimension: {sorted(sizes)}",
            hint="microbatches are cut along the first dimension of every tensor",
        )
    return sizes.pop()


def cut(batch: Any, start: int, stop: int) -> Any:
    """Examples `start` to `stop` as views; scalars and what is not a tensor are passed along."""
    return map_tensors(lambda t: t[start:stop] if t.dim() > 0 else t, batch)
