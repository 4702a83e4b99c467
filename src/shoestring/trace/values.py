"""Values of tensors that follow from the batch's integers, for models that read them.

Fake tensors hold nothing, and models ask: whether a mask masks anything, whether a row is one
sequence. The answer is worked out when it is asked for, by the same operations on real tensors.

Example, `if (mask == 0).any(): …` on a fake copy of the batch's mask:

    fake mask                 origin: the batch's own mask, real whole numbers      `stand_for`
    fake == 0                 origin: eq(origin of mask, 0)                         `run`
    any                       origin: any(origin of ==)                             `run`
    bool(…)                   a question: `made()` runs eq and any on the real mask `run`

Nothing real is computed before the question. A tensor that follows from a float, from random
numbers, or that was changed in place since, has no origin, and asking about it fails as it does
for any fake tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..torch_private.dispatch import without_modes
from ..torch_private.fake_tensors import FakeTensor, constant_of, forget_constant, make_fake
from ..torch_private.trees import TreeSpec, tree_flatten, tree_map, tree_unflatten
from .batches import tensors_of
from .results import result

_QUESTIONS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
_INDEX = torch.ops.aten.index.Tensor
_MAKERS = ("arange", "full", "ones", "zeros")
_LIKE = ("ones_like", "zeros_like", "full_like")
"""Of a tensor they see the shape alone: the gradient that a backward pass begins with, say."""


@dataclass(frozen=True)
class _Origin:
    """How a tensor was made, which is what it holds as long as it has this version."""

    function: Callable[..., Any]
    leaves: list[Any]
    form: TreeSpec
    version: int = 0
    given: bool = False
    """It stands for a tensor of the batch."""

    def made(self) -> Any:
        """The same, for real."""
        leaves = [leaf.made() if isinstance(leaf, _Origin) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.form)
        return self.function(*args, **kwargs)


_origins: MutableMapping[torch.Tensor, _Origin] = WeakTensorKeyDictionary()


def _known(tensor: torch.Tensor) -> _Origin | None:
    found = _origins.get(tensor)
    if found is None:
        held = constant_of(tensor)
        return None if held is None else _Origin(lambda: held, *tree_flatten(((), {})))
    return found if found.version == tensor._version else None


def stand_for(fake: torch.Tensor, given: torch.Tensor) -> None:
    """Know a fake tensor by what it copies: whole numbers, or a fake tensor that is known."""
    origin = _known(given)
    has_memory = not isinstance(given, FakeTensor) and not given.is_meta
    if origin is None and has_memory and not given.is_floating_point():
        real = given.detach().cpu()
        origin = _Origin(lambda: real, *tree_flatten(((), {})), given=True)
    if origin is not None:
        _origins[fake] = replace(origin, version=fake._version)


def forget_written(values: Iterable[Any]) -> None:
    """Of what a kernel was given that did not run, nothing is known but the batch."""
    fakes = [v for v in values if isinstance(v, FakeTensor)]
    written = {v.untyped_storage()._cdata for v in fakes}
    for fake in fakes:
        forget_constant(fake)
    for tensor, origin in list(_origins.items()):
        if not origin.given and tensor.untyped_storage()._cdata in written:
            del _origins[tensor]


def forget_varied(batch: Any) -> None:
    """Keep what holds for every part of the batch: tensors of one and the same number."""
    for tensor in tensors_of(batch):
        origin = _known(tensor)
        if origin is None:
            continue
        with without_modes():
            held = origin.made().flatten()
            varied = bool((held != held[:1]).any())
        if varied:
            del _origins[tensor]


def _follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Origin | None:
    """How the result follows from tensors that are known, if it does."""
    if args and isinstance(args[0], torch.Tensor) and _known(args[0]) is None:
        if func._opname not in _LIKE:
            return None  # nearly always
        shape = args[0].shape
        like = {"dtype": args[0].dtype, **kwargs, "device": "cpu"}
        return _Origin(
            lambda *rest, **how: func(torch.empty(shape), *rest, **how),
            *tree_flatten((args[1:], like)),
        )
    leaves, form = tree_flatten((args, kwargs))
    known = {id(leaf): _known(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    if None in known.values() or (not known and func._opname not in _MAKERS):
        return None
    return _Origin(func, [known.get(id(leaf), leaf) for leaf in leaves], form)


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on fake tensors; a question about known ones is answered."""
    if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return result(func, args, kwargs)
    origin = _follow(func, args, kwargs)
    if origin is not None and func in _QUESTIONS:
        with without_modes():
            return origin.made()
    if func is _INDEX:
        args = args[0], _positions(args[1]), *args[2:]
    elif origin is not None and torch.Tag.dynamic_output_shape in func.tags:
        with without_modes():
            real = origin.made()
        like = next(t for t in tensors_of(args) if isinstance(t, FakeTensor))
        return tree_map(lambda leaf: _faked(leaf, like), real)
    out = result(func, args, kwargs)
    if origin is not None and isinstance(out, FakeTensor) and not out.is_inference():
        _origins[out] = replace(origin, version=out._version)
    return out


def _faked(real: Any, like: FakeTensor) -> Any:
    """A fake copy of a tensor, on the device of another one."""
    if not isinstance(real, torch.Tensor):
        return real
    form = tuple(real.shape), real.stride(), real.dtype
    made = make_fake(like.fake_mode, like.fake_device, *form)
    stand_for(made, real)
    return made


def _positions(indices: Any) -> list[Any]:
    """Indices whose known masks are the positions that they pick: how many is a shape."""
    found: list[Any] = []
    for index in indices:
        masks = isinstance(index, FakeTensor) and index.dtype in (torch.bool, torch.uint8)
        origin = _known(index) if masks else None
        if origin is None:
            found.append(index)
            continue
        with without_modes():
            picked = origin.made().nonzero().unbind(1)
        found.extend(_faked(positions, index) for positions in picked)
    return found


@contextmanager
def asking(asked: list[bool]) -> Iterator[None]:
    """Inside, Hugging Face asks what can be answered; of itself it asks fake tensors nothing.

    It would make a mask where training has none. `asked` is called if it does ask.
    """
    checks: Any = sys.modules.get("transformers.utils.import_utils")
    plain = getattr(checks, "is_fake_tensor", None)
    if plain is None:
        yield
        return

    def is_unknown(tensor: Any) -> bool:
        fake: bool = plain(tensor)
        if fake and _known(tensor) is not None:
            asked.append(True)
            return False
        return fake

    checks.is_fake_tensor = is_unknown
    try:
        yield
    finally:
        checks.is_fake_tensor = plain
