"""What a forward pass changes in its modules beside gradients: put back while a region recomputes.

    self.mean = 0.9 * self.mean + 0.1 * x.mean(0)     a buffer by assignment
    self.codes.mul_(0.9)                              a buffer in place
    self.calls += 1; self.seen.append(x.shape)        attributes and lists

A recomputed block must find its modules as they were before its first pass, and leave them as they
are now. References to what was assigned over are kept; only buffers that are written in place are
copied. Running statistics of normalizations are handled elsewhere (`regions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from ...torch_private.autograd import preserved_version
from ...trace.attributes import Held, differ, held_by, put_back

_STATISTICS = nn.modules.batchnorm._NormBase


class ModuleState:
    """Watches the modules of one region; knows which of their buffers are written in place."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        found = {id(m): m for block in blocks for m in block.modules()}
        self._modules = [m for m in found.values() if not isinstance(m, _STATISTICS)]
        self._written: set[tuple[int, str]] | None = None
        """Module and name of buffers that a pass wrote in place; None before the first."""

    def watch(self) -> FirstPass:
        """Call it before a first pass."""
        return FirstPass(self)

    def _buffers(self) -> Iterable[tuple[tuple[int, str], torch.Tensor]]:
        for number, module in enumerate(self._modules):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield (number, name), buffer

    def _assigned(self) -> list[Held]:
        return [held_by(module) for module in self._modules]


class FirstPass:
    """The modules before one first pass, for its recomputations."""

    def __init__(self, state: ModuleState) -> None:
        self._state = state
        wanted = state._written
        buffers = dict(state._buffers())
        self._values = {
            key: (buffer, buffer.detach().clone())
            for key, buffer in buffers.items()
            if wanted is None or key in wanted
        }
        self._versions = {key: (buffer, buffer._version) for key, buffer in buffers.items()}
        self._before: list[Held] | None = state._assigned()

    def done(self) -> None:
        """Call it after the first pass: only what the pass changed is held on to."""
        assert self._before is not None
        state = self._state
        written = {
            k for k, (buffer, version) in self._versions.items() if buffer._version != version
        }
        state._written = (state._written or set()) | written
        self._values = {key: held for key, held in self._values.items() if key in written}
        self._versions = {}
        if not any(map(differ, self._before, state._assigned())):
            self._before = None

    def rewind(self) -> Callable[[], None]:
        """Put the modules back to before the pass; returns what undoes that."""
        modules = self._state._modules
        now = None if self._before is None else self._state._assigned()
        latest = [(buffer, buffer.detach().clone()) for buffer, _ in self._values.values()]
        if self._before is not None:
            for module, held in zip(modules, self._before, strict=True):
                put_back(module, held)
        _write(self._values.values())

        def undo() -> None:
            if now is not None:
                for module, held in zip(modules, now, strict=True):
                    put_back(module, held)
            _write(latest)

        return undo


def _write(values: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Into the buffers, unseen by autograd: what backward saved of them is what it will find."""
    for buffer, value in values:
        with torch.no_grad(), preserved_version(buffer):
            buffer.copy_(value)
