"""Cross-entropy of a projection, of whose logits only some columns exist at a time.

For each row (token) with logits s = h·Wᵀ + b, target t, class weights w, smoothing ε, V classes:

    loss  = (1-ε)·w_t·(lse - s_t) + ε/V·(Σw·lse - Σ_j w_j·s_j),   lse = m + log z
    ∂s_j  = A·p_j - B·[j = t] - ε/V·w_j,   A = B + ε/V·Σw,   B = (1-ε)·w_t,   p_j = exp(s_j - m) / z

with m = max_j s_j and z = Σ_j exp(s_j - m). Forward goes over the columns once and keeps the rows,
m and z, two numbers a row: exp(s_j - lse) would multiply the rounding of lse by its size, alike for
all classes of a row. Backward computes the logits of each part again: one more product. The columns
are taken in turn, not the rows: so a row of the weight's gradient is one product, rounded once, and
only the gradient of the rows is added up, in FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...trace.passes import passes

_linear = F.linear


@dataclass(frozen=True)
class LossForm:
    """Arguments of a cross-entropy beside its tensors."""

    ignored: int = -100
    smoothing: float = 0.0
    scale: float = 1.0
    """The product is multiplied by it."""
    cap: float | None = None
    """The logits are then its hyperbolic tangent times this, as Gemma's are."""
    columns: int = 8192
    """Classes whose logits exist at a time."""


def row_losses(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    form: LossForm,
) -> Tensor:
    """The loss of every row, in FP32 (FP64 for such rows); zero where the target is ignored."""
    made: Tensor = _RowLosses.apply(rows, weight, bias, target, class_weight, form)
    return made


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        form: LossForm,
    ) -> Tensor:
        wide = torch.promote_types(rows.dtype, torch.float32)
        classes = weight.shape[0]
        # A part may be minus infinity as a whole: a vocabulary padded with such biases.
        largest = rows.new_full((rows.shape[0],), torch.finfo(wide).min, dtype=wide)
        total, true = torch.zeros_like(largest), torch.zeros_like(largest)
        smoothed = torch.zeros_like(largest) if form.smoothing else None
        for part in passes(_parts(classes, form.columns)):
            scores = _scores(rows, weight, bias, part, wide, form)
            place, inside = _within(target, part)
            true += scores.gather(1, place[:, None]).squeeze(1).masked_fill_(~inside, 0.0)
            if smoothed is not None:
                smoothed += (
                    scores.sum(1) if class_weight is None else scores @ class_weight[part].to(wide)
                )
            top = torch.maximum(largest, scores.amax(1))
            total = total.mul_(largest.sub_(top).exp_())
            total += scores.sub_(top[:, None]).exp_().sum(1)
            del scores
            largest = top
        true_factor, all_factor = _factors(target, class_weight, classes, form, largest)
        each = all_factor * (largest + total.log()) - true_factor * true
        if smoothed is not None:
            each -= form.smoothing / classes * smoothed
        kept = target != form.ignored
        # Where PyTorch asserts: a class that is not there must not look like a loss.
        there = (target >= 0) & (target < classes)
        each = torch.where(kept, torch.where(there, each, torch.nan), 0.0)
        ctx.save_for_backward(rows, weight, bias, target, class_weight, largest, total)
        ctx.form = form
        return each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, weight, bias, target, class_weight, largest, total = ctx.saved_tensors
        form: LossForm = ctx.form
        classes, wide = weight.shape[0], largest.dtype
        for_rows, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_rows = rows.new_zeros(rows.shape, dtype=wide) if for_rows else None
        grad_weight = torch.empty_like(weight) if for_weight else None
        grad_bias = torch.empty_like(bias) if for_bias else None
        true_factor, all_factor = _factors(target, class_weight, classes, form, largest)
        outer = torch.where(target != form.ignored, grad, 0.0)
        true_factor, all_factor = outer * true_factor, outer * all_factor / total
        for part in passes(_parts(classes, form.columns)):
            scores = _scores(rows, weight, bias, part, wide, form)
            slope = None
            if form.cap is not None:
                slope = (scores / form.cap).square_().neg_().add_(1).mul_(form.cap)
            scores.sub_(largest[:, None]).exp_().mul_(all_factor[:, None])
            if form.smoothing:
                even = outer * (form.smoothing / classes)
                if class_weight is None:
                    scores.sub_(even[:, None])
                else:
                    scores.addr_(even, class_weight[part].to(wide), alpha=-1)
            place, inside = _within(target, part)
            scores.scatter_add_(1, place[:, None], (-true_factor * inside)[:, None])
            if slope is not None:
                scores.mul_(slope)
                del slope
            if form.scale != 1:
                scores.mul_(form.scale)
            if grad_bias is not None:
                grad_bias[part] = scores.sum(0)
            made = scores.to(rows.dtype)
            del scores
            if grad_weight is not None and weight.dtype == rows.dtype:
                torch.mm(made.t(), rows, out=grad_weight[part])
            elif grad_weight is not None:
                grad_weight[part] = made.t() @ rows
            if grad_rows is not None and wide == rows.dtype:
                torch.addmm(grad_rows, made, weight[part], out=grad_rows)
            elif grad_rows is not None:
                grad_rows += made @ weight[part].to(rows.dtype)
            del made
        given = None if grad_rows is None else grad_rows.to(rows.dtype)
        return given, grad_weight, grad_bias, None, None, None


def _scores(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    part: slice,
    wide: torch.dtype,
    form: LossForm,
) -> Tensor:
    """Logits of some classes, rounded as the whole ones would be."""
    own = None if bias is None else bias[part].to(rows.dtype)
    scores = _linear(rows, weight[part].to(rows.dtype), own).to(wide)
    if form.scale != 1:
        scores.mul_(form.scale)
    return scores if form.cap is None else scores.tanh_().mul_(form.cap)


def _factors(
    target: Tensor, class_weight: Tensor | None, classes: int, form: LossForm, like: Tensor
) -> tuple[Tensor | float, Tensor | float]:
    """B and A of every row."""
    if class_weight is None:
        return 1 - form.smoothing, 1.0
    wide = class_weight.to(like.dtype)
    true = (1 - form.smoothing) * wide[target.clamp(0, classes - 1)]
    return true, true + form.smoothing / classes * wide.sum()


def _parts(classes: int, columns: int) -> Sequence[slice]:
    """Of about the same size, none larger than `columns`."""
    count = max(-(-classes // columns), 1)
    size = max(-(-classes // count), 1)
    return [slice(start, min(start + size, classes)) for start in range(0, classes, size)]


def _within(target: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Where each target is in the part, and whether it is there at all."""
    place = target - part.start
    inside = (place >= 0) & (place < part.stop - part.start)
    return place.masked_fill(~inside, 0), inside
