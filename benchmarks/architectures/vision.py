"""Image and video classifiers, written plainly."""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Architecture, cross_entropy, labeled_inputs

Norm = Callable[[int], nn.Module]


class MLP(nn.Sequential):
    """Two hidden layers on flattened images."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(784, 1024),
            nn.ReLU(),
            nn.Linear(1024, 1024),
            nn.ReLU(),
            nn.Linear(1024, 10),
        )


class LeNet(nn.Sequential):
    """LeNet-5 (LeCun et al., 1998): tanh and average pooling."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 6, 5, padding=2),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.Tanh(),
            nn.Linear(120, 84),
            nn.Tanh(),
            nn.Linear(84, 10),
        )


class VGG(nn.Module):
    """VGG-11 with BatchNorm (Simonyan & Zisserman, 2015), its classifier narrowed for 64 px."""

    stages = ((64,), (128,), (256, 256), (512, 512), (512, 512))

    def __init__(self, classes: int = 100) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage in self.stages:
            for width in stage:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)]
                layers.append(nn.ReLU(inplace=True))
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 2 * 2, 512),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(512, 512),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(512, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)


class Basic(nn.Module):
    """The two-convolution residual block of ResNet-18."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _conv(inputs, width, 3, stride),
            norm(width),
            nn.ReLU(inplace=True),
            _conv(width, width, 3),
            norm(width),
        )
        self.shortcut = _shortcut(inputs, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


class Bottleneck(nn.Module):
    """The three-convolution residual block of ResNet-50."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _conv(inputs, width, 1),
            norm(width),
            nn.ReLU(inplace=True),
            _conv(width, width, 3, stride),
            norm(width),
            nn.ReLU(inplace=True),
            _conv(width, 4 * width, 1),
            norm(4 * width),
        )
        self.shortcut = _shortcut(inputs, 4 * width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def _shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(_conv(inputs, outputs, 1, stride), norm(outputs))


class ResNet(nn.Module):
    """ResNet for ImageNet (He et al., 2016): 7x7 stem, max pooling and four stages."""

    def __init__(
        self,
        block: type[Basic] | type[Bottleneck],
        depths: tuple[int, ...],
        norm: Norm = nn.BatchNorm2d,
        classes: int = 1000,
        width: int = 64,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            norm(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        channels = width
        self.stages = nn.ModuleList()
        for index, depth in enumerate(depths):
            blocks = []
            for position in range(depth):
                stride = 2 if index and not position else 1
                blocks.append(block(channels, width << index, stride, norm))
                channels = (width << index) * block.expansion
            self.stages.append(nn.Sequential(*blocks))
        self.head = nn.Linear(channels, classes)

    def features(self, images: Tensor) -> Tensor:
        """The pooled output of the last stage."""
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        return F.adaptive_avg_pool2d(x, 1).flatten(1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


def resnet18(norm: Norm = nn.BatchNorm2d, classes: int = 1000, width: int = 64) -> ResNet:
    """ResNet-18."""
    return ResNet(Basic, (2, 2, 2, 2), norm, classes, width)


def resnet50() -> ResNet:
    """ResNet-50."""
    return ResNet(Bottleneck, (3, 4, 6, 3))


def groupnorm_resnet() -> ResNet:
    """ResNet-18 with GroupNorm of 32 groups (Wu & He, 2018)."""
    return resnet18(norm=lambda width: nn.GroupNorm(32, width))


class DenseLayer(nn.Module):
    """BN-ReLU-conv1x1-BN-ReLU-conv3x3, its output concatenated to its input."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.ReLU(inplace=True),
            _conv(inputs, 4 * growth, 1),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(inplace=True),
            _conv(4 * growth, growth, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


class DenseNet(nn.Sequential):
    """DenseNet-BC (Huang et al., 2017) with compression 0.5."""

    def __init__(self, depths: tuple[int, ...] = (6, 8, 8), growth: int = 24) -> None:
        channels = 2 * growth
        layers: list[nn.Module] = [_conv(3, channels, 3, 2)]
        for index, depth in enumerate(depths):
            if index:
                layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
                layers += [_conv(channels, channels // 2, 1), nn.AvgPool2d(2)]
                channels //= 2
            for _ in range(depth):
                layers.append(DenseLayer(channels, growth))
                channels += growth
        layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)]
        super().__init__(*layers, nn.Flatten(), nn.Linear(channels, 100))


class InvertedResidual(nn.Module):
    """Expand by 1x1, filter each channel by 3x3, project by 1x1; residual where shapes agree."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        layers: list[nn.Module] = []
        if expansion > 1:
            layers += [_conv(inputs, hidden, 1), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True)]
        layers += [_conv(hidden, hidden, 3, stride, hidden), nn.BatchNorm2d(hidden)]
        layers += [nn.ReLU6(inplace=True), _conv(hidden, outputs, 1), nn.BatchNorm2d(outputs)]
        self.body = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class MobileNetV2(nn.Sequential):
    """MobileNetV2 (Sandler et al., 2018) at width 1."""

    # expansion, output channels, repeats, stride of the first
    table = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, classes: int = 1000) -> None:
        layers: list[nn.Module] = [_conv(3, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU6(inplace=True)]
        channels = 32
        for expansion, outputs, repeats, stride in self.table:
            for position in range(repeats):
                first = position == 0
                layers.append(
                    InvertedResidual(channels, outputs, stride if first else 1, expansion)
                )
                channels = outputs
        layers += [_conv(channels, 1280, 1), nn.BatchNorm2d(1280), nn.ReLU6(inplace=True)]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2)]
        super().__init__(*layers, nn.Linear(1280, classes))


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, LayerNorm, pointwise MLP with GELU, layer scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.project(F.gelu(self.expand(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Sequential):
    """ConvNeXt (Liu et al., 2022), half the width of its tiny size, without stochastic depth."""

    def __init__(
        self,
        depths: tuple[int, ...] = (2, 2, 6, 2),
        widths: tuple[int, ...] = (48, 96, 192, 384),
    ) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0])]
        for index, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            if index:
                before = widths[index - 1]
                layers += [ChannelNorm(before), nn.Conv2d(before, width, 2, 2)]
            layers += [ConvNeXtBlock(width) for _ in range(depth)]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(widths[-1])]
        super().__init__(*layers, nn.Linear(widths[-1], 100))


class Attention(nn.Module):
    """Multi-head self-attention by `F.scaled_dot_product_attention`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


class EncoderBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Vision transformer (Dosovitskiy et al., 2021) of the tiny width, on 8x8 patches."""

    def __init__(self, size: int = 64, patch: int = 8, width: int = 192, depth: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*[EncoderBlock(width, width // 64) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 100)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class Conv3d(nn.Sequential):
    """C3D (Tran et al., 2015) with BatchNorm and fewer channels, for 16 frames of 32 px."""

    def __init__(self, widths: tuple[int, ...] = (3, 32, 64, 128, 128)) -> None:
        layers: list[nn.Module] = []
        for index, (inputs, outputs) in enumerate(pairwise(widths)):
            layers += [nn.Conv3d(inputs, outputs, 3, padding=1), nn.BatchNorm3d(outputs)]
            layers += [nn.ReLU(inplace=True), nn.MaxPool3d(2 if index else (1, 2, 2))]
        super().__init__(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(widths[-1], 50))


_digits = labeled_inputs(1, 28, 28, classes=10)
_images = labeled_inputs(3, 64, 64, classes=100)
_clips = labeled_inputs(3, 16, 32, 32, classes=50)

VISION = (
    Architecture("mlp", MLP, _digits, cross_entropy, 1024, 65536, "linear and ReLU only"),
    Architecture(
        "lenet", LeNet, _digits, cross_entropy, 512, 32768, "tanh keeps its output; tiny parameters"
    ),
    Architecture(
        "vgg", VGG, _images, cross_entropy, 8, 256, "BatchNorm, in-place ReLU, indices of pooling"
    ),
    Architecture(
        "resnet18", resnet18, _images, cross_entropy, 16, 512, "residual sums, in-place ReLU"
    ),
    Architecture("resnet50", resnet50, _images, cross_entropy, 8, 256, "bottleneck blocks"),
    Architecture(
        "groupnorm-resnet",
        groupnorm_resnet,
        _images,
        cross_entropy,
        16,
        512,
        "GroupNorm keeps its input and statistics of each example",
    ),
    Architecture(
        "densenet", DenseNet, _images, cross_entropy, 8, 256, "concatenations: quadratic memory"
    ),
    Architecture(
        "depthwise", MobileNetV2, _images, cross_entropy, 8, 512, "depthwise convolution, ReLU6"
    ),
    Architecture(
        "convnext", ConvNeXt, _images, cross_entropy, 8, 512, "LayerNorm, GELU, permuted views"
    ),
    Architecture(
        "vit", ViT, _images, cross_entropy, 8, 512, "fused attention, class token, position sum"
    ),
    Architecture("conv3d", Conv3d, _clips, cross_entropy, 4, 256, "3-D convolution and pooling"),
)
