"""Values that a model reads: a real forward pass writes them down, fake tensors read them off.

    if confidence.item() > 0.9: break                  an early exit
    rows = torch.nonzero(router == expert)             a mixture of experts
    linear_sum_assignment(cost.numpy())                a matching in the loss
    pack_padded_sequence(x, lengths)                   a packed sequence

Fake tensors hold no values, so such a model cannot be traced on them alone. Where its weights and
batch are there, the loss is computed once on them, keeping nothing for backward, and every value
that Python gets to see, and every shape that depends on values, is noted with where it was asked.
The trace then asks the same questions in the same places, however often blocks are recomputed.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

from ..errors import TraceError
from ..torch_private.autograd import DisableTorchFunction
from ..torch_private.dispatch import TorchDispatchMode, without_modes
from ..torch_private.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from ..torch_private.trees import tensor_leaves, tree_leaves, tree_map
from .batches import tensors_of
from .draws import extreme, is_single_draw, pinned
from .packed import is_padding, padded
from .split import cut, examples_of
from .untouched import Untouched, as_it_was, hooks_of
from .values import stand_for

_aten = torch.ops.aten
_ARRAYS = (torch.Tensor.numpy, torch.Tensor.__array__)
"""How NumPy sees values; no operation shows it."""
_NUMBER = _aten._local_scalar_dense.default
QUESTIONS = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors that fake tensors raise when code reads their values."""
_SIGNS = ("data is not allocated yet", ".numpy() is not supported", "data pointer of Tensor")
"""Messages of libraries that read their memory."""


def reads_values(error: BaseException | None) -> bool:
    """Whether it was raised because a fake tensor holds no values."""
    found = isinstance(error, QUESTIONS)
    text = str(error)
    return found or any(sign in text for sign in _SIGNS) or _is_of_a_script(text)


def _is_of_a_script(text: str) -> bool:
    """TorchScript turns a question into an error without a message."""
    return "in the TorchScript interpreter" in text and text.rstrip().endswith("RuntimeError:")


_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
PACKS = _aten._pack_padded_sequence.default
_AT_ONCE = 16
_SMALL = 2**20
"""Elements of a whole-numbered result that are kept, so that what follows from them is known."""


def is_question(func: Any, args: Any) -> bool:
    """Whether the result of an operation, or its shape, depends on values."""
    if func is _aten.index.Tensor:  # of masks, not of positions
        return _has_mask(args[1])
    return func is PACKS or not _TAGS.isdisjoint(func.tags)


def writes_masked(func: Any, args: Any) -> bool:
    """Whether it is x[mask] = y, whose gradient asks for grad[mask]."""
    return func._opname in ("index_put", "index_put_", "_index_put_impl_") and _has_mask(args[1])


def _has_mask(indices: Any) -> bool:
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in indices)


class Answers:
    """The questions of one forward pass and what the answers were."""

    def __init__(self) -> None:
        self._lists: dict[Any, list[Any]] = defaultdict(list)
        self._next: dict[Any, Iterator[Any]] = {}
        self._paths: list[str] = []
        self._known: dict[int, str] = {}
        self.nbytes = 0
        """Of all that was computed."""
        self.trained: frozenset[str] = frozenset()
        """Names of parameters that a part of the batch reads, perhaps another one."""
        self.read: set[int] = set()

    @contextmanager
    def following(self, model: nn.Module, *, copied: bool = True) -> Iterator[None]:
        """Inside, it is known which module of the model runs; a copy of it is changed for that."""
        self._known = {id(module): path for path, module in model.named_modules()}
        self._paths = [""]

        def enter(module: nn.Module, _: Any) -> None:
            path = self._known.get(id(module))
            self._paths.append(self._paths[-1] if path is None else path)

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            if len(self._paths) > 1:
                self._paths.pop()

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        if copied:
            self._follow_forwards(model)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _follow_forwards(self, model: nn.Module) -> None:
        """Regions call the forward of a block, which no hook tells of."""
        for path, module in model.named_modules():
            if next(module.children(), None) is not None:
                module.forward = partial(self._forward, path, module.forward)

    def _forward(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._paths.append(path)
        try:
            return forward(*args, **kwargs)
        finally:
            self._paths.pop()

    def note(self, func: Any, args: Any, out: Any, *, anywhere: bool = False) -> None:
        """Write an answer down for here, or for whoever asks elsewhere."""
        keys = list(self._keys(func, args))
        for key in keys[-1:] if anywhere else keys[:-1]:
            self._lists[key].append(out)

    def __contains__(self, question: tuple[Any, Any]) -> bool:
        return any(key in self._lists for key in self._keys(*question))

    def give(self, func: Any, args: Any) -> Any:
        """The next answer to the question that was asked on this line, in this module if it can be.

        In a circle: a recomputed block asks again what it asked before.
        """
        for key in self._keys(func, args):
            if key in self._lists:
                if key not in self._next:
                    self._next[key] = itertools.cycle(self._lists[key])
                return next(self._next[key])
        raise KeyError(func)

    def rewind(self) -> None:
        """Start from the first question again."""
        self._next.clear()

    def _keys(self, func: Any, args: Any) -> Iterator[Any]:
        shapes = tuple(
            (tuple(leaf.shape), leaf.dtype)
            for leaf in tree_leaves(args)
            if isinstance(leaf, torch.Tensor)
        )
        line = user_line()
        yield self._paths[-1] if self._paths else "", line, func, shapes
        yield line, func, shapes
        yield func, shapes


INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), "<")


def user_line() -> tuple[str, int] | None:
    """The line of code that is neither PyTorch's nor ours and runs now."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(INSIDE):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


class _Noting(TorchDispatchMode):
    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._answers = answers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves = (t for t in tensor_leaves((args, kwargs or {})) if t.is_leaf and t.requires_grad)
        self._answers.read.update(map(id, leaves))
        if not func.is_view:
            self._answers.nbytes += sum(t.nbytes for t in tensor_leaves(out) if _is_dense(t))
        if is_single_draw(func, out):
            with without_modes():
                out = pinned(out, func, args)
        if writes_masked(func, args):
            with without_modes():
                gradient = _aten.index.Tensor(args[0].detach(), args[1])
                held = _Held(gradient)
                self._answers.note(_aten.index.Tensor, args[:2], held, anywhere=True)
        if is_question(func, args):
            with without_modes():
                self._answers.note(func, args, tree_map(_held, out))
        return out


class _NotingReads(TorchFunctionMode):
    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._answers = answers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # A fake tensor asks for one number after the other.
        asked = args[:1] if func is torch.Tensor.tolist else _numbers_in(func, args)
        with DisableTorchFunction(), without_modes():  # which would note them again
            for numbers in asked:
                for number in numbers.detach().flatten().unbind():
                    self._answers.note(_NUMBER, (number,), number.item())
        if func in _ARRAYS:
            self._answers.note(_ARRAYS, args[:1], np.asarray(out))
        return out


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _numbers_in(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Tensors whose values `torch.tensor([first, second])` copies."""
    if func is not torch.tensor or not args or isinstance(args[0], torch.Tensor):
        return []
    return [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]


class Reads(TorchFunctionMode):
    """Gives fake tensors the values that Python asks them for."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self._answers = answers

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        asks = func in _ARRAYS and isinstance(args[0], FakeTensor)
        if asks and (_ARRAYS, args[:1]) in self._answers:
            array = self._answers.give(_ARRAYS, args[:1])
            return array.astype(args[1]) if len(args) > 1 and args[1] is not None else array
        if (
            func is torch.Tensor.__format__
            and isinstance(args[0], FakeTensor)
            and not args[0].dim()
        ):
            return args[0].item().__format__(*args[1:])  # in a name: self[f"expert_{index}"]
        if is_padding(func) and isinstance(args[0], FakeTensor):
            return padded(*args)
        if any(isinstance(t, FakeTensor) for t in _numbers_in(func, args)):
            read = lambda leaf: leaf.item() if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
            args = tree_map(read, args[0]), *args[1:]
        return func(*args, **(kwargs or {}))


class _Held:
    """A tensor of an answer: its form, and its value where that is whole numbers and small."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.size, self.stride, self.dtype = tensor.size(), tensor.stride(), tensor.dtype
        whole = not tensor.is_floating_point() and tensor.numel() <= _SMALL
        self.value = tensor.detach().cpu().clone() if whole else None


def _held(leaf: Any) -> Any:
    return _Held(leaf) if isinstance(leaf, torch.Tensor) else leaf


def given(answers: Answers, func: Any, args: Any, mode: FakeTensorMode) -> Any:
    """An answer as fake tensors."""

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, _Held):
            return leaf
        if func is PACKS and leaf.value is not None:
            return leaf.value.clone()  # how many sequences there are at each step: read in C++
        with mode:
            made = torch.empty_strided(leaf.size, leaf.stride, dtype=leaf.dtype)
        if leaf.value is not None:
            stand_for(made, leaf.value)
        return made

    found = answers.give(func, args)
    with without_modes():
        return tree_map(fake, found)


def record_answers(model: nn.Module, batch: Any, loss: Callable[..., Any]) -> Answers:
    """Compute the loss once for real; nothing changes.

    Nothing is kept for backward, unless the loss itself runs one.
    """
    try:
        return _recorded(model, batch, loss, keep=False)
    except TypeError as error:
        if "unpack_hook" not in str(error):
            raise
    return _recorded(model, batch, loss, keep=True)


def _recorded(model: nn.Module, batch: Any, loss: Callable[..., Any], *, keep: bool) -> Answers:
    answers = Answers()
    with ExitStack() as stack:
        stack.enter_context(without_modes())
        stack.enter_context(as_it_was(model, Untouched([loss, *hooks_of(model)])))
        dropped = torch.autograd.graph.saved_tensors_hooks(lambda t: None, lambda packed: packed)
        stack.enter_context(nullcontext() if keep else dropped)
        stack.enter_context(answers.following(model, copied=False))
        stack.enter_context(_NotingReads(answers))
        stack.enter_context(_Noting(answers))
        loss(model, batch)
    return answers


def _of_largest(model: nn.Module, batch: Any, loss: Callable[..., Any], size: int) -> Answers:
    """Of the part, of so many examples, for which most is computed: the longest, the deepest.

    Of many parts, the largest of a few together is divided again.
    """
    start, stop = 0, examples_of(batch) or size
    read: set[int] = set()
    while True:
        parts = -(-(stop - start) // size)
        wide = size * -(-parts // _AT_ONCE)
        starts = [*range(start, stop, wide)]
        if wide == size:
            starts[-1] = max(min(starts[-1], stop - size), 0)
        found = [record_answers(model, cut(batch, at, at + wide), loss) for at in starts]
        largest = max(range(len(found)), key=lambda n: found[n].nbytes)
        read.update(*(answers.read for answers in found))
        if wide == size:
            named = model.named_parameters()
            found[largest].trained = frozenset(name for name, p in named if id(p) in read)
            return found[largest]
        start = starts[largest]
        stop = min(start + wide, stop)


_asking: weakref.WeakKeyDictionary[nn.Module, dict[Any, tuple[Any, Answers]]]
_asking = weakref.WeakKeyDictionary()
"""Models that read values, and for each batch what was found; the batch itself keeps its id."""
Traced = TypeVar("Traced")


def with_answers(
    run: Callable[[Answers | None], Traced], model: nn.Module, batch: Any, loss: Any, size: Any
) -> Traced:
    """A trace that has answers if the model asks; `size` is that of the part that runs at once.

    A model that holds no values itself cannot answer.
    """
    if model not in _asking:
        try:
            return run(None)
        except TraceError as error:
            tensors = [*model.parameters(), *model.buffers(), *tensors_of(batch)]
            if not error.values or any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):
                raise
        _asking[model] = {}
    known, key = _asking[model], (id(batch), id(loss), size, extreme())
    if key not in known:
        found = (
            record_answers(model, batch, loss)
            if size is None
            else _of_largest(model, batch, loss, size)
        )
        known[key] = (batch, loss), found
    answers = known[key][1]
    answers.rewind()
    return run(answers)
