"""Logits that are not computed yet: what a projection returns while a step runs.

    logits = model.head(h)                   DeferredLogits: h, weight, bias
    logits = logits.float()[:, :-1]          DeferredLogits: h[:, :-1], weight, bias
    F.cross_entropy(logits.flatten(0, 1), t) `row_losses` of h: the logits never exist whole
    logits.softmax(-1), print(logits), …     the real logits, computed now, and from then on

Shapes change the hidden states instead of the logits. Any function that `routes` does not list gets
the real logits, so the result is always right. Autograd knows a deferred tensor as the output of a
linear function: whoever differentiates it without asking PyTorch's functions gets that gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...errors import InputError
from ...torch_private.autograd import DisableTorchFunctionSubclass
from ...torch_private.dispatch import make_wrapper_subclass
from ...torch_private.trees import tree_map

_T, _linear = torch.Tensor, F.linear  # which is another one while logits are deferred
ROUTES: dict[Any, Callable[..., Any]] = {}
"""Functions that need no logits (`routes`)."""


@dataclass(eq=False)
class _Family:
    """Deferred tensors that would be views of one memory."""

    members: int = 1


@dataclass(frozen=True, eq=False)
class Projection:
    """hidden · weightᵀ + bias, then a type, a factor, an order of dimensions, a log-softmax."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    columns: int
    scale: float = 1.0
    cap: float | None = None
    """Of a hyperbolic tangent: the factor after it, where the scale comes before."""
    classes_last: bool = True
    """Else they are the second dimension, as cross-entropy wants them for (N, C, …)."""
    normalized: bool = False
    chosen: Callable[[], None] = lambda: None
    """Called when a loss is computed in parts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the logits."""
        leading, classes = self.hidden.shape[:-1], self.weight.shape[0]
        if self.classes_last:
            return (*leading, classes)
        return (leading[0], classes, *leading[1:])

    def compute(self) -> Tensor:
        """The logits, differentiable."""
        weight, bias = self.weight.to(self.hidden.dtype), self.bias
        if bias is not None:
            bias = bias.to(self.hidden.dtype)
        made = _linear(self.hidden, weight, bias).to(self.dtype)
        if self.scale != 1:
            made = made * self.scale
        if self.cap is not None:
            made = made.tanh() * self.cap
        if self.normalized:
            made = F.log_softmax(made, -1)
        return made if self.classes_last else made.movedim(-1, 1)


class DeferredLogits(torch.Tensor):
    """Logits of a known shape and type, without memory until something reads them."""

    projection: Projection
    family: _Family
    _known: Tensor | None
    _versions: tuple[int, ...]

    @staticmethod
    def of(projection: Projection, family: _Family | None = None) -> DeferredLogits:
        """As the output of an autograd function."""
        held = projection.hidden, projection.weight, projection.bias
        made: DeferredLogits = _Deferred.apply(*held, projection)
        made.projection, made.family = projection, family or _Family()
        made._known, made._versions = None, _versions(projection)
        return made

    def view_as_this(self, **changes: Any) -> DeferredLogits:
        """A deferred tensor that would share this one's memory."""
        self.check_unchanged()
        self.family.members += 1
        return DeferredLogits.of(replace(self.projection, **changes), self.family)

    def copy_as_this(self, **changes: Any) -> DeferredLogits:
        """A deferred tensor with memory of its own."""
        self.check_unchanged()
        return DeferredLogits.of(replace(self.projection, **changes))

    @property
    def is_computed(self) -> bool:
        """Whether something read it."""
        return self._known is not None

    def computed(self) -> Tensor:
        """The logits, computed once."""
        if self._known is None:
            self.check_unchanged()
            with torch.enable_grad():  # who reads it next may want its gradient
                self._known = self.projection.compute()
        return self._known

    def check_unchanged(self) -> None:
        """InputError if what it is computed from was changed in place meanwhile."""
        if self._versions != _versions(self.projection):
            raise InputError(
                "the input or the weight of the last layer was changed in place before its logits "
                "were read",
                hint="change a copy, or leave out chunked_loss",
            )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        route = ROUTES.get(func)
        first = args[0] if args else None
        if route is not None and isinstance(first, DeferredLogits) and not first.is_computed:
            result = route(*args, **kwargs)
            if result is not NotImplemented:
                return result
        _refuse_shared_writing(func, args)
        args, kwargs = tree_map(_plain, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Below autograd, where C++ reads it: the values alone."""

        def values(leaf: Any) -> Any:
            if not isinstance(leaf, DeferredLogits):
                return leaf
            leaf.check_unchanged()
            return leaf.projection.compute().detach()

        args, kwargs = tree_map(values, (args, kwargs or {}))
        return func(*args, **kwargs)


def _versions(projection: Projection) -> tuple[int, ...]:
    held = projection.hidden, projection.weight, projection.bias
    return tuple(tensor._version for tensor in held if tensor is not None)


def _plain(leaf: Any) -> Any:
    return leaf.computed() if isinstance(leaf, DeferredLogits) else leaf


def _refuse_shared_writing(func: Any, args: tuple[Any, ...]) -> None:
    """Written in place, views that are still deferred would not see it."""
    name = getattr(func, "__name__", "")
    written = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    if name not in ("__setitem__", "__set__") and (not written or name in _READING):
        return
    if args and isinstance(args[0], DeferredLogits) and args[0].family.members > 1:
        raise InputError(
            f"logits are changed in place ({name}) after views of them were taken",
            hint="change a copy, or leave out chunked_loss",
        )


_READING = ("__index__", "__int__", "__invert__", "__iter__")


class _Deferred(torch.autograd.Function):
    """The linear function, for whoever differentiates a deferred tensor as it is."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, projection: Projection
    ) -> Tensor:
        # Not saved for backward: hooks there would wait for a backward pass that seldom comes.
        ctx.held, ctx.versions = projection, _versions(projection)
        made = make_wrapper_subclass(
            DeferredLogits,
            projection.shape,
            dtype=projection.dtype,
            device=hidden.device,
            storage_size=0,
        )
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.versions != _versions(ctx.held):
            raise RuntimeError("a tensor needed for the gradient of logits was changed in place")
        held: Projection = ctx.held
        leaves = [
            None if tensor is None else tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(
                (held.hidden, held.weight, held.bias), ctx.needs_input_grad, strict=False
            )
        ]
        hidden, weight, bias = leaves
        assert hidden is not None and weight is not None
        with torch.enable_grad():
            made = replace(held, hidden=hidden, weight=weight, bias=bias).compute()
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        found = iter(torch.autograd.grad(made, wanted, grad))
        return (
            *(None if leaf is None or not leaf.requires_grad else next(found) for leaf in leaves),
            None,
        )


_METADATA = {
    *(
        getattr(_T, name).__get__
        for name in "shape dtype device layout ndim requires_grad is_leaf is_cuda is_cpu "
        "is_meta is_sparse is_quantized is_mkldnn is_nested _base".split()
    ),
    _T.size, _T.dim, _T.numel, _T.is_floating_point, _T.is_complex, _T.__len__,
    _T.element_size, _T.nelement, _T.ndimension, _T.get_device,
    torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip
"""Answered without the logits."""
