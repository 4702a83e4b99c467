"""Tensors a module holds beside its parameters: in buffers, attributes, lists and dicts.

Forward passes change some of it, by assignment (`self.mean = …`, `self.calls += 1`) or in place
(`self.seen.append(…)`, a draw from a generator of its own), which no operation on a tensor shows.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

_OWN = frozenset({"_parameters", "_modules", "_buffers", "forward"})
CONTAINERS = (list, dict, set, deque, bytearray)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
CHANGING = (*CONTAINERS, *GENERATORS)
"""Objects that change in place."""
_BUFFER = "_buffers."
Held = dict[str, tuple[Any, Any]]
"""Name → the object, and a copy of it if it is a container; the state of a generator."""


def held_by(module: nn.Module) -> Held:
    """Attributes and buffers by name; nothing is copied but containers, one level deep."""
    found = {name: value for name, value in module.__dict__.items() if name not in _OWN}
    found |= {_BUFFER + name: buffer for name, buffer in module._buffers.items()}
    return {
        name: (value, copied(value) if isinstance(value, CHANGING) else None)
        for name, value in found.items()
    }


def copied(container: Any) -> Any:
    """A copy, one level deep; `copy.copy` takes ten times as long for an OrderedDict."""
    if isinstance(container, GENERATORS):
        return _state(container)
    return container.copy() if type(container) in _PLAINLY else copy.copy(container)


_PLAINLY = frozenset({*CONTAINERS, OrderedDict})


def _state(generator: Any) -> bytes:
    """Where a generator is, to be compared with ==."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state())
    return pickle.dumps(generator.bit_generator.state)


def _set_state(generator: Any, state: bytes) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(pickle.loads(state))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(pickle.loads(state))
    else:
        generator.bit_generator.state = pickle.loads(state)


def differ(before: Held, after: Held) -> bool:
    """Whether anything is another object, or a container holds others."""
    return before.keys() != after.keys() or any(
        value is not after[name][0] or not _alike(content, after[name][1])
        for name, (value, content) in before.items()
    )


def put_back(module: nn.Module, held: Held) -> None:
    """Make the module hold what it did."""
    for name in held_by(module).keys() - held.keys():
        if name.startswith(_BUFFER):
            del module._buffers[name.removeprefix(_BUFFER)]
        else:
            del module.__dict__[name]
    for name, (value, content) in held.items():
        if content is not None:
            refill(value, content)
        if name.startswith(_BUFFER):
            module._buffers[name.removeprefix(_BUFFER)] = value
        else:
            module.__dict__[name] = value


def moved_modules(model: nn.Module, before: Iterable[Held]) -> frozenset[str]:
    """Paths of modules whose buffers were assigned, or whose counters and lists changed.

    A tensor in an attribute that is not a buffer is a result of the pass, not a state.
    """
    pairs = zip(model.named_modules(), before, strict=True)
    return frozenset(path for (path, module), held in pairs if _moved(held, held_by(module)))


def _moved(before: Held, after: Held) -> bool:
    for name in before.keys() | after.keys():
        old, old_content = before.get(name, (None, None))
        new, new_content = after.get(name, (None, None))
        if name.startswith(_BUFFER):
            if old is not new:
                return True
        elif not isinstance(old, torch.Tensor) and not isinstance(new, torch.Tensor):
            plain = isinstance(old, _PLAIN) or isinstance(new, _PLAIN)
            if (plain and old != new) or (old is new and not _alike(old_content, new_content)):
                return True
    return False


def assigned(model: nn.Module, before: Iterable[dict[str, Any]]) -> dict[tuple[str, str], Any]:
    """Objects that a pass assigned to attributes, by path and name; numbers and text left out."""
    return {
        (path, name): value
        for (path, module), held in zip(model.named_modules(), before, strict=True)
        for name, value in vars(module).items()
        if name not in _OWN and value is not held.get(name) and not isinstance(value, _PLAIN)
    }


_PLAIN = (bool, int, float, complex, str)


def _alike(one: Any, other: Any) -> bool:
    """The same objects in two copies of a container; they may be tensors, which compare oddly."""
    if one is None:
        return True
    if isinstance(one, bytes):
        return bool(one == other)
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(key in other and other[key] is value for key, value in one.items())
    if isinstance(one, set):
        return bool(one == other)
    return all(a is b for a, b in zip(one, other, strict=True))


def refill(container: Any, content: Any) -> None:
    """Make a container hold what a copy of it does, or a generator go on from its state."""
    if isinstance(container, GENERATORS):
        _set_state(container, content)
        return
    if _alike(container, content):
        return
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)


def tensors_held(model: nn.Module) -> Iterator[torch.Tensor]:
    """All in attributes, buffers and containers of modules, three levels deep."""
    for module in model.modules():
        for name, value in {**module.__dict__, **module._buffers}.items():
            if name not in _OWN:
                yield from tensors_in(value)


def tensors_in(value: Any, deepest: int = 3) -> Iterator[torch.Tensor]:
    """In a value, and in containers in containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif deepest and isinstance(value, (Mapping, list, tuple, set, deque)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(one, deepest - 1)


def results_in(model: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors of these that a pass computed, with a graph behind them."""
    own = {id(p) for p in model.parameters()}
    return (t for t in tensors_held(model) if not t.is_leaf and id(t) not in own)
