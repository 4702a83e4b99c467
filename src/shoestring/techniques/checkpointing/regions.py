"""Run parts of a model again in the backward pass, exactly as they ran the first time.

Regions are `torch.utils.checkpoint` without reentry: they nest, and running again stops as soon as
the last tensor that backward reads is there, so an operation whose output nobody reads again does
not run. Added here: BatchNorm's running statistics stay as the first pass left them
(pytorch#96136), several blocks form one region, and normalisations and activation functions are
deferred into the operation that reads them, so their outputs are made again for it and dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

CHEAP: frozenset[Any] = frozenset(
    {
        F.batch_norm, F.layer_norm, F.group_norm, F.instance_norm,
        F.relu, F.relu6, F.leaky_relu, F.gelu, F.silu, F.elu, F.hardtanh, F.hardswish, F.mish,
        F.softplus, F.sigmoid, F.tanh, torch.relu, torch.sigmoid, torch.tanh,
        torch.Tensor.relu, torch.Tensor.sigmoid, torch.Tensor.tanh,
    }
)  # fmt: skip
"""Normalisations and activation functions: what `no-bn` makes again."""


def region(run: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run now, keep only the tensors given, and run again when backward needs the inside."""
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def rebuilt(*tensors: torch.Tensor) -> Any:
        filled = list(rest)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        again_args, again_kwargs = tree_unflatten(filled, spec)
        return run(*again_args, **again_kwargs)

    return checkpoint(
        rebuilt,
        *(leaves[i] for i in places),
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), frozen_statistics(model)),
    )


class frozen_statistics(TorchFunctionMode):  # noqa: N801, used as a context manager
    """BatchNorm runs as in the first pass, on copies of its running statistics."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._counters = {
            id(m.num_batches_tracked)
            for m in model.modules()
            if isinstance(m, nn.modules.batchnorm._BatchNorm)
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.add_ and id(args[0]) in self._counters:
            return args[0]
        if func is F.batch_norm:
            args = tuple(_copied(a) if i in (1, 2) else a for i, a in enumerate(args))
            kwargs = {k: _copied(v) if k in _RUNNING else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


_RUNNING = ("running_mean", "running_var")


def _copied(statistics: Any) -> Any:
    return statistics.clone() if isinstance(statistics, torch.Tensor) else statistics


def _run_steps(value: torch.Tensor, steps: list[Any]) -> torch.Tensor:
    for func, args, kwargs in steps:
        value = func(value, *args, **kwargs)
    return value


class Deferred(torch.Tensor):
    """The output of a normalisation or activation that has not been computed yet."""

    steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]
    source: torch.Tensor
    used: bool

    @staticmethod
    def __new__(cls, source: torch.Tensor, steps: list[Any]) -> Deferred:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            source.shape,
            strides=source.stride(),
            dtype=source.dtype,
            device=source.device,
            requires_grad=source.requires_grad,
        )
        made.source, made.steps, made.used = source, steps, False
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} on a deferred tensor")


_METADATA = {
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,  # type: ignore[attr-defined]
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.stride,
    torch.Tensor.is_floating_point,
}


class DeferCheap(TorchFunctionMode):
    """Defer cheap functions into their reader, and run each reader as a region."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in CHEAP and args and isinstance(args[0], torch.Tensor) and torch.is_grad_enabled():
            first = args[0]
            if isinstance(first, Deferred) and not first.used:
                return Deferred(first.source, [*first.steps, (func, args[1:], kwargs)])
            if not isinstance(first, Deferred) and first.is_floating_point():
                return Deferred(first, [(func, args[1:], kwargs)])
        leaves, spec = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Deferred)]
        if not places:
            return func(*args, **kwargs)
        return self._read(func, leaves, spec, places)

    def _read(self, func: Any, leaves: list[Any], spec: Any, places: list[int]) -> Any:
        deferred = [leaves[i] for i in places]
        steps = [item.steps for item in deferred]  # not the items: they hold their source alive

        def run(*given: Any) -> Any:
            filled = list(given)
            for place, chain in zip(places, steps, strict=True):
                filled[place] = _run_steps(filled[place], chain)
            args, kwargs = tree_unflatten(filled, spec)
            return func(*args, **kwargs)

        plain = [leaf.source if isinstance(leaf, Deferred) else leaf for leaf in leaves]
        again = any(item.used for item in deferred)
        for item in deferred:
            item.used = True
        with frozen_statistics(self._model) if again else nullcontext():
            return region(run, self._model, *plain)
