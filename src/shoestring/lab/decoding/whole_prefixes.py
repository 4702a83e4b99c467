"""A decoder for any model: runs the whole model on all tokens so far, and keeps no caches."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class WholePrefixes:
    """As `Incremental`, for a model that is called as `model(source, target)` and gives scores.

    `words` is the size of the vocabulary; a model may score more of them, which are left out.
    """

    def __init__(
        self, model: nn.Module, source: Tensor, hypotheses: int, words: int | None = None
    ) -> None:
        self._model, self._source, self._words = model, source, words
        self._tokens = source.new_empty(len(source), hypotheses, 0)

    def step(self, tokens: Tensor) -> Tensor:
        """Feed the next token of every hypothesis; log p of the one after, in FP32."""
        self._tokens = torch.cat([self._tokens, tokens[:, :, None]], dim=2)
        source = self._source.repeat_interleave(tokens.shape[1], dim=0)
        scores: Tensor = self._model(source, self._tokens.flatten(0, 1))
        last = scores[:, -1, : self._words].float().log_softmax(-1)
        return last.unflatten(0, tokens.shape)

    def follow(self, parents: Tensor) -> None:
        """Let each hypothesis go on from another of its sentence, (sentences, hypotheses)."""
        index = parents[:, :, None].expand(-1, -1, self._tokens.shape[2])
        self._tokens = self._tokens.gather(1, index)

    def keep(self, sentences: Tensor) -> None:
        """Go on with some of the sentences."""
        self._source, self._tokens = self._source[sentences], self._tokens[sentences]
