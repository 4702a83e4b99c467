"""Another model to compare with, in place of plain training: it starts from the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..trace.attributes import copied_model
from ..trace.fakes import check_optimizer, make_optimizer
from ..trace.tracing import Loss
from .sides import Optimizer, plain_name

Against = nn.Module | tuple[Any, ...]
"""A model, or (model, optimizer), or (model, optimizer, loss)."""


def carried_over(
    against: Against, model: nn.Module, optimizer: Optimizer, loss: Loss
) -> tuple[nn.Module, Optimizer, Loss]:
    """A copy of the other model with this one's weights, and its optimizer and loss.

    Without an optimizer of its own it gets this one's kind with the settings of the first group.
    """
    given = against if isinstance(against, tuple) else (against,)
    if not 1 <= len(given) <= 3 or not isinstance(given[0], nn.Module):
        raise InputError(
            "against is neither a model nor (model, optimizer[, loss])",
            hint="verify([], model, batches, against=other, …)",
        )
    memo: dict[int, Any] = {}
    other = copied_model(given[0], memo)
    _load(other, model)
    own_loss: Loss = given[2] if len(given) > 2 else loss
    if len(given) > 1 and given[1] is not None:
        check_optimizer(given[1])
        mapping = {id(p): memo[id(p)] for p in given[0].parameters()}
        made = make_optimizer(given[1], other, mapping)
    else:
        made = _alike(optimizer, model, other)
    assert made is not None
    return other, made, own_loss


@torch.no_grad()
def _load(other: nn.Module, model: nn.Module) -> None:
    """By name, without wrappers; what only one of them has stays as it is."""
    held = {plain_name(n): t for n, t in (*model.named_parameters(), *model.named_buffers())}
    for name, tensor in (*other.named_parameters(), *other.named_buffers()):
        source = held.get(plain_name(name))
        if source is None:
            continue
        if source.shape != tensor.shape:
            raise InputError(
                f"{name} has the shape {tuple(tensor.shape)} in one model and "
                f"{tuple(source.shape)} in the other",
                hint="compare two forms of one model",
            )
        tensor.copy_(source)


def _alike(optimizer: Optimizer, model: nn.Module, other: nn.Module) -> Optimizer | None:
    """The same optimizer over the parameters of the same names."""
    names = {id(p): plain_name(n) for n, p in model.named_parameters()}
    held = {plain_name(n): p for n, p in other.named_parameters()}
    mapping: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            matching = held.get(names.get(id(parameter), ""))
            if matching is None:
                raise InputError(
                    f"the other model has no parameter {names.get(id(parameter), '?')!r}, "
                    "which the optimizer trains",
                    hint="give it with its own optimizer: against=(other, optimizer)",
                )
            mapping[id(parameter)] = matching
    return make_optimizer(optimizer, other, mapping)
