"""The report's simulation: the whole minibatch at once, BatchNorm group by group (Section 3.3).

Every BatchNorm runs its own forward once per group of examples, in order. So its statistics and
their running averages are those of true microbatching by construction, whatever its momentum is.
A forward that can take all groups at once says so by `in_groups`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ...trace.blocks import is_normalization
from ...trace.split import examples_of
from ..base import Setup


class GroupedNormalization:
    """Gives every BatchNorm of a model a forward that sees one group of examples at a time."""

    def __init__(self, setup: Setup, size: int) -> None:
        self._size = size
        self._examples: int | None = None
        """Of the batch that runs; recomputation in the backward pass needs it too."""
        self._run, self._update = setup.run, setup.update
        self.paths = [path for path, m in setup.model.named_modules() if is_normalization(m)]
        modules = dict(setup.model.named_modules())
        for path in self.paths:
            setup.undo.append(self._wrap(path, modules[path]))
        setup.run, setup.update = self.run, self.update

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model, or a pickle, belongs to no step."""
        return {**self.__dict__, "_examples": None, "_run": None, "_update": None}

    def run(self, batch: Any) -> torch.Tensor:
        """The whole batch, with its number of examples known."""
        self._examples = examples_of(batch)
        return self._run(batch)

    def update(self) -> None:
        """Outside of a step a forward pass is an ordinary one."""
        self._examples = None
        self._update()

    def _wrap(self, path: str, module: nn.Module) -> Callable[[], None]:
        own = module.__dict__.get("forward")
        plain: Callable[..., Any] = module.forward
        in_groups = getattr(plain, "in_groups", None)

        # A partial function, not a closure: a copy of the model has its own modules in it.
        module.forward = partial(self._forward, path, module, plain, in_groups)

        def undo() -> None:
            if own is None:
                del module.forward  # the class's own forward shows again
            else:
                module.forward = own

        return undo

    def _forward(
        self,
        path: str,
        module: nn.Module,
        plain: Callable[..., Any],
        in_groups: Callable[..., Any] | None,
        x: torch.Tensor,
    ) -> Any:
        examples = self._examples
        if not module.training or examples is None or examples <= self._size:
            return plain(x)
        if x.shape[0] % examples:
            raise InputError(
                f"{path} sees {x.shape[0]} rows of {examples} examples",
                hint="simulated microbatches need as many rows from every example",
            )
        rows = self._size * (x.shape[0] // examples)
        if in_groups is not None and x.shape[0] % rows == 0:
            made = in_groups(x, x.shape[0] // rows)
            if made is not None:
                return made
        return torch.cat([plain(group) for group in x.split(rows)])
