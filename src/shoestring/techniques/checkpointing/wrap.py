"""Put regions around the modules of a model, and take them away again.

A region of several blocks must run as one function, so that only its input is kept, but the model's
own code calls its blocks one by one. So a block that does not end its region does not run yet: it
returns a `Pending` output, which the next block takes over.

Example, blocks 1 to 3 in one region `[keep, cheap, keep]`:

    model's code       what happens                                         kept for backward
    h = block1(x)      Pending: calls [(x)]                                 -
    h = block2(h)      Pending: calls [(x), ()]                             -
    h = block3(h)      ends the region: region(block1, block2, block3)(x)   x
    loss.backward()    region is recomputed, inside its blocks as the items say

Anything else that reads a `Pending` output (`h + x`, `print(h)`) runs what is there of the region.
Without gradients the blocks' own `forward` runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn

from ...errors import NoEffectWarning
from ...memory.items import Item, leaves, part
from ...torch_private.trees import tree_map
from ..base import Run
from .module_state import ModuleState
from .recipes import Recipes
from .regions import Again, region


def without_cheap_outputs(run: Run) -> Run:
    """The run with normalizations and activations deferred; the first warns if it has none."""
    found = False

    def deferred(batch: Any) -> torch.Tensor:
        nonlocal found
        with Recipes() as recipes:
            value = run(batch)
            if not found and not recipes.saved:
                warnings.warn(
                    "no-bn: no normalization or activation saves anything to recompute",
                    NoEffectWarning,
                    stacklevel=2,
                )
            found = True
            return value

    return deferred


def every_node(run: Run, size: int) -> Run:
    """The run with the inputs of every `size`-th function kept, the others recomputed."""

    def in_parts(batch: Any) -> torch.Tensor:
        with Recipes(every=size):
            return run(batch)

    return in_parts


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments a block is called with; but for the first of a region, without its input."""


class _Region:
    """Blocks that are recomputed together, and the schedule they follow when they do."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module], items: tuple[Item, ...]) -> None:
        self.model, self._items, self._blocks = model, items, blocks
        self._forwards = [block.forward for block in blocks]
        self._states: dict[tuple[int, int], ModuleState] = {}

    def ends_at(self, position: int) -> bool:
        """After the last block, and around one with backward hooks: they need real tensors."""
        here = self._blocks[position : position + 2]
        return len(here) == 1 or any(b._backward_hooks or b._backward_pre_hooks for b in here)

    def run(self, start: int, calls: list[Call]) -> Any:
        """The blocks from `start` on, as many as there are calls."""
        items = part(self._items, start, start + len(calls))
        return self._nested(items, start)(*calls)

    def run_first(
        self, start: int, calls: list[Call]
    ) -> tuple[Any, Callable[[], AbstractContextManager[Any]] | None]:
        """The same, and how to run them so again where there are several."""
        if len(calls) == 1:
            return self.run(start, calls), None
        again = Again.from_here(self.model, self._state(start, start + len(calls)))
        with again.first_pass():
            value = self.run(start, calls)
        again.first.done()
        return value, lambda: again

    def _nested(self, items: tuple[Item, ...], start: int) -> Callable[..., Any]:
        def inside(*calls: Call) -> Any:
            value, at = None, 0
            for item in items:
                after = at + leaves(item)
                here = list(calls[at:after])
                if at:
                    here[0] = ((value, *here[0][0]), here[0][1])
                if isinstance(item, str):
                    (args, kwargs), forward = here[0], self._forwards[start + at]
                    value = leaf(forward, item)(*args, **kwargs)
                else:
                    value = self._nested(item, start + at)(*here)
                at = after
            return value

        return lambda *calls: region(
            inside, self.model, *calls, state=self._state(start, start + len(calls))
        )

    def _state(self, start: int, stop: int) -> ModuleState:
        if (start, stop) not in self._states:
            self._states[start, stop] = ModuleState(self._blocks[start:stop])
        return self._states[start, stop]


def leaf(forward: Callable[..., Any], option: str) -> Callable[..., Any]:
    """The forward of a block that keeps what backward reads, or recomputes cheap parts of it."""
    if option == "keep":
        return forward

    return partial(_deferred, forward, option == "lean")


def _deferred(forward: Callable[..., Any], wide: bool, *args: Any, **kwargs: Any) -> Any:
    with Recipes(wide=wide) as recipes:
        out = forward(*args, **kwargs)
        recipes.hand_over(out)
        return out


class Pending:
    """The output of a block whose region is not complete; it runs when it is, or when read.

        a = block0(x)     Pending: start 0, calls [x]
        b = block1(a)     Pending: start 0, calls [x, ()], ends the region: both blocks run
        a.sum()           a is read after all: block0 is recomputed

    Only the block that stands next in the region continues it. The model may call others, or the
    same ones in another order: each then starts a region of its own.
    """

    def __init__(self, region_: _Region, start: int, calls: list[Call]) -> None:
        self._region, self._start, self._calls = region_, start, calls
        self._value: Any = None
        self._done = False
        self._followers: list[Pending] = []
        self._alike: Callable[[], AbstractContextManager[Any]] | None = None
        """Once it ran: the context in which the same blocks run as they did then."""

    def leads_to(self, region_: _Region, position: int) -> bool:
        """Whether this is what the block at a position of a region comes after."""
        return self._region is region_ and self._start + len(self._calls) == position

    def followed_by(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pending:
        """The same and one block more; a value that is there already is where it starts."""
        if self._done:
            after = self._start + len(self._calls)
            return Pending(self._region, after, [((self._value, *args), kwargs)])
        made = Pending(self._region, self._start, [*self._calls, (args, kwargs)])
        self._followers.append(made)
        return made

    def value(self) -> Any:
        """Run the blocks as one region, once."""
        if self._done:
            return self._value
        ran = next((f._ran() for f in self._followers if f._ran() is not None), None)
        if ran is None:
            self._value, self._alike = self._region.run_first(self._start, self._calls)
        else:
            warnings.warn(
                "a block's output is read by more than the next block of its group, so the "
                "block runs twice; a region of its own (residual-1) keeps it",
                RuntimeWarning,
                stacklevel=3,
            )
            with ran():
                self._value = self._region.run(self._start, self._calls)
        self._done = True
        for follower in self._followers:
            follower._start_after(self)
        return self._value

    def _ran(self) -> Callable[[], AbstractContextManager[Any]] | None:
        """If the same calls ran with more behind them: how they can run alike."""
        found = (follower._ran() for follower in self._followers)
        return self._alike or next((alike for alike in found if alike is not None), None)

    def _start_after(self, before: Pending) -> None:
        """Later operations do not recompute the tensors that exist now."""
        if self._done:
            return
        skipped = len(before._calls)
        (args, kwargs), *rest = self._calls[skipped:]
        self._calls = [((before._value, *args), kwargs), *rest]
        self._start += skipped
        for follower in self._followers:
            follower._start_after(before)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value(), name)

    def __getitem__(self, key: Any) -> Any:
        return self.value()[key]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _real((args, kwargs or {}))
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


def wrap_blocks(
    model: nn.Module, paths: Sequence[str], items: Sequence[Item]
) -> Callable[[], None]:
    """Make the blocks run as the items say; returns how to undo it.

    A block that is not the last of its region gives back a `Pending` output. The next block takes
    it as its first argument; anything else that reads it runs what is there of the region.
    """
    modules = dict(model.named_modules())
    own = {module: module.__dict__.get("forward") for module in modules.values()}
    wrapped: list[nn.Module] = []
    at = 0
    for item in items:
        blocks = [modules[path] for path in paths[at : at + leaves(item)]]
        at += len(blocks)
        if isinstance(item, str):
            if item != "keep":
                plain = blocks[0].forward
                _replace(blocks[0], plain, leaf(plain, item))
                wrapped += blocks
            continue
        held = _Region(model, blocks, item)
        for position, block in enumerate(blocks):
            _replace(block, block.forward, partial(_member, held, position))
        wrapped += blocks

    def undo() -> None:
        for block in wrapped:
            del block.forward  # the class's own forward shows again
            if own[block] is not None:
                block.forward = own[block]

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


# Partial functions, not closures: a copy of the model has its own blocks in them.


def _member(held: _Region, position: int, *args: Any, **kwargs: Any) -> Any:
    """The forward of one block of a region."""
    before = args[0] if args else None
    if isinstance(before, Pending) and before.leads_to(held, position):
        pending = before.followed_by(_real(args[1:]), _real(kwargs))
    else:
        pending = Pending(held, position, [(_real(args), _real(kwargs))])
    return pending.value() if held.ends_at(position) else pending


def _replace(block: nn.Module, plain: Callable[..., Any], training: Callable[..., Any]) -> None:
    """Another forward for training; without gradients its own.

    A block in evaluation mode has one too: models are fine-tuned so.
    """
    block.forward = partial(_either, plain, training)


def _either(
    plain: Callable[..., Any], training: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if torch.is_grad_enabled():
        return training(*args, **kwargs)
    return plain(*_real(args), **_real(kwargs))


def _real(given: Any) -> Any:
    """With values in place of pending outputs, however they are nested."""
    return tree_map(lambda leaf: leaf.value() if isinstance(leaf, Pending) else leaf, given)
