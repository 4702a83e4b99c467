"""In a step's first pass: what backward reads must be the same when it is computed again.

A block may hold on to something that no one else knows: a generator in a module's globals, a
counter in a closure, the clock. Its second pass would then give other values, and gradients would
be wrong without a word. So the first pass notes a few elements of every tensor that backward
will read, PyTorch compares (it compares shapes in any case), and the step ends in an error
before the update:

    forward     block 3 keeps its input, and drops a mask   [1, 0, 1, 1, …] is noted
    backward    block 3 is computed again, with another mask [0, 1, 1, 0, …]: InputError

`torch.utils.checkpoint` lets a function note each tensor (`add_determinism_check`) and compares the
notes of both passes by `!=`. A `Noted` compares its elements there. Three things may differ without
a mistake, and are let through: results of kernels that add in any order (`_APART`), masks that
follow from such results (`_FLIPPED`), and memory that nobody wrote (`_is_written`). Later steps
compare shapes alone, as PyTorch does, so this costs the first step only.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from ...errors import InputError
from ...torch_private.autograd import DisableTorchFunction, add_determinism_check
from ...torch_private.trees import tree_leaves
from ...trace.fakes import is_fake
from ..base import Run, Setup
from ..saving import storage_key
from .module_state import FirstPass, ModuleState

_ELEMENTS = 64
"""Noted of each tensor at least, evenly spaced."""
_APART = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 4e-2}
"""Relative to the largest of them, what kernels that add in any order explain."""
_TF32 = 1e-3
"""The same in FP32 on CUDA, where a kernel that is chosen anew may round its operands."""
_FLIPPED = 0.05
"""Of what is not rounded itself, masks and indices, the share that rounding before it explains."""
_UNWRITTEN = "attention", "batch_norm", "ctc_loss", "gru", "lstm", "rnn_", "rrelu"
"""Parts of names of functions that keep memory which nobody wrote: padding, seeds, workspaces."""

_wanted: ContextVar[bool] = ContextVar("compare recomputed tensors", default=False)
_allowed: ContextVar[bool] = ContextVar("may compare recomputed tensors", default=True)
_where: ContextVar[tuple[nn.Module, ModuleState, FirstPass] | None]
_where = ContextVar("the region that runs", default=None)


def compared_at_first(setup: Setup) -> Run:
    """Its run, the first with all that is recomputed compared; not where inputs are rounded."""
    ran, run = [False], setup.run

    def comparing(batch: Any) -> torch.Tensor:
        if ran[0] or setup.rounds_saved or not _allowed.get():
            return run(batch)
        ran[0] = True
        with compare():
            return run(batch)

    return comparing


@contextmanager
def compare(wanted: bool = True) -> Iterator[None]:
    """Regions made here compare."""
    before = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(before)


@contextmanager
def uncompared() -> Iterator[None]:
    """For a certificate, which compares by itself and shows all that differs."""
    before = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(before)


def comparing() -> bool:
    """Whether regions made now compare; a capture cannot read values."""
    if not _wanted.get() or torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


@contextmanager
def inside(model: nn.Module, state: ModuleState, first: FirstPass) -> Iterator[None]:
    """Whatever is noted here is of the first pass of these blocks."""
    before = _where.set((model, state, first))
    try:
        yield
    finally:
        _where.reset(before)


class Noted:
    """Shape, type and a few elements of a tensor; unlike another one, it says so in an error."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._kind = tuple(tensor.shape), tensor.dtype, tensor.device
        self._region = _where.get()
        first = None if self._region is None else self._region[2]
        self._storage = None if first is None else storage_key(tensor)
        wanted = first is None or _is_written(tensor, first.running)
        self._elements = _some_of(tensor) if wanted else []

    def __eq__(self, again: object) -> bool:
        if not isinstance(again, Noted) or self._region is None:
            return isinstance(again, Noted) and self._kind == again._kind
        model, state, first = self._region
        if self._kind == again._kind and (
            self._alike(again._elements, first) or first.wrote(self._storage)
        ):
            return True
        raise _differs(_name(model, state.blocks), "has other values")

    __hash__ = None  # type: ignore[assignment]

    def _alike(self, again: list[Any], first: FirstPass) -> bool:
        if not self._elements or not again:
            return True
        pairs = list(zip(self._elements, again, strict=True))
        _, kind, device = self._kind
        kind = kind.to_real() if kind.is_complex else kind
        if not kind.is_floating_point:
            flipped = sum(a != b for a, b in pairs)
            return flipped <= (_FLIPPED * len(pairs) if first.rounded else 0)
        # NaN stands in for running statistics, which a second pass must not move.
        finite = [(a, b) for a, b in pairs if cmath.isfinite(a) and not cmath.isnan(b)]
        largest = max((abs(a) for a, _ in finite), default=0.0)
        coarse = device.type == "cuda" and kind is torch.float32
        allowed = (_TF32 if coarse else _APART.get(kind, _APART[torch.bfloat16])) * largest
        first.rounded |= any(a != b for a, b in finite)
        return all(abs(a - b) <= allowed for a, b in finite)


def explained(backward: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """The backward pass; that a block saves other tensors in its second pass is told plainly."""

    def explaining(value: torch.Tensor) -> None:
        try:
            backward(value)
        except CheckpointError as error:
            raise _differs("a block", "saves other tensors") from error

    return explaining


def _differs(block: str, how: str) -> InputError:
    return InputError(
        f"{block} {how} when recomputed, so gradients would be wrong: it reads something that is "
        "not the model's, such as a generator or a counter outside of it",
        hint="keep it in the model, as a buffer, an attribute or a torch.Generator, or "
        "leave checkpointing out of the plan",
    )


def _name(model: nn.Module, blocks: list[nn.Module]) -> str:
    modules = model.named_modules()
    names = [name for name, module in modules if any(module is block for block in blocks)]
    return f"{names[0]} to {names[-1]}" if len(names) > 1 else "".join(names) or "a block"


def _is_written(tensor: torch.Tensor, call: tuple[Any, ...] | None) -> bool:
    """Whether somebody wrote all of it: what a function keeps for itself may be a workspace."""
    name, given = ("", ()) if call is None else (getattr(call[0], "__name__", ""), call[1:])
    key = storage_key(tensor)
    tensors = (leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor))
    if any(storage_key(t) == key for t in tensors if t.layout is torch.strided):
        return True
    if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool):
        if call is None or tensor.dtype is torch.uint8:
            return False
    return not any(part in name for part in _UNWRITTEN)


def _some_of(tensor: torch.Tensor) -> list[Any]:
    """None of parameters, which are not recomputed."""
    if type(tensor) is not torch.Tensor or is_fake(tensor) or not tensor.numel():
        return []
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return []
    total = tensor.numel()
    step = max(total // _ELEMENTS, 1)
    while math.gcd(step, total) > 1:  # through all rows and columns
        step -= 1
    if tensor.is_cuda:  # attention pads what it keeps: the first elements are of the data
        step, total = 1, min(total, 16)
    try:
        with DisableTorchFunction():
            if _is_dense(tensor):
                count = -(-total // step)
                found: list[Any] = tensor.detach().as_strided((count,), (step,)).tolist()
                return found
            return [tensor[_place(at, tensor.shape)].item() for at in range(0, total, step)]
    except RuntimeError:  # inside torch.func, where a tensor stands for several
        return []


def _place(at: int, shape: Iterable[int]) -> tuple[int, ...]:
    """Of an element, by its number."""
    place: list[int] = []
    for size in reversed(tuple(shape)):
        at, here = divmod(at, size)
        place.insert(0, here)
    return tuple(place)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie one after another, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


CHECK = "values"
"""`determinism_check` of `torch.utils.checkpoint`."""
add_determinism_check(CHECK, Noted)
