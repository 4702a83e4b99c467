"""The decoder one position at a time, keeping what it would compute again.

A causal convolution of k taps needs its last k - 1 inputs, attention the keys and values of the
source, once for all hypotheses of a sentence. Layers are called as modules, so that sparse and
16-bit ones work as they do in training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.dynamic_conv import (
    PADDING,
    ConvolutionBlock,
    CrossAttention,
    DCTransformer,
    residuals,
    sinusoidal_positions,
)


class Incremental:
    """The state of (sentences, hypotheses) that are being decoded; a model in eval mode."""

    def __init__(self, model: DCTransformer, source: Tensor, hypotheses: int) -> None:
        self._decoder = model.decoder
        self._layers = list(residuals(model.decoder.layers))
        self.padding = source == PADDING
        memory = model.encoder(source, self.padding)
        self._memory = [_keys_and_values(layer[1].inside, memory) for layer in self._layers]
        shape = (len(source), hypotheses)
        self._inputs = [
            memory.new_zeros(*shape, convolution.inside.left, memory.shape[2])
            for convolution, *_ in self._layers
        ]
        self._position = 0

    def step(self, tokens: Tensor) -> Tensor:
        """Feed the next token of every hypothesis; log p of the one after, in FP32."""
        x = self._embed(tokens)
        for number, (convolution, attention, feed_forward) in enumerate(self._layers):
            x = convolution.norm(x + self._convolve(number, convolution.inside, x))
            x = attention.norm(x + self._attend(number, attention.inside, x))
            x = feed_forward(x)
        self._position += 1
        scores: Tensor = self._decoder.output(x)
        return scores.float().log_softmax(-1)

    def _embed(self, tokens: Tensor) -> Tensor:
        table = self._decoder.embedding.tokens
        x: Tensor = table(tokens) * table.embedding_dim**0.5
        here = sinusoidal_positions(self._position + 1, x.shape[2], x.device)[-1]
        return x + here.to(x.dtype)

    def _convolve(self, number: int, block: ConvolutionBlock, x: Tensor) -> Tensor:
        x = block.linear1(x)
        window = torch.cat([self._inputs[number], x[:, :, None]], dim=2)
        self._inputs[number] = window[:, :, 1:]
        weights = block.kernel(x).unflatten(2, (block.heads, -1)).softmax(-1)
        by_head = window.unflatten(3, (block.heads, -1))
        mixed = torch.einsum("bnhk,bnkhc->bnhc", weights.float(), by_head.float())
        return block.linear2(mixed.flatten(2).to(x.dtype))

    def _attend(self, number: int, block: CrossAttention, x: Tensor) -> Tensor:
        key, value = self._memory[number]
        scores = block.split(block.query(x) * block.scale) @ key.transpose(2, 3)
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(self.padding[:, None, None, :], lowest)
        return block.output((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))

    def follow(self, parents: Tensor) -> None:
        """Let each hypothesis go on from another of its sentence, (sentences, hypotheses)."""
        for number, held in enumerate(self._inputs):
            index = parents[:, :, None, None].expand(-1, -1, *held.shape[2:])
            self._inputs[number] = held.gather(1, index)

    def keep(self, sentences: Tensor) -> None:
        """Go on with some of the sentences."""
        self.padding = self.padding[sentences]
        self._memory = [(key[sentences], value[sentences]) for key, value in self._memory]
        self._inputs = [held[sentences] for held in self._inputs]


def _keys_and_values(block: CrossAttention, memory: Tensor) -> tuple[Tensor, Tensor]:
    return block.split(block.key(memory)), block.split(block.value(memory))
