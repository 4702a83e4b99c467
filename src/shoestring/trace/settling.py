"""State that the first steps make, and later ones read: queues, averages, caches.

    self.bank.append(h.detach())            a deque of 24 grows for 24 passes
    if self.mean is None: self.mean = …     the first pass takes another way than all others

A trace is of a step like all later ones. So where its passes left more behind than they found, and
one more leaves other things again, the step is traced anew, after as many passes as it takes until
modules keep as much as before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import nn

from .attributes import CONTAINERS, tensors_held, tensors_in
from .graph import Trace, live_bytes
from .untouched import hooks_of

MOST = 32
"""Passes after which a state that still grows is not followed further."""
_HARDLY = 0.001
"""Of a step's peak: results of the step before that take no more are not worth another trace."""

_unsettled: weakref.WeakKeyDictionary[nn.Module, frozenset[str]]
_unsettled = weakref.WeakKeyDictionary()
"""Models whose first steps make state, and `RecordedStep.moved` of such a first step."""
_growing: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Those whose state did not stop to grow."""


class FirstPasses:
    """Of one trace of a model: whether state has to be made first, and was."""

    def __init__(self, model: nn.Module, fake: nn.Module) -> None:
        self._model, self._fake = model, fake
        self.moved: frozenset[str] | None = _unsettled.get(model)
        """None where no state has to be made."""
        self._before = kept_bytes(fake)
        there = kept_tensors(fake).values()
        self._there = [(weakref.ref(t), t.untyped_storage().nbytes()) for t in there]

    @property
    def _replaced_bytes(self) -> int:
        """Of what modules kept before the step, and no longer do."""
        now = {id(tensor) for tensor in kept_tensors(self._fake).values()}
        there = ((held(), nbytes) for held, nbytes in self._there)
        return sum(nbytes for held, nbytes in there if held is None or id(held) not in now)

    def make_state(self, run: Callable[[], Any]) -> None:
        """Run passes until the model keeps as much as before."""
        held = self._before
        gradients = {p: p.grad for p in self._fake.parameters()}
        for _ in range(MOST):
            run()
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            now = kept_bytes(self._fake)
            if now <= held:
                break
            held = now
        else:
            _growing.add(self._model)

    def again(self, run: Callable[[], Any], made: Trace) -> bool:
        """Whether the step has to be traced anew, with state that is made before it."""
        if self.moved is not None:
            return False
        if kept_bytes(self._fake) <= self._before:
            renews = self._replaced_bytes > _HARDLY * live_bytes(made)
            if renews:  # each step's results lie there until the next has others
                _unsettled[self._model] = made.moved
            return renews
        kept = kept_tensors(self._fake)
        try:
            run()
        except Exception:  # of values that only one pass has been given
            return False
        if kept_tensors(self._fake).keys() == kept.keys():
            return False  # filled once, and read from then on
        _unsettled[self._model] = made.moved
        return True


def makes_state(model: nn.Module) -> bool:
    """Whether its first steps were found to make state that later ones read."""
    return model in _unsettled


def growing(model: nn.Module) -> tuple[str, ...]:
    """The note for a model whose state did not stop growing."""
    if model not in _growing:
        return ()
    return (
        f"{type(model).__name__} keeps more with every step, after {MOST} steps still: later steps "
        "take more than predicted. Predict with a model that has trained until that ends",
    )


def kept_tensors(model: nn.Module) -> dict[int, torch.Tensor]:
    """By storage, all that modules hold beside parameters: in buffers, attributes, containers; and
    what their hooks collect."""
    own = {id(p) for p in model.parameters()}
    return {
        tensor.untyped_storage()._cdata: tensor
        for tensor in chain(tensors_held(model), _collected(model))
        if id(tensor) not in own and tensor.layout is torch.strided
    }


def _collected(model: nn.Module) -> Iterator[torch.Tensor]:
    """`lambda module, given, out: features.update(one=out)`: of containers in closures."""
    for hook in hooks_of(model):
        for cell in getattr(hook, "__closure__", None) or ():
            with suppress(ValueError):  # empty
                if isinstance(cell.cell_contents, CONTAINERS):
                    yield from tensors_in(cell.cell_contents)


def kept_bytes(model: nn.Module) -> int:
    """Of the storages of these."""
    return sum(tensor.untyped_storage().nbytes() for tensor in kept_tensors(model).values())
