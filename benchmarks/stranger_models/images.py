"""Networks for images that people write themselves: detection, restoration, pairs of views."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Stranger, classify


def _conv(i: int, o: int, stride: int = 1, groups: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(i, o, 3, stride, 1, groups=groups, bias=False),
        nn.BatchNorm2d(o),
        nn.ReLU(inplace=True),
    )


def _pictures(scale: int, rows: int = 8, side: int = 32) -> tuple[Tensor, Tensor]:
    return torch.randn(rows * scale, 3, side, side), torch.arange(rows * scale) % 5


class Pyramid(nn.Module):
    """Scores and boxes for the anchors of three sizes of cells."""

    def __init__(self, wide: int = 24) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, wide, 3, 2, 1), nn.GroupNorm(4, wide), nn.ReLU())
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(wide, wide, 3, 2, 1), nn.GroupNorm(4, wide), nn.ReLU())
            for _ in range(3)
        )
        self.side = nn.ModuleList(nn.Conv2d(wide, wide, 1) for _ in range(3))
        self.scores, self.boxes = nn.Conv2d(wide, 2 * 4, 3, 1, 1), nn.Conv2d(wide, 2 * 4, 3, 1, 1)

    def forward(self, pictures: list[Tensor]) -> tuple[Tensor, Tensor]:
        """For every anchor."""
        x, seen = self.stem(torch.stack(pictures)), []
        for block in self.down:
            x = block(x)
            seen.append(x)
        above, scores, boxes = None, [], []
        for x, side in zip(reversed(seen), reversed(self.side), strict=True):
            x = side(x)
            if above is not None:
                x = x + F.interpolate(above, size=x.shape[-2:], mode="nearest")
            above = x
            scores.append(self.scores(x).permute(0, 2, 3, 1).reshape(len(x), -1, 4))
            boxes.append(self.boxes(x).permute(0, 2, 3, 1).reshape(len(x), -1, 4))
        return torch.cat(scores, 1), torch.cat(boxes, 1)


def _overlap(one: Tensor, two: Tensor) -> Tensor:
    low = torch.maximum(one[:, None, :2], two[None, :, :2])
    high = torch.minimum(one[:, None, 2:], two[None, :, 2:])
    both = (high - low).clamp(min=0).prod(-1)
    area = [(b[:, 2:] - b[:, :2]).prod(-1) for b in (one, two)]
    return both / (area[0][:, None] + area[1][None] - both)


def _anchors_of(side: int) -> Tensor:
    """Corners of two anchors for every cell, as `Pyramid` lists them."""
    found = []
    for cells in (side // 16, side // 8, side // 4):
        at = (torch.arange(cells) + 0.5) / cells
        y, x = torch.meshgrid(at, at, indexing="ij")
        center = torch.stack([x, y], -1).reshape(-1, 1, 2).expand(-1, 2, 2)
        half = torch.tensor([[0.5, 0.5], [0.9, 0.6]]) / cells
        found.append(torch.cat([center - half, center + half], -1).reshape(-1, 4))
    return torch.cat(found)


def _anchored(scale: int) -> Made:
    anchors = _anchors_of(64)
    generator = torch.Generator().manual_seed(1)
    targets = []
    for row in range(8 * scale):
        low = torch.rand(1 + row % 4, 2, generator=generator) * 0.6
        size = 0.1 + torch.rand(len(low), 2, generator=generator) * 0.3
        targets.append(
            {"boxes": torch.cat([low, low + size], 1), "labels": torch.arange(len(low)) % 4}
        )
    pictures = [torch.randn(3, 64, 64) for _ in targets]

    def loss(model: nn.Module, batch: tuple[list[Tensor], list[dict[str, Tensor]]]) -> Tensor:
        scores, boxes = model(batch[0])
        lost = []
        for score, box, target in zip(scores, boxes, batch[1], strict=True):
            best, which = _overlap(anchors, target["boxes"]).max(1)
            near = best > 0.2
            aim = torch.zeros_like(score)
            aim[near, target["labels"][which[near]]] = 1
            each = F.binary_cross_entropy_with_logits(score, aim, reduction="none")
            focal = ((score.sigmoid() - aim).abs() ** 2 * each).sum() / max(1, int(near.sum()))
            off = target["boxes"][which[near]] - anchors[near]
            lost.append(focal + F.l1_loss(box[near], off, reduction="sum") / max(1, len(off)))
        return torch.stack(lost).mean()

    return Pyramid(), (pictures, targets), loss


class Nested(nn.Module):
    """A U-Net whose skips have layers of their own."""

    def __init__(self, wide: int = 8) -> None:
        super().__init__()
        sizes = [wide, 2 * wide, 4 * wide]
        self.cells = nn.ModuleDict()
        for depth, size in enumerate(sizes):
            self.cells[f"{depth}_0"] = _conv(3 if depth == 0 else sizes[depth - 1], size)
        for column in (1, 2):
            for depth in range(3 - column):
                enter = column * sizes[depth] + sizes[depth + 1]
                self.cells[f"{depth}_{column}"] = _conv(enter, sizes[depth])
        self.leave = nn.Conv2d(wide, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """A mask."""
        made: dict[tuple[int, int], Tensor] = {}
        for depth in range(3):
            made[depth, 0] = self.cells[f"{depth}_0"](x)
            x = F.max_pool2d(made[depth, 0], 2)
        for column in (1, 2):
            for depth in range(3 - column):
                below = made[depth + 1, column - 1]
                up = F.interpolate(below, scale_factor=2, mode="bilinear", align_corners=True)
                row = [made[depth, c] for c in range(column)]
                made[depth, column] = self.cells[f"{depth}_{column}"](torch.cat([*row, up], 1))
        return self.leave(made[0, 2])


def _nested(scale: int) -> Made:
    rows = 8 * scale

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        made = model(batch[0])
        share = made.sigmoid()
        both, all_ = (share * batch[1]).sum((1, 2, 3)), (share + batch[1]).sum((1, 2, 3))
        dice = (1 - (2 * both + 1) / (all_ + 1)).mean()
        return F.binary_cross_entropy_with_logits(made, batch[1]) + dice

    masks = (torch.rand(rows, 1, 32, 32) < 0.3).float()
    return Nested(), (_pictures(scale)[0], masks), loss


class Bent(nn.Module):
    """A convolution that looks where its own offsets say."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.offsets, self.mix = nn.Conv2d(wide, 2 * 4, 3, 1, 1), nn.Conv2d(4 * wide, wide, 1)
        self.norm = nn.GroupNorm(4, wide)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        rows, _, high, wide = x.shape
        lines = torch.linspace(-1, 1, high, device=x.device), torch.linspace(-1, 1, wide)
        grid = torch.stack(torch.meshgrid(*lines, indexing="ij")[::-1], -1)
        moved = self.offsets(x).view(rows, 4, 2, high, wide).permute(1, 0, 3, 4, 2) * 0.1
        seen = [
            F.grid_sample(x, grid + m, padding_mode="border", align_corners=True) for m in moved
        ]
        return x + F.relu(self.norm(self.mix(torch.cat(seen, 1))))


def _bent(scale: int) -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        *(Bent(16) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    return model, _pictures(scale), classify


class Window(nn.Module):
    """Attention within windows that every second block moves by half of one."""

    def __init__(self, wide: int, shift: int, side: int = 16, window: int = 4) -> None:
        super().__init__()
        self.shift, self.window, self.heads = shift, window, 4
        self.norm, self.qkv, self.leave = (
            nn.LayerNorm(wide),
            nn.Linear(wide, 3 * wide),
            nn.Linear(wide, wide),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(wide), nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide)
        )
        self.bias = nn.Parameter(torch.zeros((2 * window - 1) ** 2, self.heads))
        at = torch.stack(torch.meshgrid(*[torch.arange(window)] * 2, indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None]) + window - 1
        self.register_buffer("index", apart[0] * (2 * window - 1) + apart[1])
        part = torch.zeros(1, side, side, 1)
        for number, cut in enumerate((slice(0, -window), slice(-window, -2), slice(-2, None))):
            part[:, cut, cut] = number
        parts = self._cut(part)[..., 0]
        mask = (parts[:, :, None] != parts[:, None]).float() * -100
        self.register_buffer("mask", mask if shift else None)

    def _cut(self, x: Tensor) -> Tensor:
        rows, high, wide, depth = x.shape
        w = self.window
        x = x.view(rows, high // w, w, wide // w, w, depth).transpose(2, 3)
        return x.reshape(-1, w * w, depth)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        rows, side, _, wide = x.shape
        h = self.norm(x)
        if self.shift:
            h = h.roll((-self.shift, -self.shift), (1, 2))
        h = self._cut(h)
        q, k, v = self.qkv(h).view(len(h), -1, 3, self.heads, wide // 4).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (wide // 4) ** -0.5
        scores = scores + self.bias[self.index.view(-1)].view(*self.index.shape, -1).permute(
            2, 0, 1
        )
        if self.mask is not None:
            each = len(self.mask)
            scores = (scores.view(-1, each, *scores.shape[1:]) + self.mask[:, None]).view_as(scores)
        h = self.leave((scores.softmax(-1) @ v).transpose(1, 2).reshape(len(h), -1, wide))
        w, n = self.window, side // self.window
        h = h.view(rows, n, n, w, w, wide).transpose(2, 3).reshape(rows, side, side, wide)
        if self.shift:
            h = h.roll((self.shift, self.shift), (1, 2))
        x = x + h
        return x + self.mlp(x)


class Windows(nn.Module):
    """Blocks of windows."""

    def __init__(self, wide: int = 32) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, wide, 2, 2), nn.Linear(wide, 5)
        self.blocks = nn.ModuleList(Window(wide, 2 * (n % 2)) for n in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Classes."""
        x = self.enter(x).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x)
        return self.leave(x.mean((1, 2)))


class Squeezed(nn.Module):
    """An inverted bottleneck with a gate for each channel, left out at random."""

    def __init__(self, wide: int, drop: float) -> None:
        super().__init__()
        inner = 4 * wide
        self.body = nn.Sequential(
            nn.Conv2d(wide, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.SiLU(inplace=True),
            nn.Conv2d(inner, inner, 5, 1, 2, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.Hardswish(inplace=True),
        )
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(inner, wide, 1),
            nn.ReLU(),
            nn.Conv2d(wide, inner, 1),
            nn.Hardsigmoid(),
        )
        self.leave = nn.Sequential(nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide))
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        h = self.body(x)
        h = self.leave(h * self.gate(h))
        if self.training and self.drop:
            kept = torch.rand(len(x), 1, 1, 1, device=x.device) >= self.drop
            h = h.div(1 - self.drop) * kept
        h += x
        return h


def _squeezed(drop: float) -> Any:
    def build(scale: int) -> Made:
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1),
            *(Squeezed(8, drop) for _ in range(4)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 5),
        )
        return model, _pictures(scale, 16), classify

    return build


class Standardized(nn.Conv2d):
    """Its filters have mean 0 and variance 1, times a gain."""

    def __init__(self, *sizes: int, **more: int) -> None:
        super().__init__(*sizes, **more)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """As `Conv2d`."""
        var, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        fan = self.weight[0].numel()
        weight = (self.weight - mean) * torch.rsqrt(var * fan + 1e-4) * self.gain
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, 1, self.groups)


class Unnormalized(nn.Module):
    """A residual block with weight standardization and no normalization of activations."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.one, self.two = (
            Standardized(wide, wide, 3, padding=1),
            Standardized(wide, wide, 3, padding=1, groups=4),
        )
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        h = F.gelu(self.two(F.gelu(self.one(F.gelu(x) * 1.7)) * 1.7))
        return x + (self.gain + 0.2) * h


def _unnormalized(scale: int) -> Made:
    model = nn.Sequential(
        Standardized(3, 16, 3, padding=1),
        *(Unnormalized(16) for _ in range(4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    return model, _pictures(scale), classify


def _grouped(scale: int) -> Made:
    class Grouped(nn.Module):
        """A bottleneck with eight groups."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                _conv(32, 32, groups=8), nn.Conv2d(32, 32, 1, bias=False), nn.BatchNorm2d(32)
            )

        def forward(self, x: Tensor) -> Tensor:
            """The same shape."""
            return F.relu_(self.body(x) + x)

    model = nn.Sequential(
        _conv(3, 32, 2),
        nn.MaxPool2d(3, 2, 1),
        *(Grouped() for _ in range(4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 5),
    )
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    batch = _pictures(scale, 16)
    return model.to(memory_format=torch.channels_last), batch, lambda m, b: smooth(m(b[0]), b[1])


def _video(scale: int) -> Made:
    def block(i: int, o: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv3d(i, o, (1, 3, 3), padding=(0, 1, 1), bias=False),
            nn.BatchNorm3d(o),
            nn.ReLU(),
            nn.Conv3d(o, o, (3, 1, 1), padding=(1, 0, 0), bias=False),
            nn.BatchNorm3d(o),
            nn.ReLU(),
        )

    model = nn.Sequential(
        block(3, 8),
        nn.MaxPool3d((1, 2, 2)),
        block(8, 16),
        block(16, 16),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(16, 5),
    )
    rows = 4 * scale
    return model, (torch.randn(rows, 3, 6, 24, 24), torch.arange(rows) % 5), classify


class Larger(nn.Module):
    """Residual blocks, then pixels from channels."""

    def __init__(self, wide: int = 24) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, wide, 3, 1, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(wide, wide, 3, 1, 1), nn.PReLU(wide), nn.Conv2d(wide, wide, 3, 1, 1)
            )
            for _ in range(4)
        )
        self.leave = nn.Sequential(nn.Conv2d(wide, 12, 3, 1, 1), nn.PixelShuffle(2))

    def forward(self, x: Tensor) -> Tensor:
        """Twice as large."""
        h = first = self.enter(x)
        for block in self.blocks:
            h = h + 0.1 * block(h)
        return self.leave(h + first) + F.interpolate(x, scale_factor=2, mode="bicubic")


def _larger(scale: int) -> Made:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return ((model(batch[0]) - batch[1]).square() + 1e-6).sqrt().mean()

    return Larger(), (_pictures(scale)[0], torch.randn(8 * scale, 3, 64, 64)), loss


class Capsules(nn.Module):
    """Vectors that agree on whom they are part of."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 32, 5, 2), nn.Conv2d(32, 32, 5, 2)
        self.turn = nn.Parameter(torch.randn(1, 100, 5, 12, 8) * 0.1)

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        """No longer than 1."""
        square = x.square().sum(-1, keepdim=True)
        return square / (1 + square) * x / (square + 1e-8).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        """Lengths."""
        x = self.two(F.relu(self.one(x)))
        parts = self.squash(x.view(len(x), -1, 8))
        votes = (self.turn @ parts[:, :, None, :, None]).squeeze(-1)
        fixed, logits = votes.detach(), torch.zeros(*votes.shape[:3], 1)
        for _ in range(2):
            whole = self.squash((logits.softmax(2) * fixed).sum(1, keepdim=True))
            logits = logits + (fixed * whole).sum(-1, keepdim=True)
        return self.squash((logits.softmax(2) * votes).sum(1)).norm(dim=-1)


def _capsules(scale: int) -> Made:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        length, there = model(batch[0]), F.one_hot(batch[1], 5)
        low, high = F.relu(0.9 - length).square(), F.relu(length - 0.1).square()
        return (there * low + 0.5 * (1 - there) * high).sum(1).mean()

    return Capsules(), _pictures(scale, 16), loss


class Student(nn.Module):
    """A student beside its slow teacher, and the center of what that says (DINO)."""

    def __init__(self, wide: int = 12) -> None:
        super().__init__()
        self.student = nn.Sequential(
            _conv(3, wide, 2),
            _conv(wide, wide),
            _conv(wide, wide),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(wide, 16),
        )
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(16))

    @torch.no_grad()
    def follow(self) -> None:
        """The teacher comes a little nearer."""
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.data.mul_(0.99).add_(fast.data, alpha=0.01)

    def forward(self, views: list[Tensor]) -> Tensor:
        """How far the student is from the teacher, on other views."""
        self.follow()
        with torch.no_grad():
            aims = [self.teacher(view) for view in views[:2]]
            self.center = self.center * 0.9 + torch.cat(aims).mean(0) * 0.1
            soft = [((a - self.center) / 0.04).softmax(-1) for a in aims]
        lost = []
        for number, view in enumerate(views):
            made = (self.student(view) / 0.1).log_softmax(-1)
            lost += [-(s * made).sum(-1).mean() for n, s in enumerate(soft) if n != number]
        return torch.stack(lost).mean()


def _student(scale: int) -> Made:
    rows = 8 * scale
    views = [torch.randn(rows, 3, s, s) for s in (32, 32, 16, 16)]
    return Student(), views, lambda m, b: m(b)


def _siamese(scale: int) -> Made:
    class Siamese(nn.Module):
        """Two views; neither draws the other's target."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                _conv(3, 16, 2),
                _conv(16, 16),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(16, 16),
                nn.BatchNorm1d(16),
            )
            self.guess = nn.Sequential(
                nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 16)
            )

        def forward(self, *, left: Tensor, right: Tensor) -> dict[str, Tensor]:
            """A loss, and how much the outputs vary."""
            one, two = self.body(left), self.body(right)
            lost = [
                -F.cosine_similarity(self.guess(a), b.detach()).mean() / 2
                for a, b in ((one, two), (two, one))
            ]
            return {"loss": lost[0] + lost[1], "spread": one.detach().std(0).mean()}

    x = _pictures(scale)[0]
    batch = {"left": x, "right": x + 0.3 * torch.randn_like(x)}
    return Siamese(), batch, lambda m, b: m(**b)["loss"]


def _perceptual(scale: int) -> Made:
    eye = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU()
    )
    eye.requires_grad_(False).eval()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        made, lost = model(batch[0]), torch.zeros(())
        seen, aim = made, batch[1]
        for layer in eye:
            seen, aim = layer(seen), layer(aim)
            if isinstance(layer, nn.ReLU):
                gram = [torch.einsum("bchw,bdhw->bcd", x, x) / x[0].numel() for x in (seen, aim)]
                lost = lost + F.mse_loss(seen, aim) + F.mse_loss(*gram)
        return lost + F.l1_loss(made, batch[1])

    return Larger(12), (_pictures(scale)[0], torch.randn(8 * scale, 3, 64, 64)), loss


def _critic(scale: int) -> Made:
    painter = nn.Sequential(
        nn.Linear(8, 48 * 16),
        nn.Unflatten(1, (48, 4, 4)),
        nn.ReLU(),
        nn.ConvTranspose2d(48, 12, 4, 4),
        nn.ReLU(),
        nn.BatchNorm2d(12),
        nn.ConvTranspose2d(12, 3, 2, 2),
        nn.Tanh(),
    )

    def loss(model: nn.Module, real: Tensor) -> Tensor:
        with torch.no_grad():
            fake = painter(torch.randn(len(real), 8))
        between = torch.lerp(real, fake, torch.rand(len(real), 1, 1, 1)).requires_grad_()
        slope = torch.autograd.grad(model(between).sum(), between, create_graph=True)[0]
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        return model(fake).mean() - model(real).mean() + 10 * penalty

    model = nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(32 * 64, 1),
    )
    return model, _pictures(scale)[0], loss


def _patches(scale: int) -> Made:
    class Patches(nn.Module):
        """Overlapping patches are mixed and put back."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(27, 27) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            """The same shape."""
            for layer in self.layers:
                cut = F.unfold(x, 3, padding=1, stride=2).transpose(1, 2)
                x = x + F.fold(layer(cut).tanh().transpose(1, 2), x.shape[-2:], 3, 1, 1, 2)
            return x

    x = _pictures(scale)[0]
    return Patches(), x, lambda m, x: F.huber_loss(m(x), x.flip(-1), delta=0.5)


IMAGES = (
    Stranger("anchors", "vision", _anchored),
    Stranger("nested-unet", "vision", _nested),
    Stranger("bent-convolution", "vision", _bent),
    Stranger("windows-by-hand", "vision", lambda s: (Windows(), _pictures(s), classify)),
    Stranger("squeezed", "vision", _squeezed(0.0), "sgd"),
    Stranger("squeezed-drop-path", "vision", _squeezed(0.2), "sgd", random=True),
    Stranger("no-normalization", "vision", _unnormalized),
    Stranger("groups-channels-last", "vision", _grouped, "sgd"),
    Stranger("video-dropout", "vision", _video, random=True),
    Stranger("larger-image", "vision", _larger),
    Stranger("capsules", "vision", _capsules),
    Stranger("student-teacher", "contrastive", _student),
    Stranger("siamese-views", "contrastive", _siamese),
    Stranger("perceptual", "vision", _perceptual),
    Stranger("critic-penalty", "gan", _critic, random=True),
    Stranger("patches-folded", "vision", _patches),
)
