"""Label-smoothed cross-entropy: of scores that are there, or of scores made a part at a time.

-(1 - s) log p[target] - (s / V) sum_v log p[v] for each token (Szegedy et al., 2016, section 7),
averaged over the target tokens that are not padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

PADDING = 1
WORDS = 1024
"""Words of the vocabulary whose scores are there at once: about as much as a feed-forward layer."""


def label_smoothed_loss(
    logits: Tensor, target: Tensor, smoothing: float = 0.1, padding: int = PADDING
) -> Tensor:
    """The loss of scores (…, vocabulary); half-precision ones are normalized in FP32."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_p = F.log_softmax(logits, dim=-1, dtype=dtype)
    true = log_p.gather(-1, target[..., None]).squeeze(-1)
    each = (1.0 - smoothing) * true + smoothing * log_p.mean(-1)
    kept = target != padding
    return -each.masked_fill(~kept, 0.0).sum() / kept.sum().clamp(min=1)


def projected_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    smoothing: float = 0.1,
    padding: int = PADDING,
    words: int = WORDS,
) -> Tensor:
    """The loss of the scores `hidden @ weight.T`, of which only `words` columns exist at a time.

    Forward keeps `hidden` and one number a token, and backward recomputes the scores: one more
    matrix product. Gradients made in the forward pass would avoid it, but they come before the
    loss scale: in FP16 they would underflow, or need a copy of the weight's gradient in FP32.
    """
    if type(weight) not in (Tensor, nn.Parameter):
        weight = weight.view(weight.shape)  # a sparse weight as a dense one that passes gradients
    each = words if words > 0 else weight.shape[0]
    return _ProjectedLoss.apply(hidden, weight, target, smoothing, padding, each)


class _ProjectedLoss(torch.autograd.Function):
    """Columns, not tokens, are taken in turn: each row of the weight's gradient is one product.

    So it is rounded once, and no sum of gradients lies beside it. The gradient of the input is
    added up over the parts, in FP32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        smoothing: float,
        padding: int,
        words: int,
    ) -> Tensor:
        """log p = score - log sum exp(scores), with the sum brought together from the parts."""
        rows, wanted = hidden.flatten(0, -2), target.flatten()
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        total = rows.new_zeros(rows.shape[0], dtype=dtype)
        true, normalizer = torch.zeros_like(total), torch.full_like(total, -torch.inf)
        for part in _parts(weight.shape[0], words):
            scores = (rows @ weight[part].t()).to(dtype)
            total += scores.sum(1)
            place, inside = _within(wanted, part)
            true += scores.gather(1, place[:, None]).squeeze(1).masked_fill_(~inside, 0.0)
            top = scores.amax(1)
            sums = scores.sub_(top[:, None]).exp_().sum(1).log_().add_(top)
            normalizer = torch.logaddexp(normalizer, sums)
            del scores
        kept = wanted != padding
        count = kept.sum().clamp(min=1)
        each = (1.0 - smoothing) * true + (smoothing / weight.shape[0]) * total - normalizer
        ctx.save_for_backward(hidden, weight, target, normalizer)
        ctx.smoothing, ctx.padding, ctx.words = smoothing, padding, words
        return -each.masked_fill(~kept, 0.0).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """(p - q) times the gradient of the loss, q the smoothed target, part by part."""
        hidden, weight, target, normalizer = ctx.saved_tensors
        rows, wanted = hidden.flatten(0, -2), target.flatten()
        kept = wanted != ctx.padding
        scale = torch.where(kept, grad.to(normalizer.dtype) / kept.sum().clamp(min=1), 0.0)
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        grad_rows = rows.new_zeros(rows.shape, dtype=normalizer.dtype) if for_hidden else None
        grad_weight = torch.empty_like(weight) if for_weight else None
        for part in _parts(weight.shape[0], ctx.words):
            scores = (rows @ weight[part].t()).to(normalizer.dtype)
            scores.sub_(normalizer[:, None]).exp_().sub_(ctx.smoothing / weight.shape[0])
            place, inside = _within(wanted, part)
            scores.scatter_add_(
                1, place[:, None], (ctx.smoothing - 1.0) * inside[:, None].to(scores)
            )
            # The loss scale comes in before FP16 does.
            made = scores.mul_(scale[:, None]).to(rows.dtype)
            del scores
            if grad_weight is not None:
                torch.mm(made.t(), rows, out=grad_weight[part])
            if grad_rows is not None and grad_rows.dtype == rows.dtype:
                torch.addmm(grad_rows, made, weight[part], out=grad_rows)
            elif grad_rows is not None:
                grad_rows += made @ weight[part]
            del made
        grad_hidden = None if grad_rows is None else grad_rows.to(hidden.dtype).view_as(hidden)
        return grad_hidden, grad_weight, None, None, None, None


def _parts(vocabulary: int, words: int) -> Iterator[slice]:
    """The vocabulary in parts of about the same size, none over `words`."""
    count = -(-vocabulary // words)
    size = -(-vocabulary // count)
    return (slice(start, min(start + size, vocabulary)) for start in range(0, vocabulary, size))


def _within(target: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Where each target is in the part, and whether it is there at all."""
    place = target - part.start
    inside = (place >= 0) & (place < part.stop - part.start)
    return place.masked_fill(~inside, 0), inside
