"""Hooks that take a gradient as soon as it is there, and do not keep a model alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..trace.hooked import OURS


def when_accumulated(parameter: torch.Tensor, method: Callable[[torch.Tensor], None]) -> Any:
    """Call a bound method with the parameter when its gradient is final; the handle.

    The method's object is not held. Python's collector does not see what such hooks hold, so one
    that led to the parameter would keep it, the optimizer and its state for ever.
    """
    held = weakref.WeakMethod(method)

    def call(parameter: torch.Tensor) -> None:
        found = held()
        if found is not None:
            found(parameter)

    setattr(call, OURS, True)
    return parameter.register_post_accumulate_grad_hook(call)
