"""Small models for the tests of sparsity, each with a batch and a loss."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.lab.models.wide_resnet import ResidualBlock


class ConvolutionNet(nn.Module):
    """Convolutions, BatchNorm, residual blocks, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.Sequential(*(ResidualBlock(8, 8) for _ in range(4)))
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2)
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.down(self.layers(self.stem(images))).mean((2, 3)))


class TiedLanguageModel(nn.Module):
    """An embedding that is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 12, padding_idx=0)
        self.hidden = nn.Linear(12, 12)
        self.output = nn.Linear(12, 23, bias=False)
        self.output.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(torch.tanh(self.hidden(self.embed(ids))))


class Transformer(nn.Module):
    """Embedding, two encoder layers, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(16, 19)

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.encoder(self.embed(ids)))


def images_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def tokens_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


Case = tuple[Callable[[], nn.Module], Callable[[int], Any], Callable[[nn.Module, Any], Tensor]]


def _images(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(6, 3, 8, 8, generator=generator, dtype=torch.get_default_dtype())
    return images, torch.randint(5, (6,), generator=generator)


def _tokens(seed: int) -> Any:
    return torch.randint(19, (4, 7), generator=torch.Generator().manual_seed(seed))


CASES: dict[str, Case] = {
    "convolutions": (ConvolutionNet, _images, images_loss),
    "tied": (TiedLanguageModel, _tokens, tokens_loss),
    "transformer": (Transformer, _tokens, tokens_loss),
}

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(
        m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3
    ),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=2e-3, weight_decay=1e-3),
}


def build(case: str, seed: int = 0) -> nn.Module:
    """The model, its weights drawn from the seed."""
    torch.manual_seed(seed)
    return CASES[case][0]()
