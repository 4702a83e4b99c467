"""The floating types a step computes in, which say how much of a difference is rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..torch_private.dispatch import OperationMode
from ..torch_private.trees import tensor_leaves


def computed_kinds(run: Callable[[], Any]) -> set[torch.dtype]:
    """Types of all that operators make while it runs: autocast's, too, whatever parameters are."""
    seen = _Seen()
    with seen:
        run()
    return seen.kinds


class _Seen(OperationMode):
    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):  # a slice of a batch in 16 bits computes nothing
            self.kinds |= {leaf.dtype for leaf in tensor_leaves(made)}
        return made


@contextmanager
def whole_fp32() -> Iterator[None]:
    """No TF32: its rounding, 1e-3, would hide what is compared, or make it look different."""
    names = [
        *_precision(torch.backends.cudnn, "conv", "rnn"),
        *_precision(torch.backends.cuda.matmul),
    ]
    before = [getattr(place, name) for place, name, _ in names]
    try:
        for place, name, whole in names:
            setattr(place, name, whole)
        yield
    finally:
        for (place, name, _), value in zip(names, before, strict=True):
            setattr(place, name, value)


def _precision(place: Any, *parts: str) -> list[tuple[Any, str, Any]]:
    """Where PyTorch's choice of TF32 stands, and its value for none: two names that do not mix."""
    try:
        _ = place.allow_tf32
    except RuntimeError:  # it was set by the newer name
        parts_of = [getattr(place, part) for part in parts] or [place]
        return [(part, "fp32_precision", "ieee") for part in parts_of]
    return [(place, "allow_tf32", False)]
