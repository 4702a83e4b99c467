"""Put regions around the modules of a model, and take them away again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn

from ..base import Run
from .recipes import Recipes
from .regions import region

_CHEAP_MODULES = (
    nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.ReLU, nn.ReLU6, nn.LeakyReLU,
    nn.GELU, nn.SiLU, nn.ELU, nn.Hardtanh, nn.Hardswish, nn.Mish, nn.Softplus, nn.Sigmoid, nn.Tanh,
)  # fmt: skip


def without_cheap_outputs(model: nn.Module, run: Run) -> tuple[Run, bool]:
    """The run with normalisations and activations deferred; whether there is any such module."""

    def deferred(batch: Any) -> torch.Tensor:
        with Recipes(model):
            return run(batch)

    return deferred, any(isinstance(m, _CHEAP_MODULES) for m in model.modules())


def every_node(model: nn.Module, run: Run, size: int) -> Run:
    """The run with the inputs of every `size`-th function kept, the others made again."""

    def in_parts(batch: Any) -> torch.Tensor:
        with Recipes(model, every=size):
            return run(batch)

    return in_parts


class Pending:
    """The output of a block whose group is not complete; it runs when it is, or when read."""

    def __init__(self, model: nn.Module, steps: list[tuple[Any, tuple[Any, ...], Any]]) -> None:
        self._model, self._steps = model, steps
        self._value: Any = None
        self._done = False
        self._followed = False

    def followed_by(self, forward: Any, rest: tuple[Any, ...], kwargs: Any) -> Pending:
        """The same and one block more; a value that is there already is where it starts."""
        self._followed = True
        if self._done:
            return Pending(self._model, [(forward, (self._value, *rest), kwargs)])
        return Pending(self._model, [*self._steps, (forward, rest, kwargs)])

    def value(self) -> Any:
        """Run the blocks as one region, once."""
        if not self._done:
            if self._followed:
                warnings.warn(
                    "a block's output is read by more than the next block of its group, so the "
                    "block runs twice; residual-1 keeps it",
                    RuntimeWarning,
                    stacklevel=3,
                )
            forwards = [step[0] for step in self._steps]

            def run(*arguments: Any) -> Any:
                value: Any = None
                for position, (forward, (args, kwargs)) in enumerate(
                    zip(forwards, arguments, strict=True)
                ):
                    given = args if position == 0 else (value, *args)
                    value = forward(*given, **kwargs)
                return value

            self._value = region(run, self._model, *((a, k) for _, a, k in self._steps))
            self._done = True
        return self._value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value(), name)

    def __getitem__(self, key: Any) -> Any:
        return self.value()[key]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils._pytree import tree_map

        def real(leaf: Any) -> Any:
            return leaf.value() if isinstance(leaf, Pending) else leaf

        args, kwargs = tree_map(real, (args, kwargs or {}))
        return func(*args, **kwargs)


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: Pending, *args: Any) -> Any:
        plain = [a.value() if isinstance(a, Pending) else a for a in args]
        return getattr(self.value(), name)(*plain)

    return method


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv matmul rmatmul pow neg len iter "
    "eq ne lt le gt ge bool float int"
).split():
    setattr(Pending, f"__{_name}__", _delegate(f"__{_name}__"))


def group_blocks(
    model: nn.Module, paths: Sequence[str], size: int, nested: bool
) -> Callable[[], None]:
    """Every `size` blocks form one region; nested: each block is one more inside of it.

    Groups start anew in every stack of blocks. A block that is not the last of its group gives
    back a `Pending` output. The next block takes it as its first argument; anything else that
    reads it runs what is there of the group.
    """
    modules = dict(model.named_modules())
    undone: list[Callable[[], None]] = []
    for group in grouped_blocks(model, paths, size):
        for position, path in enumerate(group):
            first, last = position == 0, position == len(group) - 1
            undone.append(
                _wrap(model, modules[path], first=first, last=last, nested=nested, alone=size == 1)
            )

    def undo() -> None:
        for one in undone:
            one()

    return undo


def grouped_blocks(model: nn.Module, paths: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """The blocks in groups of `size`, which start anew in every stack."""
    modules = dict(model.named_modules())
    groups: list[tuple[str, ...]] = []
    for _, stack in groupby(paths, key=lambda path: _stack(path, modules)):
        held = tuple(stack)
        groups += [held[start : start + size] for start in range(0, len(held), size)]
    return groups


def _stack(path: str, modules: dict[str, nn.Module]) -> str:
    """Blocks of one list run one after the other; so do Sequentials beside each other."""
    above = path.rpartition(".")[0]
    return above.rpartition(".")[0] if isinstance(modules[above], nn.Sequential) else above


def _wrap(
    model: nn.Module, block: nn.Module, *, first: bool, last: bool, nested: bool, alone: bool
) -> Callable[[], None]:
    plain = block.forward

    def inside(*args: Any, **kwargs: Any) -> Any:
        with Recipes(model):
            return plain(*args, **kwargs)

    leaf = inside if nested else plain

    def one(*args: Any, **kwargs: Any) -> Any:
        return (
            region(leaf, model, *args, **kwargs) if nested and not alone else leaf(*args, **kwargs)
        )

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not block.training:
            real = tuple(a.value() if isinstance(a, Pending) else a for a in args)
            return plain(*real, **kwargs)
        if args and isinstance(args[0], Pending) and not first:
            pending = args[0].followed_by(one, args[1:], kwargs)
        else:
            real = tuple(a.value() if isinstance(a, Pending) else a for a in args)
            pending = Pending(model, [(one, real, kwargs)])
        return pending.value() if last else pending

    block.forward = forward

    def undo() -> None:
        del block.forward  # the class's own forward shows again

    return undo
