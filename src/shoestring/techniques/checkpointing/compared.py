"""In a step's first pass: what backward reads must be the same when it is computed again.

A block may hold on to something that no one else knows: a generator in a module's globals, a
counter in a closure, the clock. Its second pass would then give other values, and gradients would
be wrong without a word. So the first pass notes a few elements of every tensor that backward
will read, PyTorch compares (it compares shapes in any case), and the step ends in an error
before the update:

    forward     block 3 keeps its input, and drops a mask   [1, 0, 1, 1, …] is noted
    backward    block 3 is computed again, with another mask [0, 1, 1, 0, …]: InputError
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ...torch_private.autograd import add_determinism_check
from ...trace.fakes import is_fake
from ..base import Run
from .module_state import FirstPass, ModuleState

_ELEMENTS = 64
"""Noted of each tensor, evenly spaced."""
_APART = {torch.float16: 2e-2, torch.bfloat16: 4e-2}
"""Relative to the largest of them, what kernels that add in any order explain; 1e-3 otherwise."""
_FLIPPED = 0.05
"""Of a mask's elements, the share that a comparison within rounding of its bound explains."""

_wanted: ContextVar[bool] = ContextVar("compare recomputed tensors", default=False)
_allowed: ContextVar[bool] = ContextVar("may compare recomputed tensors", default=True)
_where: ContextVar[tuple[nn.Module, ModuleState, FirstPass] | None]
_where = ContextVar("the region that runs", default=None)


def compared_at_first(run: Run) -> Run:
    """The run, with all that the first one's regions recompute compared."""
    ran = [False]

    def comparing(batch: Any) -> torch.Tensor:
        if ran[0] or not _allowed.get():
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
        self._elements = _some_of(tensor)
        self._region = _where.get()

    def __eq__(self, again: object) -> bool:
        if not isinstance(again, Noted) or self._kind != again._kind:
            return False
        if self._region is None or self._alike(again._elements):
            return True
        model, state, first = self._region
        if not first.changed_values:
            raise InputError(
                f"{_name(model, state.blocks)} has other values when recomputed, so gradients "
                "would be wrong: it reads something that is not the model's, such as a generator "
                "or a counter outside of it",
                hint="keep it in the model, as a buffer, an attribute or a torch.Generator, or "
                "leave checkpointing out of the plan",
            )
        return True

    __hash__ = None  # type: ignore[assignment]

    def _alike(self, again: list[float]) -> bool:
        if not self._elements or not again:
            return True
        pairs = list(zip(self._elements, again, strict=True))
        if self._kind[1] is torch.bool:
            return sum(a != b for a, b in pairs) <= _FLIPPED * len(pairs)
        # NaN stands in for running statistics, which a second pass must not move.
        finite = [(a, b) for a, b in pairs if math.isfinite(a) and not math.isnan(b)]
        largest = max((abs(a) for a, _ in finite), default=0.0)
        allowed = _APART.get(self._kind[1], 1e-3) * largest
        return all(abs(a - b) <= allowed for a, b in finite)


def _name(model: nn.Module, blocks: list[nn.Module]) -> str:
    modules = model.named_modules()
    names = [name for name, module in modules if any(module is block for block in blocks)]
    return f"{names[0]} to {names[-1]}" if len(names) > 1 else "".join(names) or "a block"


def _some_of(tensor: torch.Tensor) -> list[float]:
    """None of parameters, which are not recomputed, nor of integers, some of which nobody wrote."""
    own = type(tensor) is torch.Tensor and not is_fake(tensor)
    known = tensor.is_floating_point() or tensor.dtype is torch.bool
    if not own or not known or tensor.layout is not torch.strided or not tensor.numel():
        return []
    if tensor.device.type == "meta" or not _is_dense(tensor):
        return []
    step = max(tensor.numel() // _ELEMENTS, 1)
    count = min(tensor.numel(), _ELEMENTS)
    if tensor.is_cuda:  # attention pads what it keeps: the first elements are of the data
        step, count = 1, min(count, 16)
    try:
        some: list[float] = tensor.detach().as_strided((count,), (step,)).tolist()
    except RuntimeError:  # inside torch.func, where a tensor stands for several
        return []
    return some


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
