"""Functions that code compiles while a step is traced: they run as they are written.

`torch.compile` does not run on fake tensors. An optimizer that compiles its update (torchao's)
fuses it, so what the function holds for a moment while it runs eagerly would not be there: in the
update it runs unrecorded, and only what it leaves behind counts.

Triton kernels (Liger's, say) are not launched on fake tensors: they write into memory that their
caller has made, so nothing is missing but their operations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from ..torch_private.fake_tensors import FakeTensor
from .graph import Phase
from .recorder import Recorder
from .values import forget_written


def compiled_path(model: torch.nn.Module) -> str | None:
    """Where a module is compiled: its path, or "the model"; None if none is."""
    for path, module in model.named_modules():
        inside = getattr(module, "_compiled_call_impl", None) is not None
        if inside or hasattr(module, "_orig_mod"):
            return path or "the model"
    return None


@contextmanager
def uncompiled(recorder: Recorder) -> Iterator[None]:
    """Within: `torch.compile` gives back functions that run eagerly; Triton launches nothing."""
    plain = torch.compile

    def compile(model: Any = None, **settings: Any) -> Any:
        if model is None:
            return lambda function: compile(function, **settings)
        if isinstance(model, torch.nn.Module):
            return model
        return _in_one(model, recorder)

    torch.compile = compile
    try:
        with _unlaunched():
            yield
    finally:
        torch.compile = plain


def _in_one(function: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = recorder.recording
        recorder.recording = before and recorder.phase is not Phase.OPTIMIZER
        try:
            return function(*args, **kwargs)
        finally:
            recorder.recording = before

    return run


@contextmanager
def _unlaunched() -> Iterator[None]:
    """Within: a Triton kernel with a fake tensor among its arguments returns at once."""
    if sys.modules.get("triton.runtime.jit") is None:  # no kernel of it was made
        yield
        return
    from triton.runtime.jit import KernelInterface

    plain = KernelInterface.__getitem__

    def at(kernel: Any, grid: Any) -> Callable[..., Any]:
        launch = plain(kernel, grid)

        def run(*args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            if any(isinstance(value, FakeTensor) for value in values):
                forget_written(values)
                return None
            return launch(*args, **kwargs)

        return run

    KernelInterface.__getitem__ = at
    try:
        yield
    finally:
        KernelInterface.__getitem__ = plain
