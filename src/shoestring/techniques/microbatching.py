"""Microbatching: parts of the minibatch one after the other, gradients added (Section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import InputError
from ..trace.graph import Trace


@dataclass(frozen=True)
class Microbatching:
    """Run `size` examples at once; the minibatch must divide into whole microbatches."""

    size: int

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise InputError(
                f"microbatch {self.size!r} is not a whole number from 1",
                hint="10 runs ten examples at once",
            )

    def check(self, batch_size: int) -> None:
        """The minibatch must be a whole number of microbatches."""
        if batch_size % self.size:
            lower = max(d for d in range(1, self.size + 1) if batch_size % d == 0)
            raise InputError(
                f"a batch of {batch_size} does not divide into microbatches of {self.size}",
                hint=f"the next smaller size that does is {lower}",
            )

    def prepare(self, batch: Any) -> Any:
        """The first microbatch: examples along the first dimension of every tensor."""
        sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if _has_examples(leaf)}
        if not sizes:
            return batch
        if len(sizes) > 1:
            raise InputError(
                f"the batch's tensors differ in their first dimension: {sorted(sizes)}",
                hint="microbatches are cut along the first dimension of every tensor",
            )
        self.check(sizes.pop())
        return tree_map(lambda leaf: leaf[: self.size] if _has_examples(leaf) else leaf, batch)

    def predict(self, trace: Trace) -> Trace:
        """The trace is of one microbatch already."""
        return trace


def _has_examples(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0
