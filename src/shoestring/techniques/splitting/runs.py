"""A few examples through a copy of the model, which is thrown away: a loss, or its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ...trace.attributes import assigned, copied_model
from ...trace.batches import map_tensors
from ...trace.blocks import is_normalization
from ...trace.hooked import copy_gradient_hooks
from ...trace.streams import kept_streams
from ...trace.tracing import Loss
from ...trace.wide import staying_wide, wide_model
from .bounds import InBounds
from .draws import open_kernels
from .values import Failed

Left = dict[tuple[str, str], Any]
"""Path of a module and name of an attribute → what a pass left there."""


_SCALED_ELEMENTS = 2**20
"""Of a weight that is copied to be multiplied, where most of the model is not copied."""
_SPREAD = 0.3
"""Of random numbers in the place of weights that are zero, times the root of their inputs."""


class CopyRuns:
    """The model in FP64 or as it is; of its weights that start at zero, random ones.

    While a head is zero its examples all have the same scores, and a loss that compares them with
    each other has the gradient of one that does not.
    """

    def __init__(self, model: nn.Module, loss: Loss, *, wide: bool) -> None:
        self.wide, self._model, self._loss = wide, model, loss
        self.open = False
        """With kernels whose draws can be cut."""
        self.needs_gradients = False
        """The loss takes gradients itself: a penalty, an inner step."""
        self.backward = False
        """The loss ran a backward pass of the model."""
        self._reentrant = False
        """The model recomputes by a backward pass within: it has gradients of all or of none."""
        self.left: Left = {}
        """By the last run."""
        self.within: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Entered by each run."""
        self.times = 1.0
        """The factor to the weights."""
        trained = [p for p in model.parameters() if p.requires_grad and p.numel()]
        self._zeros = [p for p in trained if not bool(p.detach().any())]
        self._scaled = [p for p in trained if wide or p.numel() <= _SCALED_ELEMENTS]

    def run(
        self,
        batch: Any,
        mode: Any,
        parameters: Sequence[torch.Tensor] | None = None,
        given: Left | None = None,
    ) -> Any:
        """The loss, or with `parameters` its gradients; on a copy that is thrown away.

        The copy has the attributes that are `given`.
        """
        try:
            return self._run(batch, mode, parameters, given)
        except Failed as error:
            if self._reentrant or "use_reentrant=True" not in str(error):
                raise
            self._reentrant = True
            return self._run(batch, mode, parameters, given)

    def _run(
        self,
        batch: Any,
        mode: Any,
        parameters: Sequence[torch.Tensor] | None,
        given: Left | None,
    ) -> Any:
        rewind = kept_streams()
        try:
            with self._copy() as (model, memo), self._context(), mode:
                for (path, name), value in (given or {}).items():
                    model.get_submodule(path).__dict__[name] = value
                before = [dict(vars(module)) for module in model.modules()]
                gradients = _gradients(model)
                with torch.set_grad_enabled(self.needs_gradients or parameters is not None):
                    value = self._loss(model, map_tensors(torch.clone, batch))
                self.backward = self.backward or _gradients(model) != gradients
                self.left = assigned(model, before)
                if not isinstance(value, torch.Tensor) or value.numel() != 1:
                    raise Failed("the loss is not one number")
                if parameters is None:
                    return value.detach()
                wanted = [memo[id(p)] for p in parameters]
                if self._reentrant:
                    value.backward()
                    return [p.grad for p in wanted]
                return torch.autograd.grad(value, wanted, allow_unused=True)
        except Failed:
            raise
        except torch.OutOfMemoryError as error:
            raise Failed("out of memory", unclear=True) from error
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise Failed(first) from error
        finally:
            rewind()

    @contextmanager
    def _context(self) -> Iterator[None]:
        wide: Any = staying_wide() if self.wide else nullcontext()
        guarded: Any = InBounds() if next(self._model.parameters()).is_cuda else nullcontext()
        with open_kernels() if self.open else nullcontext(), wide, guarded, self.within():
            yield

    @contextmanager
    def _copy(self) -> Iterator[tuple[nn.Module, dict[int, Any]]]:
        """All that is not a parameter is copied; parameters are too where they become FP64."""
        memo: dict[int, Any] = {}
        if self.wide:
            made = wide_model(self._model, memo)
        else:
            memo = {} if self._reentrant else {id(p): p for p in self._model.parameters()}
            for p in {*self._zeros, *(self._scaled if self.times != 1 else ())}:
                memo.pop(id(p), None)
            made = copied_model(self._model, memo)
        held = ((p, memo.get(id(p), p)) for p in self._model.parameters())
        copy_gradient_hooks(held)
        with torch.no_grad():
            for number, p in enumerate(self._zeros):
                memo[id(p)].copy_(_small(p, number))
            for p in self._scaled if self.times != 1 else ():
                memo[id(p)].mul_(self.times)
        for module in made.modules():
            if is_normalization(module):
                module.eval()
        yield made, memo


def _small(p: torch.Tensor, number: int) -> torch.Tensor:
    """Always the same random numbers in the form of a weight."""
    stream = torch.Generator().manual_seed(number)
    drawn = torch.randn(p.shape, generator=stream)
    return drawn * _SPREAD / math.sqrt(p[0].numel() if p.dim() > 1 else 1)


def _gradients(model: nn.Module) -> list[tuple[int, int] | None]:
    """Which tensors they are, and how often they were written."""
    held = (p.grad for p in model.parameters())
    return [None if g is None else (id(g), g._version) for g in held]


def in_type_of(model: nn.Module, batch: Any) -> Any:
    """In 16 bits where the model is: a step in 16 bits casts its batch, too."""
    narrow = (torch.float16, torch.bfloat16)
    kinds = {p.dtype for p in model.parameters()} & set(narrow)
    if len(kinds) != 1:
        return batch
    kind = kinds.pop()
    return map_tensors(lambda t: t.to(kind) if t.dtype is torch.float32 else t, batch)
