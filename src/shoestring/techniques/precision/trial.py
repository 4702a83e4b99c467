"""Whether a step runs in 16 bits: it is tried, on a copy and on real values.

Fake tensors know shapes and types, and not which kernels there are: torch.cdist has none in 16 bits
on the CPU. A plan with it would fail in its first step. Nor do they know what overflows: the CPU
keeps a normalization's 1 / deviation in FP16 there, which is infinite for a row of zeros and an
epsilon of 1e-12. No loss scale helps, and every update would be skipped. The same holds for a loss
that is summed in FP16 over more elements than 65,504 has room for: a few examples do not show it,
so a forward pass over the whole batch follows, which saves nothing for backward.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ...trace.attributes import copied_model
from ...trace.batches import map_tensors, tensors_of
from ...trace.fakes import hooks_its_step, is_fake
from ...trace.split import cut, examples_of
from ...trace.streams import rewound_streams
from ...trace.untouched import Untouched, hooks_of
from ..base import Setup
from ..draws import observed_by
from ..offers import Context
from ..splitting.bounds import InBounds
from .check import named_failures, sees_scaled
from .convert import lower_model

LARGEST = 2**31
"""Bytes of a model that is copied for this; of a larger one it is assumed."""
EXAMPLES = 4


def runs_in(context: Context, kind: torch.dtype) -> bool:
    """False where an operation has no kernel for this type, or FP16 gradients are not finite.

    True where that cannot be tried.
    """
    model, loss = context.model, context.loss
    if kind is torch.float16 and (sees_scaled(model) or hooks_its_step(context.optimizer)):
        return False
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(context.batch)]
    real = not any(is_fake(t) or t.is_meta for t in tensors)
    if loss is None or not real or sum(p.nbytes for p in model.parameters()) > LARGEST:
        return True
    untouched = Untouched([loss, *hooks_of(model)])
    with warnings.catch_warnings(), rewound_streams(), untouched, observed_by(None):
        warnings.simplefilter("ignore")
        try:
            lowered = copied_model(model)
            lower_model(_setup(context, lowered), kind)
            few = map_tensors(lambda t: _cast(t, kind), _few(context.batch))
            half = kind is torch.float16
            with torch.set_grad_enabled(half), InBounds(), named_failures(kind):
                value = loss(lowered, few)
                if half:
                    value.backward()
                    if not _is_finite(lowered):
                        return not _is_finite_in_its_own(context)
                    return _whole_loss_is_finite(context, lowered)
        except InputError:
            return False
        except Exception:  # of memory, or of something that is not about the type
            return True
    return True


def _setup(context: Context, model: Any) -> Setup:
    return Setup(model, context.optimizer, lambda b: b, lambda b: (), lambda v: None, lambda: None)


def _cast(tensor: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return tensor.to(kind) if tensor.is_floating_point() else tensor


def _few(batch: Any) -> Any:
    try:
        examples = examples_of(batch)
    except InputError:
        return batch
    return batch if examples is None else cut(batch, 0, EXAMPLES)


def _is_finite(model: nn.Module) -> bool:
    """All gradients."""
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def _whole_loss_is_finite(context: Context, lowered: nn.Module) -> bool:
    """The FP16 loss over the whole batch, if the CPU computes it: CUDA sums losses in FP32."""
    assert context.loss is not None
    if next(lowered.parameters()).device.type != "cpu":
        return True
    whole = map_tensors(lambda t: _cast(t, torch.float16), context.batch)
    with torch.no_grad():
        if bool(torch.isfinite(context.loss(lowered, whole)).all()):
            return True
        own = copied_model(context.model)
        return not bool(torch.isfinite(context.loss(own, context.batch)).all())


def _is_finite_in_its_own(context: Context) -> bool:
    """The same gradients in the model's type; what is not finite there says nothing about FP16."""
    assert context.loss is not None
    own = copied_model(context.model)
    context.loss(own, _few(context.batch)).backward()
    return _is_finite(own)
