"""The DynamicConv Transformer of the report's translation experiments ("DC-Transformer").

A Transformer whose self-attention is replaced by dynamic convolutions (report, section 4.3; Wu et
al., 2019, in their IWSLT'14 De-En setting: softmax over the kernel, no GLU, post-norm layers).
With its default arguments it has 38,685,184 parameters; the report says 38.7M.

Sentences are padded at their end: positions count from the first token, and the causal
convolutions of the decoder then never reach padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError
from .dynamic_conv_function import DynamicConv
from .label_smoothing import PADDING, projected_loss
from .label_smoothing import label_smoothed_loss as label_smoothed_loss

ENCODER_KERNELS = (3, 7, 15, 31, 31, 31, 31)
DECODER_KERNELS = (3, 7, 15, 31, 31, 31)
SOURCE_VOCABULARY = 8848
TARGET_VOCABULARY = 6632


def layer_kernels(kernels: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Kernel widths of a stack of the given number of layers, taken from a published list.

    The report's shallow baselines (3 and 1 decoder layers) do not name theirs. We keep the last,
    wide kernels, since one layer of width 3 could not see a sentence; a deeper stack repeats the
    last width.
    """
    return (kernels + kernels[-1:] * (layers - len(kernels)))[-layers:]


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and dropout rates of a DC-Transformer; an ffn of None is twice the width."""

    width: int = 512
    encoder_layers: int = 7
    decoder_layers: int = 6
    heads: int = 4
    ffn: int | None = None
    source_vocabulary: int = SOURCE_VOCABULARY
    target_vocabulary: int = TARGET_VOCABULARY
    dropout: float = 0.3
    attention_dropout: float = 0.1
    weight_dropout: float = 0.1

    def __post_init__(self) -> None:
        for name in ("width", "encoder_layers", "decoder_layers", "heads"):
            if getattr(self, name) < 1:
                raise InputError(
                    f"a DC-Transformer cannot have {name} {getattr(self, name)}",
                    hint=f"{name} is 1 or more",
                )
        step = math.lcm(2, self.heads)
        if self.width % step:
            nearest = max(step, round(self.width / step) * step)
            raise InputError(
                f"a DC-Transformer of {self.heads} heads cannot have width {self.width}",
                hint=f"the width is a multiple of {step}; try {nearest}",
            )

    @property
    def inner(self) -> int:
        """Width of the feed-forward layers."""
        return 2 * self.width if self.ffn is None else self.ffn


class ConvolutionBlock(nn.Module):
    """Linear, dynamic convolution, linear: what stands in the place of self-attention.

    x' = W1 x; w = dropout(softmax_k(Wk x')); y = W2 DynamicConv(x', w) (Wu et al., 2019, section
    4, without GLU). A causal block sees the present and the past, the other is centered.
    """

    def __init__(self, config: TransformerConfig, kernel: int, causal: bool) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.left = kernel - 1 if causal else kernel // 2
        self.linear1 = nn.Linear(width, width)
        self.kernel = nn.Linear(width, config.heads * kernel, bias=False)
        # The report makes "over 98%" of the parameters sparse, which leaves these out.
        self.kernel.keep_dense = True  # type: ignore[assignment]
        self.weight_dropout = nn.Dropout(config.weight_dropout)
        self.linear2 = nn.Linear(width, width)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Convolve (batch, time, width), with zeros where `padding` (batch, time) is true."""
        x = self.linear1(x)
        if padding is not None:
            x = x.masked_fill(padding[:, :, None], 0.0)
        weights = self.kernel(x).unflatten(2, (self.heads, -1)).softmax(-1)
        return self.linear2(DynamicConv.apply(x, self.weight_dropout(weights), self.left))


class CrossAttention(nn.Module):
    """Attention of the decoder over the encoder's output.

    softmax(Q K^T / sqrt(width / heads)) V for every head (Vaswani et al., 2017, section 3.2). Of
    plain operations, so that what is kept for backward is the same on every device.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.scale = (width // self.heads) ** -0.5
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.dropout = nn.Dropout(config.attention_dropout)

    def split(self, x: Tensor) -> Tensor:
        """(batch, time, width) seen as (batch, heads, time, width / heads)."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        """Attend from x to the memory wherever `padding` (batch, source time) is false."""
        query = self.split(self.query(x) * self.scale)
        key, value = self.split(self.key(memory)), self.split(self.value(memory))
        scores = query @ key.transpose(2, 3)
        # The lowest finite number, not -inf: a sentence of padding alone would give NaN.
        scores = scores.masked_fill(padding[:, None, None, :], torch.finfo(scores.dtype).min)
        mixed = self.dropout(scores.softmax(-1)) @ value
        return self.output(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    """linear2(ReLU(linear1(x))), at every position alike."""

    def __init__(self, config: TransformerConfig) -> None:
        width, inner = config.width, config.inner
        super().__init__(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width))


class Residual(nn.Module):
    """x <- LayerNorm(x + dropout(f(x))), the block after which a checkpoint may stand.

    A layer is a list of two or three of these, so that what is recomputed as one is what the
    report counts: 32 residual connections, not 13 layers.
    """

    def __init__(self, inside: nn.Module, config: TransformerConfig) -> None:
        super().__init__()
        self.inside = inside
        self.norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        """(batch, time, width) to the same shape; `more` is what the inside takes besides."""
        out: Tensor = self.norm(x + self.dropout(self.inside(x, *more)))
        return out


def residuals(layers: nn.ModuleList) -> Iterator[list[Any]]:
    """The residual connections of each layer."""
    for layer in layers:
        assert isinstance(layer, nn.ModuleList)
        yield list(layer)


def encoder_layer(config: TransformerConfig, kernel: int) -> nn.ModuleList:
    """Convolution and feed-forward."""
    insides = ConvolutionBlock(config, kernel, causal=False), FeedForward(config)
    return nn.ModuleList(Residual(inside, config) for inside in insides)


def decoder_layer(config: TransformerConfig, kernel: int) -> nn.ModuleList:
    """Causal convolution, attention and feed-forward."""
    convolution = ConvolutionBlock(config, kernel, causal=True)
    insides = convolution, CrossAttention(config), FeedForward(config)
    return nn.ModuleList(Residual(inside, config) for inside in insides)


def sinusoidal_positions(time: int, width: int, device: torch.device) -> Tensor:
    """Positions as waves, (time, width) in FP32, made anew at every call.

    p[t, i] = sin(t / 10000^(2i / width)), p[t, width / 2 + i] = cos of the same (Vaswani et al.,
    2017, section 3.5, who interleave the two; the order of the channels is immaterial).
    """
    steps = torch.arange(time, device=device, dtype=torch.float32)
    rates = torch.arange(width // 2, device=device, dtype=torch.float32)
    angles = steps[:, None] * torch.exp(rates * (-2.0 * math.log(10000.0) / width))
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class TokenEmbedding(nn.Module):
    """dropout(sqrt(width) E[token] + p[t]); the padding token has the zero vector."""

    def __init__(self, vocabulary: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed (batch, time) tokens as (batch, time, width)."""
        x = self.tokens(tokens) * math.sqrt(self.tokens.embedding_dim)
        positions = sinusoidal_positions(x.shape[1], x.shape[2], x.device)
        return self.dropout(x + positions.to(x.dtype))


class Encoder(nn.Module):
    """Embedding and encoder layers, with kernels 3, 7, 15, 31, 31, 31, 31."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(config.source_vocabulary, config.width, config.dropout)
        kernels = layer_kernels(ENCODER_KERNELS, config.encoder_layers)
        self.layers = nn.ModuleList(encoder_layer(config, kernel) for kernel in kernels)

    def forward(self, source: Tensor, padding: Tensor) -> Tensor:
        """The memory the decoder attends to, (batch, source time, width)."""
        x: Tensor = self.embedding(source)
        for convolution, feed_forward in residuals(self.layers):
            x = feed_forward(convolution(x, padding))
        return x


class OutputEmbedding(nn.Linear):
    """Scores of all words, or the loss of those, which then are never all there."""

    def forward(self, x: Tensor, target: Tensor | None = None, smoothing: float = 0.1) -> Tensor:
        """Scores (batch, time, vocabulary); with the tokens to be scored, their mean loss."""
        if target is None:
            return super().forward(x)
        return projected_loss(x, self.weight, target, smoothing)


class Decoder(nn.Module):
    """Embedding, decoder layers with kernels 3, 7, 15, 31, 31, 31, and output embedding."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(config.target_vocabulary, config.width, config.dropout)
        kernels = layer_kernels(DECODER_KERNELS, config.decoder_layers)
        self.layers = nn.ModuleList(decoder_layer(config, kernel) for kernel in kernels)
        self.output = OutputEmbedding(config.width, config.target_vocabulary, bias=False)

    def forward(self, target: Tensor, memory: Tensor, padding: Tensor, *scored: Any) -> Tensor:
        """Scores of the token after each one of the target, or the loss of those `scored`."""
        x = self.embedding(target)
        for convolution, attention, feed_forward in residuals(self.layers):
            x = feed_forward(attention(convolution(x), memory, padding))
        return self.output(x, *scored)


class DCTransformer(nn.Module):
    """The whole translation model: `model(source, target_in)` gives scores of the next tokens.

    `model(source, target_in, target_out)` gives their label-smoothed loss, in less memory.
    Linear layers start from Xavier's uniform distribution and biases of zero, embeddings from a
    normal one of standard deviation width^-1/2.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        deviation = self.config.width**-0.5
        nn.init.normal_(self.decoder.output.weight, std=deviation)
        for table in (self.encoder.embedding.tokens, self.decoder.embedding.tokens):
            nn.init.normal_(table.weight, std=deviation)
            with torch.no_grad():
                table.weight[PADDING].zero_()

    def forward(
        self,
        source: Tensor,
        target_in: Tensor,
        target_out: Tensor | None = None,
        smoothing: float = 0.1,
    ) -> Tensor:
        """Scores (batch, target time, vocabulary) of the tokens that follow `target_in`.

        With these tokens, `target_out`, their mean loss: `label_smoothed_loss` of the scores.
        """
        padding = source == PADDING
        memory = self.encoder(source, padding)
        scored = () if target_out is None else (target_out, smoothing)
        return self.decoder(target_in, memory, padding, *scored)


def dc_transformer(
    width: int = 512,
    encoder_layers: int = 7,
    decoder_layers: int = 6,
    heads: int = 4,
    ffn: int | None = None,
    **others: Any,
) -> DCTransformer:
    """A DC-Transformer; the report's baselines change the width or the decoder layers alone.

    Other keywords are vocabularies and dropout rates, fields of `TransformerConfig`. Where only
    the width changes the feed-forward layers stay twice as wide, which the report leaves open.
    """
    config = TransformerConfig(width, encoder_layers, decoder_layers, heads, ffn, **others)
    return DCTransformer(config)
