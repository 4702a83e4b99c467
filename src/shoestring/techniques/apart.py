"""Updates of some parameters at a time, by the optimizer that holds all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

Chunk = tuple[dict[str, Any], list[torch.Tensor]]
"""A parameter group, and some of its parameters."""


def run_alone(optimizer: Optimizer, chunk: Chunk, update: Callable[[], None]) -> None:
    """The update, as if the optimizer held these parameters only."""
    groups, (group, parameters) = optimizer.param_groups, chunk
    optimizer.param_groups = [{**group, "params": parameters}]
    try:
        update()
    finally:
        optimizer.param_groups = groups


@contextmanager
def hooks_once(optimizer: Optimizer) -> Iterator[None]:
    """Hooks of the optimizer's step see all parameters, once, around the chunks."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    before, after = (getattr(optimizer, name) for name in names)
    for hook in list(before.values()):
        hook(optimizer, (), {})
    for name in names:
        setattr(optimizer, name, type(before)())
    try:
        yield
    finally:
        for name, hooks in zip(names, (before, after), strict=True):
            setattr(optimizer, name, hooks)
    for hook in list(after.values()):
        hook(optimizer, (), {})


def with_gradient(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Each parameter that has a gradient now, with its group."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter
