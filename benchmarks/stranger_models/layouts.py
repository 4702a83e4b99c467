"""Tensors of every kind: views of one storage, 16 bits beside FP32, FP64, overlapping windows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Layer, Made, Stranger, classify, labeled, tower
from .habits import stacked


class Scored(nn.Module):
    """A block with a product of three, and distances to a few points."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.layer, self.pairs = Layer(wide), nn.Bilinear(wide, wide, 4)
        self.points, self.back = nn.Parameter(torch.randn(32, wide)), nn.Linear(36, wide)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        near = torch.cdist(x, self.points)
        made: Tensor = self.layer(x) + self.back(torch.cat([near, self.pairs(x, x)], -1))
        return made


class Narrow(nn.Module):
    """A block in bf16 with a norm in FP32, and a frozen part in eight bits."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(wide), nn.Linear(wide, wide).bfloat16()
        self.register_buffer("codes", torch.randint(-99, 99, (wide, wide), dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        made = F.gelu(self.up(self.norm(x).bfloat16())).float()
        return x + F.linear(made, self.codes.float() / 2000)


class Grown(nn.Module):
    """A block whose table of positions grows with the longest input so far."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.layer, self.wide = Layer(wide), wide
        self.register_buffer("table", torch.zeros(0, wide), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        if len(self.table) < x.shape[-1]:
            ranks = torch.arange(x.shape[-1], device=x.device)[:, None] / self.wide
            self.register_buffer("table", ranks.expand(-1, self.wide).cos(), persistent=False)
        made: Tensor = self.layer(x + x @ self.table / self.wide)
        return made


class Averaging(nn.Module):
    """A block whose statistics are plain means over all steps."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.layer, self.norm = Layer(wide), nn.BatchNorm1d(wide, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        made: Tensor = self.norm(self.layer(x))
        return made


def _flat(scale: int) -> Made:
    """All parameters are views of one tensor, as some optimizers want them."""
    model = tower(64 * scale, 5)
    whole = torch.cat([p.detach().flatten() for p in model.parameters()])
    start = 0
    for p in model.parameters():
        p.data = whole[start : start + p.numel()].view_as(p)
        start += p.numel()
    return model, labeled(scale), classify


def _picked(scale: int) -> Made:
    """A loss of the elements that a mask in the batch picks."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        made, there = model(batch["x"]), batch["there"]
        return F.smooth_l1_loss(made[there], batch["x"][there])

    x = torch.randn(128 * scale, 48)
    return tower(64 * scale, 48), {"x": x, "there": x.abs() > 0.3}, loss


def _spectral(scale: int) -> Made:
    """Sounds compared at two resolutions of time."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        made, total = model(x), x.new_zeros(())
        for size in (16, 32):
            window = torch.hann_window(size, device=x.device)
            one, two = (torch.stft(t, size, size // 4, window=window, return_complex=True).abs()
                        for t in (made, x))  # fmt: skip
            total = total + (one - two).abs().mean() + (one - two).square().mean()
        return total

    return tower(64 * scale, 48), torch.randn(128 * scale, 48), loss


def _windows(scale: int) -> Made:
    """Examples are windows of one series, which overlap in memory."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x[:-1])[:, 0] - x[1:, -1]).square().mean()

    return tower(64 * scale, 1), torch.randn(48 + 256 * scale).unfold(0, 48, 1), loss


def _twice(scale: int) -> Made:
    """Two passes with dropout, which shall agree."""
    wide = 64 * scale
    blocks = (nn.Sequential(Layer(wide), nn.Dropout(0.2)) for _ in range(3))
    model = nn.Sequential(nn.Linear(48, wide), *blocks, nn.Linear(wide, 5))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        one, two = model(batch[0]), model(batch[0])
        agree = F.kl_div(one.log_softmax(-1), two.softmax(-1), reduction="batchmean")
        return F.cross_entropy(one, batch[1]) + agree

    return model, labeled(scale), loss


def _beta(scale: int) -> Made:
    """Latents from a beta distribution."""
    model = nn.ModuleDict({"into": tower(64 * scale, 16), "out": nn.Linear(8, 48)})

    def loss(model: Any, x: Tensor) -> Tensor:
        one, two = (F.softplus(t) + 1 for t in model["into"](x).chunk(2, -1))
        latent = torch.distributions.Beta(one, two).rsample()
        return (model["out"](latent) - x).square().mean()

    return model, torch.randn(128 * scale, 48), loss


def _toggled(scale: int) -> Made:
    """Half of the model is frozen and thawed inside the loss."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        half = model[3]
        half.requires_grad_(False)
        term = model(batch[0]).square().mean()
        half.requires_grad_(True)
        return classify(model, batch) + 0.1 * term

    return tower(64 * scale, 5), labeled(scale), loss


def _likelihood(scale: int) -> Made:
    """A Gaussian process over features, in FP64."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        made = model(batch[0])
        kernel = (-torch.cdist(made, made).square()).exp()
        lower = torch.linalg.cholesky(kernel + torch.eye(len(made), dtype=made.dtype))
        fit = torch.cholesky_solve(batch[1][:, None], lower)[:, 0] @ batch[1]
        return (fit / 2 + lower.diagonal().log().sum()) / len(made)

    x = torch.randn(128 * scale, 48, dtype=torch.float64)
    return tower(64 * scale, 4).double(), (x, x.sum(1).sin()), loss


LAYOUTS = [
    Stranger("bilinear-and-distances", "mlp", stacked(Scored, 2)),
    Stranger("bf16-with-fp32-norms", "mlp", stacked(Narrow)),
    Stranger("grown-table", "mlp", stacked(Grown)),
    Stranger("batch-norm-cumulative", "mlp", stacked(Averaging)),
    Stranger("flat-parameters", "mlp", _flat),
    Stranger("picked-by-mask", "mlp", _picked),
    Stranger("spectral-loss", "speech", _spectral),
    Stranger("overlapping-windows", "series", _windows),
    Stranger("two-passes-agree", "mlp", _twice, random=True),
    Stranger("beta-latents", "mlp", _beta, random=True),
    Stranger("frozen-inside-the-loss", "mlp", _toggled),
    Stranger("gaussian-process", "other", _likelihood),
]
