"""Losses and batches that look as if they could be cut, and those that look as if not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Layer, Made, Stranger, classify, labeled, tower


def _focal(scale: int) -> Made:
    """A detector's focal loss (Lin et al., 2017): a sum, divided by the number of positives."""

    def loss(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        logits, aim = model(b[0]), b[1].to(b[0].dtype)
        lost = F.binary_cross_entropy_with_logits(logits, aim, reduction="none")
        sure = torch.where(b[1] > 0, logits.sigmoid(), 1 - logits.sigmoid())
        return ((1 - sure) ** 2 * lost).sum() / aim.sum().clamp(min=1)

    rows = 128 * scale
    return tower(32 * scale, 9), (torch.randn(rows, 48), (torch.rand(rows, 9) < 0.2).long()), loss


def _mined(scale: int) -> Made:
    """The hardest positive and negative of the batch (Hermans et al., 2017)."""

    def loss(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        made = model(b[0])
        apart = (made[:, None] - made[None]).square().sum(-1)
        same = b[1][:, None] == b[1][None]
        far = (apart * same).amax(1)
        near = (apart + 1e9 * same).amin(1)
        return F.relu(far - near + 1.0).mean()

    return tower(32 * scale, 16), labeled(scale), loss


def _ctc(scale: int) -> Made:
    """Lengths of inputs and targets beside them."""

    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        scores = model(b["x"]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, b["y"], b["long"], b["wide"], zero_infinity=True)

    rows = 32 * scale
    batch = {
        "x": torch.randn(rows, 20, 48), "y": torch.randint(1, 12, (rows, 6)),
        "long": 14 + torch.arange(rows) % 7, "wide": 2 + torch.arange(rows) % 5,
    }  # fmt: skip
    return tower(32 * scale, 12), batch, loss


class Packed(nn.Module):
    """Sequences one after the other in one row; attention stays within each."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.words = nn.Embedding(99, wide)
        self.mix = nn.ModuleList(nn.Linear(wide, 3 * wide) for _ in range(3))
        self.leave = nn.Linear(wide, 99)

    def forward(self, tokens: Tensor, ends: Tensor) -> Tensor:
        """Logits of every position."""
        place = torch.arange(len(tokens), device=tokens.device)
        owner = torch.bucketize(place, ends, right=True)
        seen = (owner[:, None] == owner[None]) & (place[:, None] >= place[None])
        x = self.words(tokens)[None]
        for mix in self.mix:
            q, k, v = mix(x).chunk(3, -1)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.leave(x[0])


def _packed(scale: int) -> Made:
    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(b["tokens"], b["ends"]), b["labels"])

    tokens = torch.randint(1, 99, (160 * scale,))
    labels = torch.roll(tokens, -1)
    ends = torch.tensor([30, 75, 110, 160]) * scale
    labels[ends - 1] = -100
    return Packed(32 * scale), {"tokens": tokens, "labels": labels, "ends": ends}, loss


@dataclass
class Sample:
    """A batch as a dataclass, with nothing in one of its places."""

    inputs: dict[str, Tensor]
    label: tuple[Tensor, None]
    extra: Tensor | None = None
    temperature: float = 2.0


def _record(scale: int) -> Made:
    def loss(model: nn.Module, b: Sample) -> Tensor:
        return F.cross_entropy(model(b.inputs["x"]) / b.temperature, b.label[0])

    x, y = labeled(scale)
    return tower(32 * scale, 5), Sample({"x": x}, (y, None)), loss


def _regularized(reduction: str) -> Any:
    """A penalty of the weights beside the data's loss: once a batch, not once a part."""

    def build(scale: int) -> Made:
        def loss(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
            penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum()
            return F.cross_entropy(model(b[0]), b[1], reduction=reduction) + 0.01 * penalty

        return tower(32 * scale, 5), labeled(scale), loss

    return build


class Balanced(nn.Module):
    """Keeps a moving average of its loss and divides by it."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.tower = tower(wide, 5)
        self.register_buffer("usual", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        made: Tensor = self.tower(x)
        return made


def _balanced(scale: int) -> Made:
    def loss(model: Any, b: tuple[Tensor, Tensor]) -> Tensor:
        lost = F.cross_entropy(model(b[0]), b[1])
        if model.training:
            model.usual.mul_(0.9).add_(0.1 * lost.detach())
        return lost / model.usual

    return Balanced(32 * scale), labeled(scale), loss


def _dice(scale: int) -> Made:
    """A ratio of sums over the batch."""

    def loss(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        share = model(b[0]).sigmoid()
        return 1 - 2 * (share * b[1]).sum() / (share.sum() + b[1].sum())

    rows = 128 * scale
    return tower(32 * scale, 9), (torch.randn(rows, 48), (torch.rand(rows, 9) < 0.4).float()), loss


def _advantages(scale: int) -> Made:
    """PPO's surrogate: advantages are normalized over the batch inside the loss."""

    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        scores = model(b["x"]).log_softmax(-1).gather(1, b["action"][:, None])[:, 0]
        ratio = (scores - b["before"]).exp()
        good = (b["advantage"] - b["advantage"].mean()) / (b["advantage"].std() + 1e-8)
        return -torch.minimum(ratio * good, ratio.clamp(0.8, 1.2) * good).mean()

    rows = 128 * scale
    batch = {"x": torch.randn(rows, 48), "action": torch.arange(rows) % 5,
             "before": torch.full((rows,), -1.6), "advantage": torch.randn(rows)}  # fmt: skip
    return tower(32 * scale, 5), batch, loss


def _two_means(scale: int) -> Made:
    """A mean over labeled positions and one over examples, added."""

    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        made = model(b["x"])
        tokens = F.cross_entropy(made[..., :5].flatten(0, 1), b["y"].flatten())
        return tokens + F.mse_loss(made[..., 5].mean(1), b["value"])

    rows = 64 * scale
    y = torch.randint(0, 5, (rows, 8))
    for row in range(rows):
        y[row, 1 + row % 7 :] = -100
    batch = {"x": torch.randn(rows, 8, 48), "y": y, "value": torch.randn(rows)}
    return tower(32 * scale, 6), batch, loss


def _smoothed(scale: int) -> Made:
    def loss(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        made = model(b[0]).flatten(0, 1)
        return F.cross_entropy(made, b[1].flatten(), label_smoothing=0.1, ignore_index=-1)

    rows = 64 * scale
    y = torch.randint(0, 5, (rows, 8))
    y[:, 5:] = torch.where(torch.rand(rows, 3) < 0.7, -1, y[:, 5:])
    return tower(32 * scale, 5), (torch.randn(rows, 8, 48), y), loss


def _decorrelated(scale: int) -> Made:
    """Barlow twins: a correlation over the batch."""

    def loss(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        one, two = ((m - m.mean(0)) / (m.std(0) + 1e-3) for m in map(model, b))
        apart = one.T @ two / len(one) - torch.eye(one.shape[1], device=one.device)
        return apart.square().sum()

    x = torch.randn(128 * scale, 48)
    return tower(32 * scale, 16), (x, x + 0.1 * torch.randn_like(x)), loss


class Queued(nn.Module):
    """Negatives wait in a buffer; every step adds its own (He et al., 2020)."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.tower = tower(wide, 16)
        self.register_buffer("queue", F.normalize(torch.randn(256, 16), dim=1))

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        """Logits: the other view first, then the queue."""
        keys = F.normalize(self.tower(two), dim=1).detach()
        asked = F.normalize(self.tower(one), dim=1)
        made = torch.cat([(asked * keys).sum(1, keepdim=True), asked @ self.queue.T], 1) / 0.2
        if self.training:
            self.queue = torch.cat([keys, self.queue])[: len(self.queue)]
        return made


def _queued(scale: int) -> Made:
    def loss(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        first = torch.zeros(len(b[0]), dtype=torch.long, device=b[0].device)
        return F.cross_entropy(model(*b), first)

    x = torch.randn(96 * scale, 48)
    return Queued(32 * scale), (x, x + 0.1 * torch.randn_like(x)), loss


def _hardest(scale: int) -> Made:
    """Only the hardest quarter of the batch counts."""

    def loss(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        lost = F.cross_entropy(model(b[0]), b[1], reduction="none")
        return lost.topk(len(lost) // 4).values.mean()

    return tower(32 * scale, 5), labeled(scale), loss


def _sample_weights(scale: int) -> Made:
    """A mean by weights that come with the examples."""

    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        lost = F.cross_entropy(model(b["x"]), b["y"], reduction="none")
        return (lost * b["weight"]).sum() / b["weight"].sum()

    x, y = labeled(scale)
    return tower(32 * scale, 5), {"x": x, "y": y, "weight": torch.rand(len(x)) + 0.1}, loss


def _mixed(scale: int) -> Made:
    """Mixup: examples are blended with others of the batch."""

    def loss(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        other = torch.randperm(len(b[0]))
        made = model(0.7 * b[0] + 0.3 * b[0][other])
        return 0.7 * F.cross_entropy(made, b[1]) + 0.3 * F.cross_entropy(made, b[1][other])

    return tower(32 * scale, 5), labeled(scale), loss


def _spectral(scale: int) -> Made:
    """Spectral norm moves its own vectors in every forward pass."""
    wide = 32 * scale
    made = [nn.Linear(48, wide), *(nn.Linear(wide, wide) for _ in range(3)), nn.Linear(wide, 5)]
    layers = [nn.utils.parametrizations.spectral_norm(one) for one in made]
    model = nn.Sequential(*(m for one in layers for m in (one, nn.ReLU())))
    return model, labeled(scale), classify


def _groups(scale: int) -> Made:
    wide = 8 * scale
    blocks = [nn.Sequential(nn.Conv2d(wide, wide, 3, padding=1), nn.GroupNorm(2, wide), nn.ReLU())
              for _ in range(4)]  # fmt: skip
    model = nn.Sequential(nn.Conv2d(3, wide, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1),
                          nn.Flatten(), nn.Linear(wide, 5))  # fmt: skip
    return model, (torch.randn(16 * scale, 3, 24, 24), torch.arange(16 * scale) % 5), classify


class Whitened(nn.Module):
    """Centers by the batch's own mean: a BatchNorm that is not called one."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.enter, self.block, self.leave = nn.Linear(48, wide), Layer(wide), nn.Linear(wide, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.block(self.enter(x))
        return self.leave((x - x.mean(0)) / (x.std(0) + 1e-3))


LOSSES = (
    Stranger("focal-positives", "vision", _focal),
    Stranger("mined-triplets", "contrastive", _mined),
    Stranger("ctc-lengths", "speech", _ctc),
    Stranger("packed-attention", "language", _packed),
    Stranger("record-batch", "other", _record),
    Stranger("regularized-mean", "other", _regularized("mean")),
    Stranger("regularized-sum", "other", _regularized("sum")),
    Stranger("moving-loss", "other", _balanced),
    Stranger("dice", "vision", _dice),
    Stranger("advantages", "other", _advantages),
    Stranger("two-means", "language", _two_means),
    Stranger("smoothed-ignored", "language", _smoothed),
    Stranger("decorrelated", "contrastive", _decorrelated),
    Stranger("queued-negatives", "contrastive", _queued, "sgd"),
    Stranger("hardest-quarter", "vision", _hardest),
    Stranger("sample-weights", "other", _sample_weights),
    Stranger("mixup", "vision", _mixed, random=True),
    Stranger("spectral-norm", "gan", _spectral, "sgd"),
    Stranger("group-norm", "vision", _groups, "sgd"),
    Stranger("whitened", "other", lambda s: (Whitened(32 * s), labeled(s), classify)),
)
