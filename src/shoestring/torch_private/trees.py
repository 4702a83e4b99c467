"""Nested lists, tuples, dicts and registered classes as flat lists."""

from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten


def tensor_leaves(given: Any) -> list[torch.Tensor]:
    """All tensors; the short way for those of an operation's arguments or results."""
    if isinstance(given, torch.Tensor):
        return [given]
    if type(given) is dict:
        given = tuple(given.values())
    if type(given) not in (list, tuple):
        return [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    found: list[torch.Tensor] = []
    for each in given:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple, dict)):
            found += tensor_leaves(each)
    return found


__all__ = [
    "TreeSpec",
    "tensor_leaves",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]
