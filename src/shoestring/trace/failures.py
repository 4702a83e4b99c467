"""Failures of a model that runs, as errors of one line that say where and what to do."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import InputError, ShoestringError, TraceError
from ..torch_private.fake_tensors import (
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from ..torch_private.loggers import FAKE_TENSORS
from .answers import INSIDE, reads_values
from .fakes import needs_closure
from .recorder import Recorder


@contextmanager
def user_code() -> Iterator[None]:
    """Turn what the user's model, loss or optimizer raises into an error of one line."""
    try:
        yield
    except (ShoestringError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, KeyError):  # whose text is the key alone
            first = f"KeyError: {first}"
        if isinstance(error, SystemExit):
            first = f"it called sys.exit({error.code!r})"
        raise InputError(
            f"the model failed on this batch: {first}",
            hint="loss(model, batch) must run as it would in training",
        ) from error


@contextmanager
def closure_named(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Tell of an optimizer that asks for a closure; its own errors pass."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ShoestringError) or "closure" not in str(error).lower():
            raise
        raise needs_closure(type(optimizer).__name__) from error


@contextmanager
def named_failures(recorder: Recorder | None = None) -> Iterator[None]:
    """Tell what fake tensors cannot do from what the user's own code did wrong."""
    try:
        with user_code(), unlogged():
            yield
    except InputError as error:
        cause = error.__cause__
        where = "the model"
        if recorder is not None:
            where = recorder.failed_in or ("the loss" if recorder.failed_in is None else where)
        if cause is not None and reads_values(cause):
            func = getattr(cause, "func", type(cause).__name__)
            raise TraceError(
                f"{where} reads the value of a tensor ({func}{line_of(cause)}), "
                "which does not exist before the step runs",
                hint="give a model with weights: values are then read from a real forward pass; "
                "or verify and measure, which run real steps",
                values=True,
            ) from cause
        if isinstance(cause, (UnsupportedOperatorException, UnsupportedFakeTensorException)):
            raise TraceError(
                f"{where} uses an operation without a shape function{line_of(cause)}: {cause}",
                hint="register one with torch.library.register_fake, or measure a real step",
            ) from cause
        raise


@contextmanager
def unlogged() -> Iterator[None]:
    """PyTorch logs what a shape function raises, with its traceback; here it is an error."""
    logger = logging.getLogger(FAKE_TENSORS)
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def line_of(error: BaseException) -> str:
    """Where in the user's code it happened: ' at model.py:12', or nothing."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(INSIDE):
            return f" at {Path(frame.filename).name}:{frame.lineno}"
    return ""


def check_module(model: nn.Module) -> None:
    """It must be a module, and built."""
    if not isinstance(model, nn.Module):
        given = model.__name__ if isinstance(model, type) else f"a {type(model).__name__}"
        raise InputError(
            f"the model must be a torch.nn.Module, got {given}",
            hint="build it first: model = MyModel(); only the command line takes names",
        )


def check_trainable(model: nn.Module) -> None:
    """It must be a module, and something in it must require a gradient."""
    check_module(model)
    parameters = list(model.parameters())
    if any(is_lazy(t) for t in (*parameters, *model.buffers())):
        raise InputError("a lazy layer has no shape yet", hint="run the model on one batch before")
    if not any(p.requires_grad for p in parameters):
        raise InputError(
            f"nothing to train: none of the model's {len(parameters)} parameters "
            "requires a gradient",
            hint="call model.requires_grad_(True), or unfreeze the part to train",
        )


def check_values(model: nn.Module) -> None:
    """Its weights must have values, to train."""
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise InputError(
            "the model lies on the device 'meta', where weights have no values",
            hint="model.to_empty(device='cpu') and load its weights; profile takes it as it is",
        )


def check_loss(value: Any) -> None:
    """A loss must be one number with a gradient."""
    if not isinstance(value, torch.Tensor):
        raise InputError(
            f"the loss must be a tensor, got {type(value).__name__}",
            hint="loss(model, batch) returns one scalar tensor",
        )
    if value.numel() != 1:
        raise InputError(
            f"the loss must be a scalar, got shape {tuple(value.shape)}",
            hint="reduce it, for example with .mean()",
        )
    if value.is_complex():
        raise InputError(
            f"the loss must be a real number, got {value.dtype}",
            hint="reduce it, for example with .abs()",
        )
    if not value.requires_grad:
        raise InputError(
            "the loss does not depend on any trainable parameter",
            hint="check for torch.no_grad(), detach() or frozen layers",
        )


def other_model(what: str) -> InputError:
    """For a loss that trains a model it refers to, not the one it is given: often a copy."""
    return InputError(
        what,
        hint="loss(model, batch) must call its first argument, and a `forward` that was replaced "
        "on a module must be that module's",
    )
