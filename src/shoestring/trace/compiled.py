"""Functions that code compiles while a step is traced: they run as they are written.

`torch.compile` does not run on fake tensors. An optimizer that compiles its update (torchao's)
fuses it, so what the function holds for a moment while it runs eagerly would not be there: in the
update it runs unrecorded, and only what it leaves behind counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from .graph import Phase
from .recorder import Recorder


@contextmanager
def uncompiled(recorder: Recorder) -> Iterator[None]:
    """Within: `torch.compile` gives back functions that run eagerly."""
    plain = torch.compile

    def compile(model: Any = None, **settings: Any) -> Any:
        if model is None:
            return lambda function: compile(function, **settings)
        if isinstance(model, torch.nn.Module):
            return model
        return _in_one(model, recorder)

    torch.compile = compile
    try:
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
