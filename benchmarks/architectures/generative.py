"""Models whose output is an image: segmentation, reconstruction and generation."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Architecture


class DoubleConv(nn.Sequential):
    """Two 3x3 convolutions, each with BatchNorm and ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """U-Net (Ronneberger et al., 2015) with padded convolutions."""

    def __init__(self, widths: tuple[int, ...] = (24, 48, 96, 192), classes: int = 5) -> None:
        super().__init__()
        inputs = (3, *widths[:-1])
        self.down = nn.ModuleList(map(DoubleConv, inputs, widths))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * width, width, 2, 2) for width in reversed(widths[:-1])
        )
        self.merge = nn.ModuleList(DoubleConv(2 * width, width) for width in reversed(widths[:-1]))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        skips: list[Tensor] = []
        x = self.down[0](images)
        for down in list(self.down)[1:]:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


def segmentation_batch(n: int) -> tuple[Tensor, Tensor]:
    """Images with a class for every pixel."""
    return torch.randn(n, 3, 64, 64), torch.randint(5, (n, 64, 64))


def segmentation_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of every pixel."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


class Autoencoder(nn.Module):
    """Variational convolutional autoencoder: in-place ReLU, chunks and reshaped views."""

    def __init__(self, width: int = 32, latent: int = 64) -> None:
        super().__init__()
        self.width = width
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(2 * width, 4 * width, 3, 2, 1),
            nn.ReLU(inplace=True),
        )
        self.to_latent = nn.Linear(4 * width * 64, 2 * latent)
        self.from_latent = nn.Linear(latent, 4 * width * 64)
        self.decoder = nn.Sequential(
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * width, 8 * width, 3, padding=1),
            nn.PixelShuffle(2),
            nn.ReLU(inplace=True),
            nn.Conv2d(2 * width, 4 * width, 3, padding=1),
            nn.PixelShuffle(2),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 12, 3, padding=1),
            nn.PixelShuffle(2),
            nn.Sigmoid(),
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        code = self.encoder(images).view(len(images), -1)
        mean, log_variance = self.to_latent(code).chunk(2, 1)
        latent = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        grid = self.from_latent(latent).view(-1, 4 * self.width, 8, 8)
        return self.decoder(grid), mean, log_variance


def image_batch(n: int) -> Tensor:
    """Images with values between 0 and 1."""
    return torch.rand(n, 3, 64, 64)


def evidence_loss(model: nn.Module, images: Tensor) -> Tensor:
    """Reconstruction error and divergence from a standard normal, averaged over the batch."""
    output, mean, log_variance = model(images)
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
    return (F.mse_loss(output, images, reduction="sum") + divergence) / len(images)


class GAN(nn.Module):
    """DCGAN (Radford et al., 2016) in its generator step: the discriminator is frozen."""

    def __init__(self, width: int = 32, latent: int = 100) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.ConvTranspose2d(latent, 8 * width, 4, bias=False)]
        for factor in (8, 4, 2):
            channels = factor * width
            layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            layers.append(nn.ConvTranspose2d(channels, channels // 2, 4, 2, 1, bias=False))
        layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        layers += [nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh()]
        self.generator = nn.Sequential(*layers)
        layers = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)]
        for factor in (1, 2, 4):
            channels = factor * width
            layers.append(nn.Conv2d(channels, 2 * channels, 4, 2, 1, bias=False))
            layers += [nn.BatchNorm2d(2 * channels), nn.LeakyReLU(0.2, inplace=True)]
        self.discriminator = nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4))
        self.discriminator.requires_grad_(False)

    def forward(self, noise: Tensor) -> Tensor:
        return self.discriminator(self.generator(noise)).flatten()


def noise_batch(n: int) -> Tensor:
    """Latent vectors, as one-pixel images."""
    return torch.randn(n, 100, 1, 1)


def generator_loss(model: nn.Module, noise: Tensor) -> Tensor:
    """The non-saturating loss of the generator."""
    return F.softplus(-model(noise)).mean()


GENERATIVE = (
    Architecture(
        "unet",
        UNet,
        segmentation_batch,
        segmentation_loss,
        8,
        256,
        "long skips by concatenation, transposed convolution",
    ),
    Architecture(
        "autoencoder",
        Autoencoder,
        image_batch,
        evidence_loss,
        32,
        2048,
        "in-place ReLU, views and chunks, noise drawn in the forward pass",
    ),
    Architecture(
        "gan",
        GAN,
        noise_batch,
        generator_loss,
        32,
        1024,
        "transposed convolution, tanh; gradients pass through a frozen part",
    ),
)
