"""Changes a step may make on the host.

A captured step runs on the device alone: a counter kept in Python, or a buffer that is replaced
instead of written, would stand still in it. And a capture that fails must leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..techniques.base import Setup
from .numbers import Place, number_at, numbers_of, put_back


class HostState:
    """Modules' numbers and tensors, gradients, and the optimizer's settings and state, as held."""

    def __init__(
        self, setup: Setup, modules: list[nn.Module], around: Iterable[Place] = ()
    ) -> None:
        """`around`: numbers beside the modules, which the loss reads."""
        self._optimizer = setup.optimizer
        self._around = [(place, place[0].get(place[1]), number_at(place)) for place in around]
        self._modules = [(m, numbers_of(m), dict(m._parameters), dict(m._buffers)) for m in modules]
        self._gradients = [(p, p.grad) for p in setup.model.parameters()]
        self._groups = [dict(group) for group in setup.optimizer.param_groups]
        self._state = {p: dict(state) for p, state in setup.optimizer.state.items()}

    def changed(self) -> str | None:
        """The changes, in words."""
        for module, numbers, parameters, buffers in self._modules:
            for was, now in (
                (numbers, numbers_of(module)),
                (parameters, module._parameters),
                (buffers, module._buffers),
            ):
                if name := _differs(was, now):
                    return f"{type(module).__name__} changes its {name} on the host"
        for place, _, number in self._around:
            if number_at(place) != number:
                return f"the loss, or what it calls, changes its {place[1]} on the host"
        if any(p.grad is not gradient for p, gradient in self._gradients):
            return "gradients outlive it"
        for was, now in zip(self._groups, self._optimizer.param_groups, strict=True):
            if name := _differs(was, now):
                return f"the optimizer changes its {name} on the host"
        for parameter, state in self._optimizer.state.items():
            if name := _differs(self._state.get(parameter, {}), state):
                return f"the optimizer keeps its {name} on the host"
        return None

    def restore(self) -> None:
        """Put everything back."""
        for module, numbers, parameters, buffers in self._modules:
            module.__dict__.update(numbers)
            _refill(module._parameters, parameters)
            _refill(module._buffers, buffers)
        for place, value, _ in self._around:
            put_back(place, value)
        for held, gradient in self._gradients:
            held.grad = gradient
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=True):
            _refill(group, settings)
        for parameter in list(self._optimizer.state):
            if parameter in self._state:
                _refill(self._optimizer.state[parameter], self._state[parameter])
            else:
                del self._optimizer.state[parameter]


def _refill(now: Any, was: Any) -> None:
    now.clear()
    now.update(was)


def _differs(was: Any, now: Any) -> str | None:
    """The name of something that is new, gone, another tensor or another number."""
    for name in {*was, *now}:
        if name not in was or name not in now:
            return str(name)
        one, other = was[name], now[name]
        if one is not other and (isinstance(one, (torch.Tensor, list)) or one != other):
            return str(name)
    return None
