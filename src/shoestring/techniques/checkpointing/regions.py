"""Run parts of a model again in the backward pass, exactly as they ran the first time.

Regions are `torch.utils.checkpoint` without reentry: they nest, and running again stops as soon as
the last tensor that backward reads is there, so an operation whose output nobody reads again does
not run. Added here: BatchNorm's running statistics stay as the first pass left them
(pytorch#96136), and a function that is marked `kept_for_second_pass` (statistics: small, and slow
to make) runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from ...torch_private.trees import tree_flatten, tree_unflatten
from ..draws import observer
from .caches import refuse_caches


def region(run: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run now, keep only the tensors given, and run again when backward needs the inside."""
    kept: list[Any] = []
    leaves, spec = tree_flatten((args, kwargs))
    refuse_caches(leaves)
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
        preserve_rng_state=_keeps_state(),
        context_fn=lambda: (_keeping(kept), _again(model, kept)),
    )


def _keeps_state() -> bool:
    """Not in a CUDA graph: it cannot read the state of a generator."""
    known = observer()
    if known is not None:
        return known.keeps_state
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


class _again:
    """The second pass: statistics stay, and who wants to know of it is told."""

    def __init__(self, model: nn.Module, kept: list[Any]) -> None:
        self._model, self._kept = model, kept

    def __enter__(self) -> None:
        known = observer()
        self._contexts = ExitStack()
        self._contexts.enter_context(frozen_statistics(self._model, self._kept))
        if known is not None:
            self._contexts.enter_context(known.again())

    def __exit__(self, *error: Any) -> bool:
        contexts = self._contexts
        del self._contexts
        return bool(contexts.__exit__(*error))


class _keeping(TorchFunctionMode):
    """The first pass: of what marked functions return, the mark says what the second needs."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        mark = getattr(func, "kept_for_second_pass", None)
        if mark is not None:
            self._kept.append(mark(result))
        return result


class frozen_statistics(TorchFunctionMode):
    """Normalisations run as in the first pass and write their running statistics to nowhere.

    In training they are written, not read, so a tensor of their shape stands in for them. Marked
    functions return what they returned in the first pass.
    """

    def __init__(self, model: nn.Module, kept: Iterable[Any] = ()) -> None:
        super().__init__()
        self._kept = iter(kept)
        self._model = model

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if hasattr(func, "kept_for_second_pass"):
            return next(self._kept)
        if func is torch.Tensor.add_ and _is_counter(args[0], self._model):
            return args[0]
        args, kwargs = without_statistics(func, args, kwargs)
        return func(*args, **kwargs)


_COUNTERS = WeakTensorKeyDictionary()
"""Of batches, in normalisations that were asked for; to ask each time takes long."""


def _is_counter(tensor: torch.Tensor, model: nn.Module) -> bool:
    if tensor.dim():
        return False
    if tensor not in _COUNTERS:
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                counter = module.num_batches_tracked
                if counter is not None:
                    _COUNTERS[counter] = True
    return tensor in _COUNTERS


def without_statistics(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with which a normalisation leaves its running statistics alone."""
    name, default = _FROM_THE_BATCH.get(func, ("", False))
    if not kwargs.get(name, args[5] if name and len(args) > 5 else default):
        return tuple(args), kwargs
    return (
        tuple(_stand_in(a) if i in (1, 2) else a for i, a in enumerate(args)),
        {k: _stand_in(v) if k in _RUNNING else v for k, v in kwargs.items()},
    )


_FROM_THE_BATCH = {F.batch_norm: ("training", False), F.instance_norm: ("use_input_stats", True)}
"""The sixth argument says that the batch's own statistics are taken, and the running ones moved."""
_RUNNING = ("running_mean", "running_var")


def _stand_in(statistics: Any) -> Any:
    return torch.empty_like(statistics) if isinstance(statistics, torch.Tensor) else statistics
