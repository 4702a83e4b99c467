"""Small things the tests of low precision share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoestring.step.apply import apply
from shoestring.step.step import Step

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4),
    "sgd-plain": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd-damped": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=5e-3, betas=(0.9, 0.98), weight_decay=1e-4),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=5e-3, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=5e-3),
}
OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=5e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


class NoSync(TorchDispatchMode):
    """Fails where a tensor's value is read on the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read"
        return func(*args, **(kwargs or {}))


def make_step(model: nn.Module, optimizer: Any, loss: Any, *techniques: Any) -> Step:
    return apply(techniques, model, optimizer, loss=loss)


def own_state(step: Step) -> dict[str, Any]:
    return step.state_dict()["techniques"]["precision"]


def everything(step: Step) -> dict[str, torch.Tensor]:
    """Copies of all tensors that a skipped step must not touch."""
    found = {f"model.{k}": v.clone() for k, v in step.model.state_dict().items()}
    for index, state in step.optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"state.{index}.{key}"] = value.clone()
    return found


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name
