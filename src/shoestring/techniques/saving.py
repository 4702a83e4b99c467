"""How hooks on saved tensors cooperate.

Hooks do not chain: those inside give what they keep to those that were in force outside (`Saved`).
They are told of a tensor, not for whom it is kept: what recomputes says so (`keeps_inputs`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_depth = _blocks = 0


def without_node(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, apart from the graph; autograd remembers by itself where it belongs.

    A node that saves its own output would hold a tensor that holds the node. Only a backward pass
    takes that apart: of a step that fails, all activations would be left for ever.
    """
    return tensor if tensor.grad_fn is None else tensor.detach()


@contextmanager
def keeps_inputs(*, of_block: bool = False) -> Iterator[None]:
    """Within: what goes to the hooks outside is kept to recompute something from it.

    `of_block` where that is a whole block, not a function of it.
    """
    global _depth, _blocks
    _depth, _blocks = _depth + 1, _blocks + of_block
    try:
        yield
    finally:
        _depth, _blocks = _depth - 1, _blocks - of_block


def inputs_are_kept() -> bool:
    """Whether this runs within `keeps_inputs`."""
    return _depth > 0


def block_inputs_are_kept() -> bool:
    """Whether it does so for a block."""
    return _blocks > 0


class Saved:
    """A tensor as the hooks outside keep it; as it is where there are none."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, tensor: torch.Tensor, outer: Any) -> None:
        self._packed = without_node(tensor) if outer is None else outer[0](tensor)
        self._unpack = None if outer is None else outer[1]

    def value(self) -> torch.Tensor:
        """The tensor again."""
        return self._packed if self._unpack is None else self._unpack(self._packed)


def storage_key(tensor: torch.Tensor) -> int:
    """Of its storage, as long as that lives."""
    return tensor.untyped_storage()._cdata
