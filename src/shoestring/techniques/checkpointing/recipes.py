"""Keep how a tensor was made instead of the tensor, function by function.

While a `Recipes` context is open, the outputs of chosen functions are noted. Where autograd would
save one of them for backward, it gets a recipe: the function, its arguments, and the tensor (or
recipe) it started from. Backward runs the recipe when it asks for the tensor. The graph autograd
builds is the plain one, so gradients are the plain ones bit for bit, however often the tensor is
read.

Saved-tensor hooks do not chain, so tensors that are kept go through the hooks that were in force
outside, which is how recipes work inside of a region.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from .regions import frozen_statistics

CHEAP: frozenset[Any] = frozenset(
    {
        F.batch_norm, F.layer_norm, F.group_norm, F.instance_norm, F.relu, F.relu6, F.leaky_relu,
        F.gelu, F.silu, F.elu, F.hardtanh, F.hardswish, F.mish, F.softplus, F.sigmoid, F.tanh,
        torch.relu, torch.sigmoid, torch.tanh, torch.Tensor.relu, torch.Tensor.sigmoid,
        torch.Tensor.tanh,
    }
)  # fmt: skip
"""Normalisations and activation functions: what `no-bn` makes again."""

_SAVING: list[Any] = [
    F.relu, F.sigmoid, F.tanh, torch.relu, torch.sigmoid, torch.tanh, torch.Tensor.relu,
    torch.Tensor.sigmoid, torch.Tensor.tanh,
]  # fmt: skip
_SAVES_OUTPUT = frozenset(_SAVING)
"""Those whose own gradient reads the output, so that autograd saves it while they run."""

_MORE: set[Any] = {
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, torch.conv1d,
    torch.conv2d, torch.conv3d, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__,
    torch.bmm,
}  # fmt: skip
_NODES = CHEAP | _MORE
"""What `every-M` counts: functions whose gradient reads their input."""

_JOINTS: frozenset[Any] = frozenset(
    {torch.add, torch.Tensor.add, torch.Tensor.__add__, F.pad, F.avg_pool2d, F.adaptive_avg_pool2d}
)
"""What `every-M` runs again on the way without counting it."""


class _View:
    """A tensor as a window on what a recipe makes."""

    __slots__ = ("offset", "recipe", "size", "stride")

    def __init__(self, recipe: _Recipe, tensor: torch.Tensor) -> None:
        self.recipe = recipe
        self.size, self.stride = tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()

    def of(self, made: torch.Tensor) -> torch.Tensor:
        where = (made.size(), made.stride(), made.storage_offset())
        if where == (self.size, self.stride, self.offset):
            return made
        return torch.as_strided(made, self.size, self.stride, self.offset)


class _Kept:
    """A tensor that is kept, by the hooks that were in force outside."""

    __slots__ = ("_packed", "_unpack", "_value")

    def __init__(self, tensor: torch.Tensor, outer: Any) -> None:
        self._value: torch.Tensor | None = tensor if outer is None else None
        self._packed = None if outer is None else outer[0](tensor)
        self._unpack = None if outer is None else outer[1]

    def value(self) -> torch.Tensor:
        if self._value is None:  # a region's tensor can be asked for only once
            assert self._unpack is not None
            self._value = self._unpack(self._packed).detach()
        return self._value


class _Recipe:
    """How to make one output, and how many saved tensors still wait for it."""

    __slots__ = ("args", "func", "kwargs", "made", "model", "part", "pinned", "readers")

    def __init__(
        self, model: nn.Module, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.model, self.func, self.args, self.kwargs = model, func, args, kwargs
        self.made: torch.Tensor | None = None
        self.readers = 0
        self.part = 0
        self.pinned: _Kept | None = None
        """The output itself, where a later part reads it and it is kept after all."""

    def make(self) -> torch.Tensor:
        """Run it, and what it starts from; held while more readers wait."""
        if self.pinned is not None:
            return self.pinned.value()
        if self.made is not None:
            return self.made
        given = [
            a.value()
            if isinstance(a, _Kept)
            else a.of(a.recipe.make())
            if isinstance(a, _View)
            else a
            for a in self.args
        ]
        with torch.no_grad(), frozen_statistics(self.model):
            made: torch.Tensor = self.func(*given, **self.kwargs)
        if self.readers:
            self.made = made
        return made


class Recipes:
    """A context in which the outputs of chosen functions are saved as recipes."""

    def __init__(self, model: nn.Module, every: int | None = None) -> None:
        self._model = model
        self._every = every
        self._nodes = 0
        self._noted: dict[int, tuple[_Recipe, Any]] = {}
        self._current: tuple[_Recipe, Callable[[torch.Tensor], bool]] | None = None
        self._outer: Any = None

    def __enter__(self) -> None:
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._watch = _Watch(self)
        self._hooks.__enter__()
        self._watch.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch.__exit__(kind, error, trace)
        self._hooks.__exit__(kind, error, trace)
        self._noted.clear()
        # No cycle may hold the region outside: it would keep its tensors until the collector runs.
        del self._watch, self._hooks
        self._outer = None

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function; note its output if it is one to make again."""
        if not self._chosen(func, args) or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        first: torch.Tensor = args[0]
        rest = dict(kwargs)
        in_place = bool(rest.pop("inplace", False))
        if in_place and _key(first) not in self._noted:
            return func(*args, **kwargs)  # what it overwrites could not be made again
        second = getattr(func, "cheap_to_run_again", tuple)(args)
        recipe = _Recipe(self._model, func, tuple(self._argument(a) for a in second), rest)
        recipe.part = self._part
        given = {_key(a) for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)}

        def is_output(tensor: torch.Tensor) -> bool:
            new = _key(tensor) == _key(first) if in_place else _key(tensor) not in given
            return new and tensor.shape == first.shape

        if func in _SAVES_OUTPUT:
            self._current = (recipe, is_output)
        try:
            out = func(*args, **kwargs)
        finally:
            self._current = None
        if isinstance(out, torch.Tensor) and (in_place or _key(out) not in given):
            self._note(out, recipe)
        return out

    def _chosen(self, func: Any, args: tuple[Any, ...]) -> bool:
        if not args or not isinstance(args[0], torch.Tensor):
            return False
        if not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return False
        cheap = func in CHEAP or hasattr(func, "cheap_to_run_again")
        if self._every is None:
            return cheap
        if cheap or func in _NODES:
            self._nodes += 1
        elif func not in _JOINTS:
            return False
        for argument in args:
            if isinstance(argument, torch.Tensor):
                self._keep_from_before(argument)
        return True

    @property
    def _part(self) -> int:
        return 0 if self._every is None else max(self._nodes - 1, 0) // self._every

    def _keep_from_before(self, tensor: torch.Tensor) -> None:
        """What an earlier part made and this one reads is kept."""
        noted = self._noted.get(_key(tensor))
        if noted is not None and noted[0].part < self._part:
            if noted[0].pinned is None:
                noted[0].pinned = _Kept(tensor.detach(), self._outer)
            del self._noted[_key(tensor)]

    def _argument(self, argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor) or argument.is_leaf:
            return argument
        noted = self._noted.get(_key(argument))
        return _Kept(argument, self._outer) if noted is None else _View(noted[0], argument)

    def _note(self, out: torch.Tensor, recipe: _Recipe) -> None:
        key, storage = _key(out), out.untyped_storage()

        def gone(_: Any) -> None:
            self._noted.pop(key, None)

        self._noted[key] = (recipe, weakref.ref(storage, gone))

    def _pack(self, tensor: torch.Tensor) -> Any:
        noted = self._noted.get(_key(tensor))
        recipe = None if noted is None else noted[0]
        if self._current is not None and self._current[1](tensor):
            recipe = self._current[0]
        if recipe is None:
            return _Saved(tensor, self._outer)
        recipe.readers += 1
        return _View(recipe, tensor)


class _Saved:
    """A tensor kept as it is."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, tensor: torch.Tensor, outer: Any) -> None:
        self._packed = tensor if outer is None else outer[0](tensor)
        self._unpack = None if outer is None else outer[1]

    def value(self) -> torch.Tensor:
        return self._packed if self._unpack is None else self._unpack(self._packed)


def _unpack(packed: _Saved | _View) -> torch.Tensor:
    if isinstance(packed, _Saved):
        return packed.value()
    made = packed.of(packed.recipe.make())
    packed.recipe.readers -= 1
    if packed.recipe.readers == 0:
        packed.recipe.made = None
    return made


class _Watch(TorchFunctionMode):
    def __init__(self, recipes: Recipes) -> None:
        super().__init__()
        self._recipes = recipes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._recipes.call(func, args, kwargs or {})


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
