"""Clip gradients between the last backward pass and the update.

Without a loss scale this is PyTorch's own `clip_grad_norm_` and `clip_grad_value_`, to the bit.
Where the loss is scaled, gradients are too: the norm is that of the unscaled ones, found in FP32,
and a gradient that overflowed stays one, so that the update is still skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from ..errors import InputError

Combine = Callable[[torch.Tensor, float], torch.Tensor]
"""Norm of a rank's own gradients and the kind of norm → the norm of all ranks' gradients."""


@dataclass(frozen=True)
class Clip:
    """How gradients are clipped: to a total norm, or every element to a value.

    Args:
        norm: Largest total norm; `float("inf")` clips nothing and finds the norm.
        value: Largest absolute value of an element.
        norm_type: p of the p-norm.

    Examples:
        >>> step = ss.apply(plan, model, optimizer, loss=loss, clip=ss.Clip(norm=1.0))
    """

    norm: float | None = None
    value: float | None = None
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        if (self.norm is None) == (self.value is None):
            raise InputError(
                "gradients are clipped by norm or by value", hint="Clip(norm=1.0) or Clip(value=1)"
            )
        for name, held in (("norm", self.norm), ("value", self.value)):
            if held is not None and (not isinstance(held, Real) or not float(held) > 0):
                raise InputError(f"cannot clip to a {name} of {held!r}", hint="a number above 0")
        if not self.norm_type > 0:
            raise InputError(f"no norm of type {self.norm_type!r}", hint="2.0, 1.0 or inf")

    @classmethod
    def of(cls, given: float | Clip | None) -> Clip | None:
        """A number is a norm.

        Args:
            given: A number, a `Clip`, or None.

        Returns:
            A `Clip`, None for None.
        """
        if given is None or isinstance(given, Clip):
            return given
        return cls(norm=given)


@torch.no_grad()
def clip_gradients(
    clip: Clip,
    parameters: Iterable[torch.Tensor],
    scale: torch.Tensor | None = None,
    combine: Combine | None = None,
    counted: Iterable[torch.Tensor] | None = None,
) -> torch.Tensor | None:
    """Clip in place; the norm before, None where values are clipped. Nothing waits for a GPU.

    Ranks that hold different gradients give `combine`, and in `counted` those that no other counts.
    """
    held = [p for p in parameters if p.grad is not None]
    if clip.value is not None and not held:  # PyTorch 2.13 cannot clip nothing by value
        return None
    ours = _gradients(held if counted is None else list(counted))
    if clip.value is not None:
        if scale is None:
            clip_grad_value_(held, clip.value)
        else:
            _clip_scaled_values(_gradients(held), clip.value * scale)
        return None
    assert clip.norm is not None
    if scale is None and combine is None:
        return clip_grad_norm_(held, clip.norm, clip.norm_type)
    if scale is None:
        assert combine is not None
        total = combine(get_total_norm(ours, clip.norm_type), clip.norm_type)
        clip_grads_with_norm_(held, clip.norm, total)
        return total
    scaled = _wide_norm(ours, clip.norm_type, scale.device)
    if combine is not None:
        scaled = combine(scaled, clip.norm_type)
    total = scaled / scale
    # A norm that is not finite leaves gradients that are not: the update looks for them.
    share = torch.clamp(clip.norm / (total + 1e-6), max=1.0)
    if math.isfinite(clip.norm):
        for gradient in _gradients(held):
            gradient.mul_(share.to(gradient.device))
    return total


def _gradients(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _wide_norm(gradients: list[torch.Tensor], kind: float, device: torch.device) -> torch.Tensor:
    """In FP32: squares of FP16 numbers pass 65,504 early."""
    if not gradients:
        return torch.zeros((), device=device)
    each = [torch.linalg.vector_norm(g, kind, dtype=torch.float32).to(device) for g in gradients]
    return torch.linalg.vector_norm(torch.stack(each), kind)


def _clip_scaled_values(gradients: list[torch.Tensor], bound: torch.Tensor) -> None:
    """An infinity would be clipped like any number, so an overflow is written back as NaN."""
    if not gradients:
        return
    largest = _wide_norm(gradients, math.inf, bound.device)
    for gradient in gradients:
        here = bound.to(gradient.device)
        gradient.clamp_(-here, here)
    first: Any = gradients[0].reshape(-1)[:1] if gradients[0].is_contiguous() else gradients[0]
    first.add_(torch.where(largest.isfinite(), 0.0, math.nan).to(first.device))
