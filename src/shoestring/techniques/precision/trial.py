"""Whether a step runs in 16 bits: it is tried, on a copy and on real values.

Fake tensors know shapes and types, and not which kernels there are: torch.cdist has none in 16 bits
on the CPU. A plan with it would fail in its first step. Nor do they know what overflows: the CPU
keeps a normalization's 1 / deviation in FP16 there, which is infinite for a row of zeros and an
epsilon of 1e-12. No loss scale helps, and every update would be skipped. The same holds for a loss
that is summed in FP16 over more elements than 65,504 has room for: a few examples do not show it,
so a forward pass over the whole batch follows, which saves nothing for backward.

Nor do they know how far rounding goes: where BatchNorm multiplies it from layer to layer, or a
kernel sums in 16 bits, gradients are other ones, and no certificate would call them near. So the
gradients are compared with plain ones, by the bounds of `ss.verify`, where that takes seconds.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ...memory.device import device_timeline
from ...memory.work import work_of_passes
from ...trace.batches import map_tensors, tensors_of
from ...trace.copies import copied_model
from ...trace.fakes import hooks_its_step, is_fake
from ...trace.split import cut, examples_of
from ...trace.streams import rewound_streams, stream_states
from ...trace.untouched import Untouched, hooks_of
from ..base import Setup
from ..distance import NEAR_LARGEST, NEAR_MULTIPLE, NEAR_SPREAD, RoundingNoise, distance, longer
from ..draws import observed_by
from ..emulated import BITS, EPSILON, Rounded, rounded_
from ..offers import Context
from ..splitting.bounds import InBounds
from .check import named_failures, sees_scaled
from .convert import lower_model

LARGEST = 2**31
"""Bytes of a model that is copied for this; of a larger one it is assumed."""
EXAMPLES = 4
COMPARED_FLOPS = {"cpu": 1e10, "cuda": 2e12}
"""Of the passes whose gradients are compared; those of more are assumed to be near."""
COMPARED_BYTES = 2**30
"""The same of what they take."""
Gradients = dict[str, torch.Tensor]


def runs_in(context: Context, kind: torch.dtype) -> bool:
    """False where an operation has no kernel for this type, or gradients are not near.

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
                    if not _whole_loss_is_finite(context, lowered):
                        return False
            return not context.near or _is_near(context, kind)
        except InputError:
            return False
        except Exception:  # of memory, or of something that is not about the type
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


def _is_near(context: Context, kind: torch.dtype) -> bool:
    """Whether 16 bits change gradients as little as a certificate asks for, or nobody knows."""
    batch = _affordable(context)
    if batch is None:
        return True
    loss, name = context.loss, "bf16" if kind is torch.bfloat16 else "fp16"
    own, lowered = copied_model(context.model), copied_model(context.model)
    lower_model(_setup(context, lowered), kind)
    before = stream_states()
    expected = _gradients(own, batch, loss, 1.0)
    drawn = stream_states() != before
    if not _all_finite(expected) or (drawn and context.device != "cpu"):
        return True  # kernels on a GPU draw other numbers in other types
    narrow = map_tensors(lambda t: _cast(t, kind), batch)
    for scale in SCALES if kind is torch.float16 else (1.0,):
        found = _gradients(lowered, narrow, loss, scale)
        if _all_finite(found):
            break
    else:
        return False
    for parameter in own.parameters():
        rounded_(parameter.detach(), BITS[name])

    @cache
    def emulated(seed: int | None) -> Gradients:
        with Rounded(name, seed, scale):
            return _gradients(own, batch, loss, scale)

    if RoundingNoise.between(expected, found).relative > NEAR_LARGEST:
        return False
    if longer(expected, found, emulated, EPSILON[name]):
        return False
    noise = RoundingNoise()
    for seed in (None, 0):
        noise = noise | RoundingNoise.between(expected, emulated(seed))
        if distance(expected, found, noise, NEAR_MULTIPLE, NEAR_SPREAD).within:
            return True
    return False


SCALES = (2.0**15, 2.0**10, 2.0**5, 1.0)
"""Of FP16's loss; the largest that no gradient overflows at."""


def _affordable(context: Context) -> Any:
    """As many examples as can be compared; None where those of the trial are too many."""
    if next(context.model.parameters()).device.type != context.device:
        return None
    flops = work_of_passes(context.trace).flops / COMPARED_FLOPS[context.device]
    taken = int(device_timeline(context.trace).totals.max(initial=0)) / COMPARED_BYTES
    if max(flops, taken) <= 1:
        return context.batch
    count = int((context.examples or 0) / max(flops, taken))
    return cut(context.batch, 0, count) if count >= EXAMPLES else None


def _gradients(model: nn.Module, batch: Any, loss: Any, scale: float) -> Gradients:
    """Of one pass, divided by its loss scale; afterwards random streams are as before."""
    model.zero_grad(set_to_none=True)
    with rewound_streams(), InBounds():
        value = loss(model, batch)
        (value.float() * scale if scale != 1 else value).backward()
    made = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: (g.to_dense() if g.is_sparse else g).float() / scale for n, g in made.items()}


def _all_finite(gradients: Gradients) -> bool:
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values())


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
