"""Optimizers that users run from hooks of their parameters, seen by a trace.

    optimizers = {p: torch.optim.Adam([p]) for p in model.parameters()}

    def update(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)

A trace runs a copy of the model, which has no such hooks. So the optimizers that a hook refers to
are copied, too, and the copy of each parameter is updated when its gradient is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .fakes import copied_optimizer

_DEEPEST = 3

Hook = Callable[..., Any]


def optimizers_in_hooks(model: nn.Module) -> dict[torch.Tensor, list[torch.optim.Optimizer]]:
    """Of each parameter, the optimizers that hold it and that a hook of it refers to."""
    found: dict[torch.Tensor, list[torch.optim.Optimizer]] = {}
    for parameter in model.parameters():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        seen = {id(o): o for hook in hooks.values() for o in _optimizers(hook, _DEEPEST)}
        mine = [o for o in seen.values() if _holds(o, parameter)]
        if mine:
            found[parameter] = mine
    return found


OURS = "of_the_step"
"""An attribute of hooks that a step puts on parameters; a copy of the model has its own."""


def gradient_hooks(parameter: torch.Tensor) -> tuple[list[Hook], list[Hook]]:
    """The user's: on the gradient as it is made, and when it has been added up."""
    made = getattr(parameter, "_backward_hooks", None) or {}
    added = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return list(made.values()), [h for h in added.values() if not hasattr(h, OURS)]


def copy_gradient_hooks(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Put those of parameters on their copies, but for hooks that run optimizers of their own."""
    for parameter, copied in pairs:
        if copied is parameter or not copied.requires_grad:
            continue
        made, added = gradient_hooks(parameter)
        for hook in made:
            copied.register_hook(hook)
        for hook in added:
            if next(_optimizers(hook, _DEEPEST), None) is None:
                copied.register_post_accumulate_grad_hook(hook)


def update_in_backward(
    model: nn.Module, mapping: Mapping[int, torch.Tensor]
) -> list[torch.optim.Optimizer]:
    """Do the same with a copy of the model; the copies of the optimizers."""
    memo: dict[int, Any] = {}
    made: dict[int, torch.optim.Optimizer] = {}
    for parameter, optimizers in optimizers_in_hooks(model).items():
        copies = []
        for optimizer in optimizers:
            made[id(optimizer)] = copied_optimizer(optimizer, dict(mapping), memo)
            copies.append(made[id(optimizer)])

        def update(fake: torch.Tensor, copies: list[torch.optim.Optimizer] = copies) -> None:
            for copy in copies:
                copy.step()
            fake.grad = None

        mapping[id(parameter)].register_post_accumulate_grad_hook(update)
    return list(made.values())


def _holds(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    return any(p is parameter for group in optimizer.param_groups for p in group["params"])


def _optimizers(held: Any, depth: int) -> Iterator[torch.optim.Optimizer]:
    """In what a function refers to: its closure, globals it names, its object, its arguments."""
    if isinstance(held, torch.optim.Optimizer):
        yield held
        return
    if depth == 0 or isinstance(held, (torch.Tensor, nn.Module, str, bytes)):
        return
    inside: Iterable[Any] = ()
    if isinstance(held, Mapping):
        inside = held.values()
    elif isinstance(held, (list, tuple, set)):
        inside = held
    else:
        inside = _referred(held)
    for item in inside:
        yield from _optimizers(item, depth - 1)


def _referred(function: Any) -> list[Any]:
    code, found = getattr(function, "__code__", None), []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    if code is not None:
        known = getattr(function, "__globals__", {})
        found += [known[name] for name in code.co_names if name in known]
        found += list(getattr(function, "__defaults__", None) or ())
    for name in ("__self__", "__func__", "func", "args", "keywords"):  # methods, partial functions
        if hasattr(function, name):
            found.append(getattr(function, name))
    own = getattr(function, "__dict__", None)
    return found + list(own.values()) if own and code is None else found
