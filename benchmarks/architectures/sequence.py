"""Models of token sequences and of sound."""

import math

import torch
from torch import Tensor, nn

from .base import (
    Architecture,
    cross_entropy,
    labeled_inputs,
    labeled_tokens,
    token_sequences,
)

VOCABULARY = 4096
LENGTH = 64


class LSTMLanguageModel(nn.Module):
    """Word-level language model of two LSTM layers (Zaremba et al., 2014)."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.5, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.dropout(self.embedding(tokens)))
        return self.head(self.dropout(outputs))


class GRUClassifier(nn.Module):
    """Bidirectional GRU, averaged over the sequence."""

    def __init__(self, width: int = 256, classes: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.gru = nn.GRU(width, width, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.gru(self.embedding(tokens))
        return self.head(outputs.mean(1))


def sinusoids(length: int, width: int) -> Tensor:
    """Position encodings of Vaswani et al. (2017), section 3.5."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
    angles = torch.arange(length).unsqueeze(1) * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


class TransformerEncoder(nn.Module):
    """Classifier of `nn.TransformerEncoderLayer`s with their default dropout."""

    def __init__(self, width: int = 256, depth: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.register_buffer("positions", sinusoids(LENGTH, width))
        self.layers = nn.Sequential(
            *[
                nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
                for _ in range(depth)
            ]
        )
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens) + self.positions).mean(1))


class CausalBlock(nn.Module):
    """Transformer block by `nn.MultiheadAttention` that returns its weights, hence unfused."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout=0.1, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask)[0]
        return x + self.mlp(self.norm2(x))


class TiedLanguageModel(nn.Module):
    """Causal transformer whose output layer is its embedding (Press & Wolf, 2017)."""

    def __init__(self, width: int = 128, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))
        self.blocks = nn.ModuleList(CausalBlock(width, 4) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


class Audio(nn.Sequential):
    """The M11 network on raw waveforms (Dai et al., 2017)."""

    stages = ((64, 2), (128, 2), (256, 3), (512, 2))

    def __init__(self, classes: int = 35) -> None:
        layers: list[nn.Module] = [nn.Conv1d(1, 64, 80, 4, 38), nn.BatchNorm1d(64)]
        layers += [nn.ReLU(inplace=True), nn.MaxPool1d(4)]
        channels = 64
        for index, (width, depth) in enumerate(self.stages):
            if index:
                layers.append(nn.MaxPool1d(4))
            for _ in range(depth):
                layers += [nn.Conv1d(channels, width, 3, padding=1), nn.BatchNorm1d(width)]
                layers.append(nn.ReLU(inplace=True))
                channels = width
        super().__init__(
            *layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(channels, classes)
        )


_text = token_sequences(LENGTH, VOCABULARY)
_documents = labeled_tokens(LENGTH, VOCABULARY, classes=10)
_waves = labeled_inputs(1, 8000, classes=35)

SEQUENCE = (
    Architecture(
        "lstm", LSTMLanguageModel, _text, cross_entropy, 16, 512, "recurrence, dropout, wide logits"
    ),
    Architecture(
        "gru", GRUClassifier, _documents, cross_entropy, 32, 2048, "bidirectional recurrence"
    ),
    Architecture(
        "transformer-encoder",
        TransformerEncoder,
        _documents,
        cross_entropy,
        16,
        512,
        "post-norm layers of torch.nn, with dropout in and around the attention",
    ),
    Architecture(
        "tied-weights",
        TiedLanguageModel,
        _text,
        cross_entropy,
        16,
        512,
        "one parameter with two uses; unfused attention with dropout",
    ),
    Architecture("audio", Audio, _waves, cross_entropy, 16, 512, "1-D convolution and pooling"),
)
