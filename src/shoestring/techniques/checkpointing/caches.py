"""Blocks that are recomputed must not find the keys and values of their first pass in a cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ..base import Run


def without_caches(model: nn.Module, run: Run) -> Run:
    """The run with Hugging Face's `config.use_cache` off, which only generating text needs.

    A layer would append to the cache in its first pass and again in its second.
    """
    configs = _caching(model)

    def plain(batch: Any) -> torch.Tensor:
        with _switched_off(configs):
            return run(batch)

    return plain if configs else run


def caches_off(model: nn.Module) -> AbstractContextManager[None]:
    """For steps that are compared with such a run: with a cache some add in another order."""
    return _switched_off(_caching(model))


def refuse_caches(leaves: list[Any]) -> None:
    """A cache that reaches a block all the same was asked for."""
    if any(hasattr(leaf, "get_seq_length") and hasattr(leaf, "update") for leaf in leaves):
        raise InputError(
            "a block that is recomputed was given a cache of keys and values",
            hint="train with use_cache=False",
        )


def _caching(model: nn.Module) -> list[Any]:
    configs = [getattr(module, "config", None) for module in model.modules()]
    return list({id(c): c for c in configs if getattr(c, "use_cache", False)}.values())


@contextmanager
def _switched_off(configs: list[Any]) -> Iterator[None]:
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True
