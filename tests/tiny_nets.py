"""Models that train in milliseconds, for tests of the loop; factories as `--model` names them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoestring.lab.models.wide_resnet import ResidualBlock
from shoestring.lab.tasks.images import ImageTask

TINY = "tiny_nets:tiny_residual"


class TinyResidual(nn.Module):
    """Two residual blocks on images of 8×8, with a dropout so that random streams matter."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(4)
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(ResidualBlock(8, 8), ResidualBlock(8, 16, 2))
        self.bn = nn.BatchNorm2d(16)
        self.dropout = nn.Dropout(0.1)
        self.linear = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores."""
        x = torch.relu(self.bn(self.blocks(self.conv(self.pool(images)))))
        return self.linear(self.dropout(x.mean(dim=(2, 3))))


def tiny_residual() -> nn.Module:
    """The model, as a command line names it."""
    return TinyResidual()


def small_task(images: int = 64, held_out: int = 20, seed: int = 0) -> ImageTask:
    """Random images whose brightness tells the label."""
    generator = torch.Generator().manual_seed(seed)
    count = images + held_out
    labels = torch.randint(10, (count,), generator=generator)
    noise = torch.randint(0, 60, (count, 3, 32, 32), generator=generator)
    pixels = (noise + 19 * labels.view(-1, 1, 1, 1)).to(torch.uint8)
    return ImageTask(
        name="digits",
        split="test",
        images=pixels[:images],
        labels=labels[:images],
        held_out_images=pixels[images:],
        held_out_labels=labels[images:],
        classes=10,
        mean=(0.5,) * 3,
        deviation=(0.25,) * 3,
        padding=4,
        flip=True,
    )


def frozen_normalization() -> nn.Module:
    """BatchNorm in evaluation mode, as in fine-tuning, in a model that trains."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)
    )
    model[1].eval().requires_grad_(False)
    return model


def tiny_linear() -> nn.Module:
    """A linear layer on 8×8 pixels: traced and trained in no time."""
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 10))


def five_classes() -> nn.Module:
    """Too few outputs for ten digits."""
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 5))
