"""A recipe: how one output was made, and the tensors it starts from.

    b = relu(batch_norm(x))      Recipe(relu, View of Recipe(batch_norm, Kept x))
    make()                       asks Kept x for its value, runs batch_norm, then relu

`Writes` counts what changes a storage without a trace: if a `Kept` tensor is no longer what the
function read, that is an error, and not a wrong gradient.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..saving import keeps_inputs, storage_key, without_node
from .regions import without_statistics


class View:
    """A tensor as a window on what a recipe makes."""

    __slots__ = ("offset", "recipe", "size", "stride")

    def __init__(self, recipe: Recipe, tensor: torch.Tensor) -> None:
        self.recipe = recipe
        self.size, self.stride = tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()

    def of(self, made: torch.Tensor) -> torch.Tensor:
        where = (made.size(), made.stride(), made.storage_offset())
        if where == (self.size, self.stride, self.offset):
            return made
        return torch.as_strided(made, self.size, self.stride, self.offset)


class Writes:
    """How often storages were written through `.data`, which no version shows.

    Storages have numbers: addresses come again when a storage is gone, and what hangs on them
    would be something else by then.
    """

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._next = itertools.count()

    def number(self, tensor: torch.Tensor) -> int:
        """Of its storage."""
        key = storage_key(tensor)
        if key not in self._numbers:
            numbers = self._numbers

            def gone(_: Any) -> None:
                numbers.pop(key, None)

            numbers[key] = next(self._next), weakref.ref(tensor.untyped_storage(), gone)
        return self._numbers[key][0]

    def of(self, tensor: torch.Tensor) -> int:
        """Times that its storage was written so."""
        return self.counts[self.number(tensor)]

    def note(self, written: Iterable[torch.Tensor]) -> None:
        """Count these."""
        self.counts.update(map(self.number, written))

    def forget_storages(self) -> None:
        """Nothing more will be counted."""
        self._numbers.clear()


class Kept:
    """A tensor that is kept, by the hooks that were in force outside."""

    __slots__ = ("_number", "_packed", "_unpack", "_value", "_version", "_writes", "_written")

    def __init__(self, tensor: torch.Tensor, outer: Any, writes: Writes) -> None:
        self._value: torch.Tensor | None = without_node(tensor) if outer is None else None
        with keeps_inputs():
            self._packed = None if outer is None else outer[0](tensor)
        self._unpack = None if outer is None else outer[1]
        self._version = tensor._version
        # Not by its address: where a region outside keeps it, another may lie there by now.
        self._writes, self._number = writes, writes.number(tensor)
        self._written = writes.counts[self._number]

    def value(self) -> torch.Tensor:
        changed = self._writes.counts[self._number] != self._written
        if self._value is None:  # a region's tensor can be asked for only once
            assert self._unpack is not None
            self._value = self._unpack(self._packed).detach()
        elif self._unpack is None:
            changed |= self._value._version != self._version
        if changed:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._value.shape)} was changed in place after a "
                "function read it whose output is to be recomputed; change a copy, or keep the "
                "block whole (checkpointing 'none', or 'keep' in a schedule)"
            )
        return self._value


class Recipe:
    """How to make one output, and how many saved tensors still wait for it."""

    __slots__ = ("args", "cast", "func", "kwargs", "made", "part", "pinned", "readers", "roots")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.cast: AbstractContextManager[Any] = nullcontext()
        """The autocast state when it ran."""
        self.roots: frozenset[int] = frozenset()
        """Numbers of the tensors that are kept for it."""
        self.made: torch.Tensor | None = None
        self.readers = 0
        self.part = 0
        self.pinned: Kept | None = None
        """The output itself, where something outside keeps it anyway."""

    def pin(self, tensor: torch.Tensor, outer: Any, writes: Writes) -> None:
        """Keep the output after all, and nothing it was made from."""
        if self.pinned is None:
            self.pinned, self.args = Kept(tensor.detach(), outer, writes), ()

    def make(self) -> torch.Tensor:
        """Run it, and what it starts from; held while more readers wait."""
        if self.pinned is not None:
            return self.pinned.value()
        if self.made is not None:
            return self.made
        with torch.no_grad(), self.cast:
            resolved = tuple(map(_resolved, self.args))
            args, kwargs = without_statistics(self.func, resolved, self.kwargs)
            made = self.func(*args, **kwargs)
        assert isinstance(made, torch.Tensor)
        if self.readers:
            self.made = made
        return made


def _resolved(argument: Any) -> Any:
    if isinstance(argument, Kept):
        return argument.value()
    return argument.of(argument.recipe.make()) if isinstance(argument, View) else argument
