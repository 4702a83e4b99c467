"""Which modules of a model treat every position alone, so that they can run in tiles.

Two tests, neither of names. The module runs on a fake tensor of many rows: only element-wise
functions, products of rows with a weight and views that keep the rows may run. Where its weights
are real it also runs on random rows, whole and in two parts, and the results must agree.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...torch_private.dispatch import TorchDispatchMode
from ...torch_private.fake_tensors import FakeTensorMode
from ...trace.blocks import block_paths
from ...trace.fakes import is_fake

_ROWS = 10_007
"""Of the fake tensor, a prime: no other dimension is as long."""
_REAL, _FIRST = 7, 3
_PRODUCTS = frozenset("aten.mm aten.addmm".split())
_ALIKE = frozenset(
    "aten.t aten.transpose aten.view aten._unsafe_view aten.reshape aten.detach aten.alias "
    "aten.clone aten._to_copy aten.slice aten.split aten.split_with_sizes aten.chunk "
    "aten.squeeze aten.unsqueeze aten.expand".split()
)
"""Of values whose first dimension are the rows, and of weights."""


def positionwise(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules within a model that treat rows alone and are wider inside."""
    found: list[str] = []
    blocks = block_paths(model)
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        around = not path or path in blocks or any(b.startswith(f"{path}.") for b in blocks)
        if inside or around or not _may_be(module):
            continue
        if _treats_rows_alone(module, _widths(module)[0]):
            found.append(path)
            yield path, module


def _may_be(module: nn.Module) -> bool:
    """Two layers or more, no buffers or hooks, one argument."""
    parts = list(module.modules())
    if len(_widths(module)) < 2 or any(True for _ in module.buffers()):
        return False
    if hooked(parts):
        return False
    if type(module) in (nn.ModuleList, nn.ModuleDict):
        return False
    given = list(inspect.signature(module.forward).parameters.values())
    needed = [p for p in given if p.default is p.empty and p.kind not in _MORE]
    return len(needed) == 1


def hooked(parts: Iterable[nn.Module]) -> bool:
    """Whether somebody looks at what one of them computes, and would see tiles."""
    return any(
        p._forward_hooks or p._forward_pre_hooks or p._backward_hooks or p._backward_pre_hooks
        for p in parts
    )


_MORE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _widths(module: nn.Module) -> list[int]:
    """Of the inputs of its layers, in their order: the first is its own."""
    return list(dict.fromkeys(m.in_features for m in module.modules() if isinstance(m, nn.Linear)))


def _treats_rows_alone(module: nn.Module, width: int) -> bool:
    first = next(module.parameters())
    try:
        if not _only_rows(module, width, first):
            return False
        return is_fake(first) or _parts_agree(module, width, first)
    except Exception:  # it wants something else than rows of numbers
        return False


def _only_rows(module: nn.Module, width: int, like: torch.Tensor) -> bool:
    """Whether all that runs on fake rows keeps them apart."""
    mode = getattr(like, "fake_mode", None) or FakeTensorMode(allow_non_fake_inputs=True)
    weights = {p.untyped_storage()._cdata for p in module.parameters()}
    watch = _Watch(weights)
    with torch.no_grad(), mode:
        rows = torch.empty(_ROWS, width, dtype=_type(module), device=like.device)
        watch.note(rows)
        with _training(module), watch:
            made = module(rows)
    known = isinstance(made, torch.Tensor) and made.dim() == 2 and made.shape[0] == _ROWS
    return known and not watch.refused and watch.widest > width


@contextmanager
def _training(module: nn.Module) -> Iterator[None]:
    """Within: as it will train, with the dropout it may have."""
    before = [(m, m.training) for m in module.modules()]
    try:
        module.train()
        yield
    finally:
        for part, was in before:
            part.training = was


class _Watch(TorchDispatchMode):
    """Notes what mixes rows, is drawn at random, or writes over the input."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self.refused, self.widest = "", 0
        self._weights, self._there = weights, set(weights)
        self._made: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # asks for a device
            return made
        name = str(func.overloadpacket)
        held = [a for a in args if isinstance(a, torch.Tensor)]
        made_all = made if isinstance(made, (list, tuple)) else [made]
        writes = func._schema.is_mutable and held[0].untyped_storage()._cdata in self._there
        if writes or torch.Tag.nondeterministic_seeded in func.tags:
            self.refused = self.refused or name
        if all(self._is_weight(a) for a in held) and held:
            if not any(self._is_weight(m) for m in made_all):  # a weight that was computed
                self._weights |= {m.untyped_storage()._cdata for m in made_all}
                self._made.append(made)  # or another tensor might lie there
            return made
        if name in _PRODUCTS:
            left, right = held[-2:]
            if self._is_weight(left) or not self._is_weight(right):
                self.refused = self.refused or name
        elif torch.Tag.pointwise not in func.tags and name not in _ALIKE:
            self.refused = self.refused or name
        for tensor in made_all:
            if not isinstance(tensor, torch.Tensor) or tensor.shape[:1] != (_ROWS,):
                self.refused = self.refused or name
            else:
                self.widest = max(self.widest, tensor.numel() // _ROWS)
        return made

    def note(self, given: torch.Tensor) -> None:
        """The input: nothing may write over it."""
        self._there.add(given.untyped_storage()._cdata)

    def _is_weight(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata in self._weights


@torch.no_grad()
def _parts_agree(module: nn.Module, width: int, like: torch.Tensor) -> bool:
    """Whether real rows, in two parts, give what they give together."""
    drawn = torch.randn(_REAL, width, generator=torch.Generator().manual_seed(0))
    rows = drawn.to(like.device, _type(module))
    whole = module(rows)
    parts = torch.cat([module(rows[:_FIRST]), module(rows[_FIRST:])])
    bound = 16 * torch.finfo(whole.dtype).eps * float(whole.abs().max())
    return bool((whole - parts).abs().max() <= bound)


def _type(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
