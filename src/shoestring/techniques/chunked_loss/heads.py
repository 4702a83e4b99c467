"""Which linear functions of a model can be its head, and how their logits are deferred."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import NoEffectWarning
from ...torch_private.autograd import active_saved_tensors_hooks
from ...torch_private.fake_tensors import FakeTensor
from ...trace.blocks import block_of, block_paths
from ..base import Run
from . import routes as routes  # tells deferred logits what needs none
from .deferred import DeferredLogits, Projection

LEAST_COLUMNS = 1024
_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)


def head_weights(model: nn.Module) -> list[torch.Tensor]:
    """Matrices outside of the repeated blocks; tied ones may be an embedding's."""
    found: dict[int, torch.Tensor] = {}
    for module in _outside_blocks(model):
        for weight in (*module._parameters.values(), getattr(module, "weight", None)):
            if weight is not None and _is_matrix(weight):
                found[id(weight)] = weight
    return list(found.values())


def _outside_blocks(model: nn.Module) -> list[nn.Module]:
    blocks = frozenset(block_paths(model))
    return [m for path, m in model.named_modules() if block_of(path, blocks) is None]


def _is_matrix(weight: Any) -> bool:
    return isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.shape[0] > 1


def columns_for(weight: torch.Tensor, chosen: int | None) -> int:
    """Classes at a time: their logits are twice the input, less than a block of the model needs."""
    return chosen or max(2 * weight.shape[1], LEAST_COLUMNS)


class DeferredHeads:
    """The run of a step, in which linear functions of some weights return deferred logits."""

    def __init__(self, model: nn.Module, run: Run, columns: int | None) -> None:
        self._run, self._columns = run, columns
        self._modules = list(model.modules())
        self.count = 0
        """Losses that were computed in parts."""
        self._told = False
        weights = head_weights(model)
        self._plain = {id(w) for w in weights if type(w) in _PLAIN}
        self._shapes = {w.shape for w in weights if type(w) not in _PLAIN}
        self._places: dict[torch.Size, list[tuple[nn.Module, str]]] = {}
        """Of parameters: ranks that split a model put whole ones there while it runs."""
        for module in _outside_blocks(model):
            for name, weight in module._parameters.items():
                if weight is not None and _is_matrix(weight) and type(weight) in _PLAIN:
                    self._places.setdefault(weight.shape, []).append((module, name))

    def __call__(self, batch: Any) -> torch.Tensor:
        """The loss."""
        before = self.count
        with self._deferring():
            loss = self._run(batch)
            if isinstance(loss, DeferredLogits):
                loss = loss.computed()
        if self.count == before and not self._told:
            self._told = True
            warnings.warn(
                "chunked_loss: no cross-entropy was taken of a linear layer's output, or its "
                "logits were read elsewhere too; they were computed whole",
                NoEffectWarning,
                stacklevel=2,
            )
        return loss

    @contextmanager
    def _deferring(self) -> Iterator[None]:
        """In place of `F.linear`, which `nn.Linear` and the user's code look up when they run.

        A backward hook of a module wants real outputs, so nothing is deferred then.
        """
        hooked = any(m._backward_hooks or m._backward_pre_hooks for m in self._modules)
        if hooked or not torch.is_grad_enabled():
            yield
            return
        plain, outside = F.linear, active_saved_tensors_hooks()

        def linear(input: Any, weight: Any, bias: Any = None) -> Any:
            # Inside of a block that is recomputed or saves by recipe, its own way is kept.
            if self._is_head(input, weight) and active_saved_tensors_hooks() == outside:
                return self._deferred(input, weight, bias)
            return plain(input, weight, bias)

        F.linear = linear
        try:
            yield
        finally:
            F.linear = plain

    def _is_head(self, input: Any, weight: Any) -> bool:
        shape = getattr(weight, "shape", None)
        known = id(weight) in self._plain or (type(weight) not in _PLAIN and shape in self._shapes)
        if not known and shape in self._places:
            known = any(m._parameters.get(name) is weight for m, name in self._places[shape])
        return (
            known
            and isinstance(input, torch.Tensor)
            and not isinstance(input, DeferredLogits)
            and input.dim() > 1
            and input.is_floating_point()
            and torch.is_grad_enabled()
            and (input.requires_grad or weight.requires_grad)
        )

    def _deferred(self, input: torch.Tensor, weight: Any, bias: Any) -> Any:
        columns = columns_for(weight, self._columns)
        if type(weight) not in _PLAIN:
            weight = weight.view(weight.shape)  # a sparse one as a dense one that passes gradients
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        made = Projection(input, weight, bias, input.dtype, columns, chosen=self._count)
        return DeferredLogits.of(made)

    def _count(self) -> None:
        self.count += 1
