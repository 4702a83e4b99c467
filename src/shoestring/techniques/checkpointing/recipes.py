"""Keep how a tensor was made instead of the tensor, function by function.

While a `Recipes` context is open, the outputs of chosen functions are noted. Where autograd would
save one of them for backward, it gets a recipe: the function, its arguments, and the tensor (or
recipe) it started from. Backward runs the recipe when it asks for the tensor. The graph autograd
builds is the plain one, so gradients are the plain ones bit for bit, however often the tensor is
read.

Saved-tensor hooks do not chain, so tensors that are kept go through the hooks that were in force
outside, which is how recipes work inside of a region.

Example, `y = conv(relu(bn(x)))` where batch_norm and relu are chosen:

    forward                   noted                         autograd saves          kept in memory
    a = batch_norm(x, …)      a: batch_norm of x            x                       x
    b = relu(a)               b: relu of (a: …)             b → recipe of b         -
    y = conv(b, w)            -                             b → recipe of b, w      w
    backward
    conv asks for b           runs batch_norm(x), relu: b is there again, one reader is left
    relu asks for b           the same b; no reader is left, so it goes

Words, in `recipe.py`: a `Recipe` makes one output; a `View` reads it as a saved tensor has it
(shape, strides); a `Kept` is a tensor that recipes start from (x); a `Saved` one that autograd
keeps as it is (w). A tensor changed in place after it was noted is no longer what its recipe
makes, and is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...memory.nodes import WIDE
from ...torch_private.autograd import DisableTorchFunction, active_saved_tensors_hooks
from ...torch_private.trees import tree_leaves
from ..function_writes import hidden_writes, may_write
from ..saving import Saved, storage_key
from .functions import CHEAP, ELEMENTWISE, JOINTS, NODES, PRODUCTS, SAVES_OUTPUT, WIDENING
from .recipe import Kept, Recipe, View, Writes

_unseen = DisableTorchFunction
"""Around questions about tensors: regions outside would look at each of them."""


class Recipes:
    """A context in which the outputs of chosen functions are saved as recipes.

    These are normalizations, activations and what they are written with; `wide` adds products much
    larger than what they read. With `every` they are all functions, in parts of so many, and what
    passes from one part to the next is kept.
    """

    def __init__(self, *, wide: bool = False, every: int | None = None) -> None:
        self._wide, self._every = wide, every
        self._nodes = 0
        self._noted: dict[int, tuple[Recipe, Any, Any]] = {}
        """Storage → the recipe of what lies in it, of which version and kind, and when it goes."""
        self._current: tuple[Recipe, Callable[[torch.Tensor], bool]] | None = None
        self._outer: Any = None
        self._writes = Writes()
        self.saved = 0
        """Tensors that were saved as recipes."""

    def __enter__(self) -> Recipes:
        self._outer = active_saved_tensors_hooks()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._watch = _CallWatch(self)
        self._hooks.__enter__()
        self._watch.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch.__exit__(kind, error, trace)
        self._hooks.__exit__(kind, error, trace)
        self._noted.clear()
        self._writes.forget_storages()
        # No cycle may hold the region outside: it would keep its tensors until the collector runs.
        del self._watch, self._hooks
        self._outer = None

    def hand_over(self, outputs: Any) -> None:
        """A tensor that leaves the context is kept by its reader, so it need not be recomputed."""
        for tensor in tree_leaves(outputs):
            recipe = self._recipe(tensor) if isinstance(tensor, torch.Tensor) else None
            if recipe is not None:
                recipe.pin(tensor, self._outer, self._writes)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function; note its output if it is one to recompute."""
        with _unseen():
            begun = self._begun(func, args, kwargs)
            if may_write(func) or "out" in kwargs:
                self._writes.note(hidden_writes(func, args, kwargs))
        if begun is None:
            return func(*args, **kwargs)
        recipe, in_place, given = begun
        first: torch.Tensor = args[0]

        def is_output(tensor: torch.Tensor) -> bool:
            new = (
                storage_key(tensor) == storage_key(first)
                if in_place
                else storage_key(tensor) not in given
            )
            return new and tensor.shape == first.shape

        if func in SAVES_OUTPUT:
            self._current = (recipe, is_output)
        try:
            out = func(*args, **kwargs)
        finally:
            self._current = None
        with _unseen():
            if isinstance(out, torch.Tensor) and (in_place or storage_key(out) not in given):
                read = args[1] if func is torch.addmm else first
                wide = func not in WIDENING or out.numel() >= WIDE * read.numel()
                if wide or self._every is not None:
                    self._note(out, recipe)
        return out

    def _begun(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Recipe, bool, set[int]] | None:
        """The recipe of an output to be, whether it overwrites, and the storages it reads."""
        if not self._chosen(func, args) or not torch.is_grad_enabled():
            return None
        first: torch.Tensor = args[0]
        rest = dict(kwargs)
        in_place = bool(rest.pop("inplace", False))
        if in_place and (self._recipe(first) is None or not _is_whole(first)):
            return None  # what it overwrites could not be recomputed
        second = getattr(func, "cheap_to_recompute", tuple)(args)
        recipe = Recipe(func, tuple(self._argument(a) for a in second), rest)
        device = first.device.type
        if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
            kind = torch.get_autocast_dtype(device)
            recipe.cast = torch.autocast(device, kind, cache_enabled=False)
        recipe.part = self._part
        recipe.roots = self._roots(args)
        given = {storage_key(a) for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)}
        return recipe, in_place, given

    def _chosen(self, func: Any, args: tuple[Any, ...]) -> bool:
        if not args or not isinstance(args[0], torch.Tensor):
            return False
        if not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return False
        cheap = func in CHEAP or hasattr(func, "cheap_to_recompute")
        if self._every is None:
            widens = self._wide and func in WIDENING
            return cheap or widens or (func in ELEMENTWISE and self._costs_nothing(func, args))
        if cheap or func in NODES:
            self._nodes += 1
        elif func not in JOINTS:
            return False
        for argument in args:
            if isinstance(argument, torch.Tensor):
                self._keep_from_before(argument)
        return True

    def _costs_nothing(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether what the output is made of is kept anyway, or what one argument is made of."""
        read = [a for a in args if isinstance(a, torch.Tensor)]
        if func in PRODUCTS and all(a.requires_grad for a in read):
            return True
        roots = self._roots(args)
        return any(self._roots((a,)) == roots for a in read)

    def _roots(self, args: tuple[Any, ...]) -> frozenset[int]:
        """Numbers of what is to be kept for an output."""
        roots: set[int] = set()
        for argument in args:
            if isinstance(argument, torch.Tensor) and not argument.is_leaf:
                recipe = self._recipe(argument)
                roots |= {self._writes.number(argument)} if recipe is None else recipe.roots
        return frozenset(roots)

    @property
    def _part(self) -> int:
        return 0 if self._every is None else max(self._nodes - 1, 0) // self._every

    def _keep_from_before(self, tensor: torch.Tensor) -> None:
        """Keep what an earlier part made and this one reads."""
        recipe = self._recipe(tensor)
        if recipe is not None and recipe.part < self._part:
            recipe.pin(tensor, self._outer, self._writes)
            del self._noted[storage_key(tensor)]

    def _argument(self, argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor):
            return argument
        if argument.is_leaf and argument.requires_grad and type(argument) is not nn.Parameter:
            return argument
        if argument.is_leaf:  # a buffer or parameter: the block may write it in place
            return Kept(argument, None, self._writes)
        recipe = self._recipe(argument)
        if recipe is not None:
            return View(recipe, argument)
        return Kept(argument, self._outer, self._writes)

    def _recipe(self, tensor: torch.Tensor) -> Recipe | None:
        """How the tensor was made, unless it was changed since, or is read as something else."""
        noted = self._noted.get(storage_key(tensor))
        if noted is None:  # nothing is asked of it: a sparse weight would become dense to answer
            return None
        read = self._writes.of(tensor), *_reading(tensor)
        return noted[0] if noted[1] == read else None

    def _note(self, out: torch.Tensor, recipe: Recipe) -> None:
        key, storage = storage_key(out), out.untyped_storage()

        def gone(_: Any) -> None:
            self._noted.pop(key, None)

        read = self._writes.of(out), *_reading(out)
        self._noted[key] = (recipe, read, weakref.ref(storage, gone))

    def _pack(self, tensor: torch.Tensor) -> Any:
        with _unseen():
            return self._packed(tensor)

    def _packed(self, tensor: torch.Tensor) -> Any:
        recipe = self._recipe(tensor)
        if self._current is not None and self._current[1](tensor):
            recipe = self._current[0]
        if recipe is None:
            return Saved(tensor, self._outer)
        recipe.readers += 1
        self.saved += 1
        return View(recipe, tensor)


def _unpack(packed: Saved | View) -> torch.Tensor:
    if isinstance(packed, Saved):
        return packed.value()
    made = packed.of(packed.recipe.make())
    packed.recipe.readers -= 1
    if packed.recipe.readers == 0:
        packed.recipe.made = None
    return made


class _CallWatch(TorchFunctionMode):
    sees_functions = True

    def __init__(self, recipes: Recipes) -> None:
        super().__init__()
        self._recipes = recipes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._recipes.call(func, args, kwargs or {})


def _reading(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Views of the same bytes must share this: the version counter, and the type."""
    return tensor._version, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
