"""Techniques + model + optimizer + loss → step: forward, backward, update, on real tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..techniques import Checkpointing, Microbatching, Precision, Sparsity
from ..techniques.base import Setup, Technique
from ..trace.capture import Loss, check_loss, check_trainable

_ORDER = (Sparsity, Precision, Checkpointing, Microbatching)
"""What a tensor is comes first, then its type, then when it is made again, then how many."""


class Step:
    """One training step under a plan; call it with a minibatch."""

    def __init__(self, setup: Setup, techniques: tuple[Technique, ...]) -> None:
        self._setup = setup
        self.techniques = techniques

    @property
    def model(self) -> nn.Module:
        """The model, transformed."""
        return self._setup.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer, over the transformed parameters."""
        return self._setup.optimizer

    def __call__(self, batch: Any) -> torch.Tensor:
        """Forward, backward, update; returns the loss of the minibatch, detached."""
        setup = self._setup
        total: torch.Tensor | None = None
        for part, weight in setup.split(batch):
            value = setup.run(part)
            check_loss(value)
            if isinstance(weight, torch.Tensor):
                weight = weight.to(value.dtype)
            weighted = value if weight is None else value * weight
            setup.backward(weighted)
            shown = weighted.detach()
            total = shown if total is None else total + shown
            del value, weighted
        setup.update()
        setup.optimizer.zero_grad(set_to_none=True)
        for call in setup.after_update:
            call()
        assert total is not None
        return total

    def state_dict(self) -> dict[str, Any]:
        """Everything that outlives a step."""
        own = {name: item.state_dict() for name, item in self._setup.state.items()}
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "techniques": own,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        for name, item in self._setup.state.items():
            item.load_state_dict(state["techniques"][name])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def apply(
    techniques: Iterable[Technique],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss: Loss,
) -> Step:
    """Transform the model and optimizer in place and return the step that trains them.

    Everything is checked before anything is changed; if a technique still fails, those before it
    are undone and the model and optimizer are as they were.
    """
    check_trainable(model)
    chosen = tuple(sorted(techniques, key=lambda t: _ORDER.index(type(t))))
    setup = Setup(
        model=model,
        optimizer=optimizer,
        run=lambda batch: loss(model, batch),
        split=_whole,
        backward=lambda value: value.backward(),
        update=lambda: optimizer.step() and None,
    )
    for technique in chosen:
        technique.check(setup)
    try:
        for technique in chosen:
            technique.apply(setup)
    except BaseException:
        for undo in reversed(setup.undo):
            undo()
        raise
    setup.undo.clear()  # it holds what the model was, in memory the plan has spent otherwise
    return Step(setup, chosen)


def _whole(batch: Any) -> Iterator[tuple[Any, Any]]:
    yield batch, None
