"""State that a forward pass changes beside gradients: restored while a region is recomputed.

    self.mean = 0.9 * self.mean + 0.1 * x.mean(0)     a buffer or parameter by assignment
    self.codes.mul_(0.9), self.codes.data = …         a buffer, parameter or other tensor in place
    self.calls += 1; self.seen.append(x.shape)        attributes and lists
    torch.rand(x.shape, generator=self.generator)     generators of the user's own
    random.random(), numpy.random.rand()              the streams of the process

A recomputed block must find its modules as they were before its first pass, and leave them as they
are now. References to what was assigned over are kept; only what is written in place is copied,
just before (`Writes`). Buffers that kernels write unseen are known after a pass by their versions:
the first pass copies all of them. Running statistics of normalizations are handled elsewhere
(`regions`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import InputError
from ...torch_private.autograd import preserved_version
from ...torch_private.dispatch import OperationMode
from ...torch_private.trees import tensor_leaves
from ...trace.attributes import CONTAINERS, Held, differ, held_by, put_back
from ...trace.untouched import data_is_set
from ..function_writes import written
from ..saving import storage_key

_STATISTICS = nn.modules.batchnorm._NormBase


class ModuleState:
    """Watches the modules of one region; knows which of their buffers are written in place."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self.blocks = list(blocks)
        found = {id(m): m for block in self.blocks for m in block.modules()}
        self._modules = [m for m in found.values() if not isinstance(m, _STATISTICS)]
        self._written: set[tuple[int, str]] | None = None
        """Module and name of buffers that a pass wrote in place; None before the first."""

    def watch(self, given: Iterable[torch.Tensor] = ()) -> FirstPass:
        """Call it before a first pass, with the tensors that the region is given."""
        return FirstPass(self, given)

    def _buffers(self) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
        for number, module in enumerate(self._modules):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield (number, name), buffer

    def _parameters(self) -> dict[tuple[int, str], nn.Parameter]:
        """Those that are tensors of their own: what a sharded one becomes is not a state."""
        return {
            (number, name): parameter
            for number, module in enumerate(self._modules)
            for name, parameter in module._parameters.items()
            if type(parameter) is nn.Parameter
        }

    def _assigned(self) -> list[Held]:
        return [held_by(module) for module in self._modules]


class FirstPass:
    """The modules before one first pass, for its recomputations."""

    def __init__(self, state: ModuleState, given: Iterable[torch.Tensor]) -> None:
        self._state, self._given = state, tuple(given)
        wanted = state._written
        buffers = dict(state._buffers())
        self._values = {
            key: (buffer, buffer.detach().clone())
            for key, buffer in buffers.items()
            if wanted is None or key in wanted
        }
        self._versions = {key: (buffer, buffer._version) for key, buffer in buffers.items()}
        self._parameters = state._parameters()
        self._moved = {key: p._version for key, p in self._parameters.items()}
        self._before: list[Held] | None = state._assigned()
        self._storages: dict[int, list[torch.Tensor]] | None = None
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors that were about to be written in place, and their values then."""
        self._noted: set[int] = set()
        self._generators: dict[torch.Generator, torch.Tensor] = {}
        """Those that the pass drew from, where they were."""
        self._streams = _streams()
        self._data: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors whose `data` was set, and what it was."""
        self._replaced: dict[tuple[int, str], nn.Parameter] = {}
        self._left: list[tuple[tuple[int, str], torch.Tensor, int]] = []
        """Tensors that the pass only read, with their versions then."""
        self.running: tuple[Any, ...] | None = None
        """The function that runs, and what it was given, where passes are compared."""
        self.rounded = False
        """Values that were compared so far differed by rounding."""

    def wrote(self, storage: int | None) -> bool:
        """Whether the pass wrote, in a storage that outlives it, what backward may have read."""
        written = [t for pair in (*self._data, *self._copies, *self._values.values()) for t in pair]
        return any(storage_key(tensor) == storage for tensor in written)

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy what a function that runs next will write, if it is there between passes."""
        for tensor in written(func, args, kwargs):
            if tensor.grad_fn is None:
                self._copy(tensor)
        if data_is_set(func):
            self._data.append((args[0], args[0].data))

    def note_draw(self, generator: torch.Generator) -> None:
        """Take down where a generator is that a function draws from next."""
        if generator not in self._generators:
            self._generators[generator] = generator.get_state()

    def _copy(self, tensor: torch.Tensor) -> None:
        if self._storages is None:
            self._storages = {}
            for held in self._lasting():
                self._storages.setdefault(held.untyped_storage()._cdata, []).append(held)
        for held in self._storages.pop(tensor.untyped_storage()._cdata, ()):
            self._noted.add(id(held))
            self._copies.append((held.detach(), held.detach().clone()))

    def _lasting(self) -> Iterator[torch.Tensor]:
        """Tensors that the modules hold, or that the region was given."""
        yield from self._parameters.values()
        yield from self._given
        for held in self._before or ():
            for value, content in held.values():
                values = content.values() if isinstance(content, dict) else content or ()
                for one in (value, *values) if isinstance(value, CONTAINERS) else (value,):
                    if isinstance(one, torch.Tensor) and one.layout is torch.strided:
                        yield one

    def done(self) -> None:
        """Call it after the first pass: only what the pass changed is held on to."""
        assert self._before is not None
        state, now = self._state, self._state._parameters()
        changed = {
            k for k, (buffer, version) in self._versions.items() if buffer._version != version
        }
        state._written = (state._written or set()) | changed
        self._values = {key: held for key, held in self._values.items() if key in changed}
        self._refuse_unseen(changed)
        self._replaced = {
            key: parameter
            for key, parameter in self._parameters.items()
            if key in now and now[key] is not parameter
        }
        there = {**self._parameters, **{k: buffer for k, (buffer, _) in self._versions.items()}}
        self._left = [
            (key, tensor, tensor._version)
            for key, tensor in there.items()
            if id(tensor) not in self._noted and key not in self._values
        ]
        self._versions, self._parameters, self._moved, self._given = {}, {}, {}, ()
        self._storages = None
        if _same(self._streams, _streams()):
            self._streams = None
        if not any(map(differ, self._before, state._assigned())):
            self._before = None

    def _refuse_unseen(self, changed: set[tuple[int, str]]) -> None:
        """A kernel wrote what nobody knows the value of: recomputing from it would be wrong."""
        moved: dict[tuple[int, str], torch.Tensor] = {
            k: p for k, p in self._parameters.items() if p._version != self._moved[k]
        }
        moved |= {k: self._versions[k][0] for k in changed if k not in self._values}
        lost = [key for key, tensor in moved.items() if id(tensor) not in self._noted]
        if lost:
            raise InputError(
                f"{self._name(lost[0])} was written in place by a kernel in a forward pass that is "
                "to be recomputed",
                hint="recompute other blocks, or write it by a method of the tensor",
            )

    def unread(self) -> AbstractContextManager[Any]:
        """For a recomputation: InputError if it reads what was changed since the pass.

        Modules of the region that the pass did not call may have been: a block shares them with
        a later one, whose gradients came first.
        """
        modules = self._state._modules
        changed = [
            (key, tensor) for key, tensor, version in self._left if tensor._version != version
        ]
        if not changed:
            return nullcontext()
        return _Unread([(modules[key[0]], tensor, self._name(key)) for key, tensor in changed])

    def _name(self, key: tuple[int, str]) -> str:
        return f"{type(self._state._modules[key[0]]).__name__}.{key[1]}"

    def rewind(self) -> Callable[[], None]:
        """Put the modules back to before the pass; returns what undoes that."""
        modules = self._state._modules
        now = None if self._before is None else self._state._assigned()
        data = [(tensor, tensor.data) for tensor, _ in self._data]
        held = [*self._values.values(), *self._copies]
        replaced = {key: modules[key[0]]._parameters[key[1]] for key in self._replaced}
        _set_parameters(modules, self._replaced)
        if self._before is not None:
            for module, before in zip(modules, self._before, strict=True):
                put_back(module, before)
        for tensor, value in reversed(self._data):
            tensor.data = value
        latest = [(tensor, tensor.detach().clone()) for tensor, _ in held]
        # In the end each holds what it held: for autograd and recipes nothing was written.
        unseen = ExitStack()
        unseen.enter_context(preserved_version(tuple(tensor for tensor, _ in held)))
        _write(held)
        drawn = {generator: generator.get_state() for generator in self._generators}
        for generator, state in self._generators.items():
            generator.set_state(state)
        streams = None if self._streams is None else _streams()
        _set_streams(self._streams)

        def undo() -> None:
            _set_streams(streams)
            for generator, state in drawn.items():
                generator.set_state(state)
            _write(latest)
            unseen.close()
            for tensor, value in data:
                tensor.data = value
            if now is not None:
                for module, after in zip(modules, now, strict=True):
                    put_back(module, after)
            _set_parameters(modules, replaced)

        return undo


class _Unread(OperationMode):
    """Within: a module that holds one of these tensors does not run, and no operation reads one."""

    def __init__(self, changed: Iterable[tuple[nn.Module, torch.Tensor, str]]) -> None:
        super().__init__()
        self._changed = list(changed)
        self._names = {storage_key(tensor): name for _, tensor, name in self._changed}

    def __enter__(self) -> _Unread:
        self._handles = [
            module.register_forward_pre_hook(lambda *_, name=name: _refuse(name))
            for module, _, name in self._changed
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for leaf in tensor_leaves((args, kwargs or {})):
            if leaf.layout is torch.strided and storage_key(leaf) in self._names:
                _refuse(self._names[storage_key(leaf)])
        return func(*args, **(kwargs or {}))


def _refuse(name: str) -> None:
    raise InputError(
        f"{name} was changed in place after a forward pass read it that is to be recomputed",
        hint="recompute other blocks, or change it after the step",
    )


def _streams() -> Any:
    """Of Python and NumPy; PyTorch's own are put back by its checkpoints."""
    return random.getstate(), np.random.get_state()


def _same(one: Any, other: Any) -> bool:
    keys, others = one[1], other[1]
    same = one[0] == other[0] and keys[2:] == others[2:]
    return bool(same and np.array_equal(keys[1], others[1]))


def _set_streams(streams: Any) -> None:
    if streams is not None:
        random.setstate(streams[0])
        np.random.set_state(streams[1])


def _set_parameters(modules: list[nn.Module], given: dict[tuple[int, str], Any]) -> None:
    for (number, name), parameter in given.items():
        modules[number]._parameters[name] = parameter


def _write(values: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, value in values:
            tensor.copy_(value)
