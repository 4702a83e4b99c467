"""Which tensors a function of PyTorch writes in place, as Python calls it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from ..torch_private.dispatch import OpOverload, OpOverloadPacket
from ..trace.untouched import data_is_set

_KEPT_VALUES = frozenset({"requires_grad_", "detach_", "retain_grad", "share_memory_", "rename_"})
_READ = frozenset({"__invert__", "__index__", "__int__", "__iter__"})
_STATISTICS = F.batch_norm, F.instance_norm
_OPERATORS = OpOverload, OpOverloadPacket


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Tensors that the call will write."""
    if kwargs.get("out") is not None:
        yield from _tensors(kwargs["out"])
    if isinstance(func, _OPERATORS):
        for position, name in _mutated(func):
            yield from _tensors(args[position] if position < len(args) else kwargs.get(name))
    elif func is F.embedding:
        names = "input", "weight", "padding_idx", "max_norm"
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.get("max_norm") is not None:  # rows that are read are made shorter
            yield from _tensors(given["weight"])
    elif func in _STATISTICS:
        given = dict(zip(("input", "running_mean", "running_var"), args, strict=False)) | kwargs
        yield from _tensors([given.get("running_mean"), given.get("running_var")])
    elif _is_in_place(func):
        yield from _tensors(args[0] if args else next(iter(kwargs.values()), None))


def hidden_writes(func: Any, args: tuple[Any, ...], kwargs: Any) -> Iterator[torch.Tensor]:
    """Those whose versions autograd does not follow: `tensor.data.mul_(2)`, `tensor.data = other`.

    A tensor that is its own, such as a new mask, cannot be told from one; who counts them asks
    only for those it knows.
    """
    if func in _STATISTICS:  # which recomputing leaves alone
        return
    if data_is_set(func):
        yield args[0]
    for tensor in written(func, args, kwargs):
        if tensor.grad_fn is None and not tensor.requires_grad and tensor._base is None:
            yield tensor


@lru_cache(maxsize=4096)
def may_write(func: Any) -> bool:
    """Whether some call of the function writes in place; one with `out` always does."""
    if isinstance(func, _OPERATORS):
        return bool(_mutated(func))
    return _is_in_place(func) or data_is_set(func) or func in (F.embedding, *_STATISTICS)


@lru_cache(maxsize=4096)
def _mutated(operator: Any) -> frozenset[tuple[int, str]]:
    """Positions and names of arguments that an operator of `torch.ops` writes."""
    packet = isinstance(operator, OpOverloadPacket)
    names = operator.overloads() if packet else ()
    return frozenset(
        (position, argument.name)
        for each in ([getattr(operator, name) for name in names] or [operator])
        for position, argument in enumerate(each._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _is_in_place(func: Any) -> bool:
    """By PyTorch's names: `mul_`, `__imul__`, `__setitem__`, `_foreach_mul_`."""
    name = getattr(func, "__name__", "")
    if name in _KEPT_VALUES or name in _READ:
        return False
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name.endswith("__"))
    return name.endswith("_") and not name.endswith("__")


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        yield from (one for one in given if isinstance(one, torch.Tensor))
