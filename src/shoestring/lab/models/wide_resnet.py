"""The Wide Residual Network of the report's CIFAR-10 experiments.

WRN-D-W: a 3x3 convolution, three groups of n = (D - 4) / 6 pre-activation blocks with
round(16 W), round(32 W) and round(64 W) channels, then BN-ReLU, average pool and a linear layer
(report, section 4.2; architecture of Zagoruyko and Komodakis, 2016).
Its shortcuts are identities without parameters, as in the report: WRN-28-2 has 1,456,858
parameters.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...errors import InputError

Shortcut = Literal["strided", "pool"]

STEM_CHANNELS = 16
GROUP_STRIDES = (1, 2, 2)


def blocks_per_group(depth: int) -> int:
    """Number n of residual blocks in each of the three groups: depth = 6 n + 4."""
    if depth < 10 or (depth - 4) % 6:
        below = max(10, depth - (depth - 4) % 6)
        nearest = str(below) if depth < 10 else f"{below} or {below + 6}"
        raise InputError(
            f"a wide residual network cannot have depth {depth}",
            hint=f"the depth is 6 n + 4 with n of 1 or more; try {nearest}",
        )
    return (depth - 4) // 6


def group_channels(width: float) -> tuple[int, int, int]:
    """Channels of the three groups, round(16 W), round(32 W) and round(64 W)."""
    if not math.isfinite(width) or round(16 * width) < 1:
        raise InputError(
            f"a wide residual network cannot have width {width:g}",
            hint="the width multiplies 16, 32 and 64 channels; try 2, 1.5, 1, 0.75 or 0.5",
        )
    return round(16 * width), round(32 * width), round(64 * width)


def conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    """A 3x3 convolution without bias: the BN that follows it has one."""
    return nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)


class _Subsample(torch.autograd.Function):
    """Every stride-th pixel, with a gradient that lies in memory as the one it comes from.

    A slice's own gradient is contiguous, and so would be all gradients of the blocks before it: on
    CUDA every convolution there then copies its gradient to channels-last first.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, stride: int) -> Tensor:
        """A view."""
        ctx.shape, ctx.stride = x.shape, stride
        return x[:, :, ::stride, ::stride]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient, zeros between."""
        last = not grad.is_contiguous() and grad.is_contiguous(memory_format=torch.channels_last)
        form = torch.channels_last if last else torch.contiguous_format
        out = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=form)
        out.zero_()[:, :, :: ctx.stride, :: ctx.stride] = grad
        return out, None


class ResidualBlock(nn.Module):
    """A pre-activation residual block whose shortcut has no parameters.

    y = S(x) + conv(ReLU(BN(conv(ReLU(BN(x)))))), where S subsamples space by the stride and
    appends channels of zeros (report, section 4.2: "all shortcuts are identity shortcuts").
    The report does not say how S subsamples: "strided" takes every second pixel, "pool" the mean
    of 2x2 pixels. Where a block has fewer channels than its input (first block, width below 1),
    S drops the last ones.
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int = 1, shortcut: Shortcut = "strided"
    ) -> None:
        super().__init__()
        self.stride = stride
        self.shortcut_kind = shortcut
        self.extra_channels = out_channels - in_channels
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.relu1 = nn.ReLU()
        self.conv1 = conv3x3(in_channels, out_channels, stride)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu2 = nn.ReLU()
        self.conv2 = conv3x3(out_channels, out_channels)

    def shortcut(self, x: Tensor) -> Tensor:
        """S(x), the input brought to the shape of the output."""
        if self.stride != 1:
            if self.shortcut_kind == "pool":
                # ceil_mode: an odd side then shrinks as the strided convolution shrinks it.
                x = F.avg_pool2d(x, self.stride, ceil_mode=True)
            else:
                x = _Subsample.apply(x, self.stride)
        if self.extra_channels:
            x = F.pad(x, (0, 0, 0, 0, 0, self.extra_channels))
        return x

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of shape (batch, out_channels, height / stride, width / stride)."""
        y = self.conv1(self.relu1(self.bn1(x)))
        y = self.conv2(self.relu2(self.bn2(y)))
        return self.shortcut(x) + y


class WideResNet(nn.Module):
    """WRN-depth-width for images of three channels.

    Convolutions start from Kaiming's normal distribution with fan-out, BN from the identity, the
    bias of the linear layer from zero and its weight from PyTorch's default.
    """

    def __init__(
        self, depth: int, width: float, num_classes: int = 10, shortcut: Shortcut = "strided"
    ) -> None:
        super().__init__()
        blocks, channels = blocks_per_group(depth), group_channels(width)
        if shortcut not in get_args(Shortcut):
            raise InputError(
                f"unknown shortcut {shortcut!r}", hint="the shortcut is 'strided' or 'pool'"
            )
        self.conv = conv3x3(3, STEM_CHANNELS)
        inputs = (STEM_CHANNELS, *channels[:2])
        groups = [
            nn.Sequential(
                ResidualBlock(c_in, c_out, stride, shortcut),
                *(ResidualBlock(c_out, c_out, 1, shortcut) for _ in range(blocks - 1)),
            )
            for c_in, c_out, stride in zip(inputs, channels, GROUP_STRIDES, strict=True)
        ]
        self.group1, self.group2, self.group3 = groups
        self.bn = nn.BatchNorm2d(channels[2])
        self.relu = nn.ReLU()
        self.linear = nn.Linear(channels[2], num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.linear.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores of shape (batch, num_classes)."""
        x = self.group3(self.group2(self.group1(self.conv(images))))
        x = torch.mean(self.relu(self.bn(x)), dim=(2, 3))
        return self.linear(x)


def wide_resnet(
    depth: int, width: float, num_classes: int = 10, shortcut: Shortcut = "strided"
) -> WideResNet:
    """WRN-depth-width; `wide_resnet(28, 2)` is the report's base model."""
    return WideResNet(depth, width, num_classes, shortcut)
