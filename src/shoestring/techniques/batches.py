"""Batches of any nesting: tuples, lists, dicts and mappings that wrap one."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """The same batch with `function` of every tensor; anything else is passed along."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if isinstance(leaf, UserDict):  # tokenizers return these, and pytree does not open them
            twin = copy.copy(leaf)
            twin.data = {key: map_tensors(function, value) for key, value in leaf.data.items()}
            return twin
        return leaf

    return tree_map(one, batch)


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Every tensor of the batch."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, batch)
    return found
