"""Gradients added over the ranks one by one, while the backward pass runs.

Collectives must come in one order on all ranks, and gradients may not: a rank that sends no example
to an expert has no gradient of it. So in the first backward pass every rank says which gradient it
has, and what all have said is added; the order in which that happens is the order from then on. A
gradient whose turn has not come waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from ..errors import InputError
from ..techniques.base import total_norm
from .group import communication_device, largest, ranks

_NONE = -1


class InOrder:
    """The gradients of parameters that every rank holds whole."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._index: dict[torch.Tensor, int] = {p: i for i, p in enumerate(self._parameters)}
        self._order: list[int] = []
        self._agreed = False
        self.begin()

    def begin(self) -> None:
        """A backward pass follows that leaves final gradients."""
        self._ready: set[int] = set()
        self._next = 0
        if not self._agreed:
            self._order = []
            self._said: list[set[int]] = [set() for _ in range(ranks())]

    def watched(self, parameter: torch.Tensor) -> torch.Tensor:
        """Itself."""
        return parameter

    def arrived(self, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        """This rank's gradient is final: the parameters whose sums are there now."""
        index = self._index[parameter]
        if not self._agreed:
            yield from self._say(index)
            return
        self._ready.add(index)
        while self._next < len(self._order) and self._order[self._next] in self._ready:
            self._next += 1
            yield self._added(self._order[self._next - 1])

    def rest(self) -> Iterator[torch.Tensor]:
        """After the passes: all that are left, zeros where this rank has none."""
        if not self._agreed:
            own = self._said[dist.get_rank()]
            for index, parameter in enumerate(self._parameters):
                if parameter.grad is not None and index not in own:
                    yield from self._say(index)
            while not self._all_done:
                yield from self._say(_NONE)
            for index in sorted(set().union(*self._said) - set(self._order)):
                self._order.append(index)
                yield self._added(index)
            self._agreed = True
        else:
            for index in self._order[self._next :]:
                yield self._added(index)
        self._next = len(self._order)
        known = set(self._order)
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None and index not in known:
                check_gradient(parameter.grad, used=False)

    def norm(self, norms: Mapping[torch.Tensor, torch.Tensor], kind: float) -> torch.Tensor:
        """Of all gradients, from the norm of each: the same on all ranks."""
        return total_norm([norms[p] for p in self._parameters if p in norms], kind)

    def anywhere(self, here: bool) -> bool:
        """Asks all ranks."""
        return largest(int(here)) > 0

    def _say(self, index: int) -> Iterator[torch.Tensor]:
        """All that the ranks have said by now."""
        own = torch.tensor([index], dtype=torch.int64, device=communication_device())
        every = [torch.empty_like(own) for _ in range(ranks())]
        dist.all_gather(every, own)
        said = [int(one) for one in every]
        self._all_done = all(one == _NONE for one in said)
        for held, one in zip(self._said, said, strict=True):
            held.update({one} - {_NONE})
        for found in sorted(set.intersection(*self._said) - set(self._order)):
            self._order.append(found)
            yield self._added(found)

    _all_done = False

    def _added(self, index: int) -> torch.Tensor:
        parameter = self._parameters[index]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        check_gradient(parameter.grad, used=True)
        if parameter.grad.is_contiguous():
            dist.all_reduce(parameter.grad)
        else:
            sent = parameter.grad.contiguous()
            dist.all_reduce(sent)
            parameter.grad.copy_(sent)
        return parameter


def check_gradient(gradient: torch.Tensor, used: bool) -> None:
    """InputError for one that ranks cannot add."""
    if gradient.layout is not torch.strided:
        raise InputError(
            "an embedding with sparse=True cannot train on several ranks",
            hint="build it with sparse=False",
        )
    if not used:
        raise InputError(
            "a parameter has a gradient that no rank had at the first step",
            hint="every step must use the parameters of the first",
        )
