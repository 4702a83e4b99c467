"""Results that `functools.lru_cache` keeps of a step on fake tensors, which no real step must get.

@lru_cache
def causal(length): return torch.ones(length, length).tril()     made once, for all models
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..torch_private.fake_tensors import FakeTensor

_DEEP = 6
"""Containers within containers that are searched for a fake tensor."""
_known: list[weakref.ref[Any]] = []
_modules_then = 0


@contextmanager
def forgets_fakes(model: nn.Module, loss: Callable[..., Any]) -> Iterator[None]:
    """Caches that got a fake tensor inside are emptied: what they held is worked out again."""
    cached_functions = {id(f): f for f in (*_cached_functions(), *_beside(model, loss))}
    before = [(cached, cached.cache_info().misses) for cached in cached_functions.values()]
    try:
        yield
    finally:
        for cached, misses in before:
            if cached.cache_info().misses != misses and _holds_fake(cached):
                cached.cache_clear()


def _cached_functions() -> list[Any]:
    """All that there are; looked for again only after something was imported."""
    global _modules_then
    if len(sys.modules) != _modules_then:
        _modules_then = len(sys.modules)
        found = (o for o in gc.get_objects() if type(o) is functools._lru_cache_wrapper)
        _known[:] = [weakref.ref(function) for function in found]
    return [function for held in _known if (function := held()) is not None]


def _beside(model: nn.Module, loss: Callable[..., Any]) -> Iterator[Any]:
    """Where the loss and the model are written: a notebook imports nothing."""
    files = {type(module).__module__ for module in model.modules()}
    written = [vars(sys.modules[name]) for name in files if name in sys.modules]
    for names in [getattr(loss, "__globals__", {}), *written]:
        yield from (o for o in list(names.values()) if type(o) is functools._lru_cache_wrapper)


def _holds_fake(container: Any, depth: int = 0) -> bool:
    for held in gc.get_referents(container):
        if isinstance(held, FakeTensor):
            return True
        nested = isinstance(held, (list, tuple, dict)) or type(held).__name__ == "_lru_list_elem"
        if nested and depth < _DEEP and _holds_fake(held, depth + 1):
            return True
    return False
