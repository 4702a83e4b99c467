"""Beam search over many sentences at once, by fairseq's rules, which the recipe's figures are of.

The best hypotheses go on, as many as the beam is wide; one that ends among them is finished with
its log-probability divided by length^penalty, and a sentence is done when as many are finished.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import InputError
from ..models.dynamic_conv import DCTransformer
from ..tasks.bpe import BEGIN, END, PADDING, Sentences
from ..tasks.token_batches import by_length, source_in
from .incremental import Incremental
from .whole_prefixes import WholePrefixes


@dataclass(frozen=True)
class BeamSearch:
    """How translations are looked for."""

    beam: int = 4
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.beam < 1:
            raise InputError(f"a beam of {self.beam} holds nothing", hint="1 or more")
        if not abs(self.length_penalty) <= 10:  # a power that would overflow, or no number
            raise InputError(
                f"length penalty {self.length_penalty:g} is not in [-10, 10]",
                hint="1 divides a score by its length, 0 leaves it",
            )

    def limit(self, source_length: int) -> int:
        """Pieces of a translation, its end counted; a longer one ends there."""
        return 2 * source_length + 20


class DecodingState(Protocol):
    """The hypotheses of some sentences, one token at a time."""

    def step(self, tokens: Tensor) -> Tensor:
        """Feed the next token of every hypothesis; log p of the one after, in FP32."""
        ...

    def follow(self, parents: Tensor) -> None:
        """Let each hypothesis go on from another of its sentence."""
        ...

    def keep(self, sentences: Tensor) -> None:
        """Go on with some of the sentences."""
        ...


def decoder_of(model: nn.Module, words: int | None) -> Callable[[Any, Tensor, int], DecodingState]:
    """With caches for our own model, without them for another."""
    if isinstance(model, DCTransformer):
        return Incremental
    return partial(WholePrefixes, words=words)


@torch.no_grad()
def translate_batch(
    model: nn.Module,
    source: Tensor,
    search: BeamSearch,
    decoder: Callable[[Any, Tensor, int], DecodingState] = Incremental,
) -> list[tuple[list[int], float]]:
    """The best translation of each sentence, with its end, and its score."""
    state = _State(source, search)
    cached = decoder(model, source, search.beam)
    while len(state.scores):
        log_p = cached.step(state.last)
        parents, unfinished = state.advance(log_p)
        cached.follow(parents)
        if unfinished is not None:
            state.keep(unfinished)
            cached.keep(unfinished)
    return state.best


class _State:
    """All hypotheses of the sentences that are not done."""

    def __init__(self, source: Tensor, search: BeamSearch) -> None:
        count, device = len(source), source.device
        self._search = search
        lengths = (source != PADDING).sum(1)
        self._limits = torch.tensor([search.limit(n) for n in lengths.tolist()], device=device)
        self._number = torch.arange(count, device=device)
        """Of each sentence in the batch."""
        self.scores = torch.full((count, search.beam), -torch.inf, device=device)
        self.scores[:, 0] = 0.0  # all hypotheses are the same yet
        self._tokens = torch.empty((count, search.beam, 0), dtype=torch.int64, device=device)
        self.last = torch.full((count, search.beam), BEGIN, device=device)
        self._finished = torch.zeros(count, dtype=torch.int64, device=device)
        self._best_score = torch.full((count,), -torch.inf, device=device)
        most = int(self._limits.max()) if count else 0
        self._best_tokens = torch.full((count, most), PADDING, device=device)
        self.best: list[tuple[list[int], float]] = [([END], -float("inf"))] * count

    def advance(self, log_p: Tensor) -> tuple[Tensor, Tensor | None]:
        """One piece more: which hypothesis each goes on from, and the sentences that are left."""
        beam, length = self._search.beam, self._tokens.shape[2] + 1
        log_p[:, :, [BEGIN, PADDING]] = -torch.inf
        last = (self._limits <= length)[:, None, None]
        ends = torch.arange(log_p.shape[2], device=log_p.device) == END
        log_p = log_p.masked_fill(last & ~ends, -torch.inf)
        total = (self.scores[:, :, None] + log_p).flatten(1)
        scores, chosen = total.topk(min(2 * beam, total.shape[1]))
        parents, tokens = chosen // log_p.shape[2], chosen % log_p.shape[2]
        ended = (tokens == END) & (scores > -torch.inf)
        self._finish(ended[:, :beam], scores[:, :beam], parents[:, :beam], length)
        # The first that did not end, in their order; one hypothesis ends at most once.
        order = ended.long() * total.shape[1] + torch.arange(scores.shape[1], device=ended.device)
        going = order.argsort(1)[:, :beam]
        self.scores = scores.gather(1, going).masked_fill(ended.gather(1, going), -torch.inf)
        parents, self.last = parents.gather(1, going), tokens.gather(1, going)
        past = self._tokens.gather(1, parents[:, :, None].expand(-1, -1, length - 1))
        self._tokens = torch.cat([past, self.last[:, :, None]], dim=2)
        done = (self._finished >= beam) | (self._limits <= length)
        if not bool(done.any()):
            return parents, None
        self._deliver(done)
        return parents, (~done).nonzero()[:, 0]

    def _finish(self, ended: Tensor, scores: Tensor, parents: Tensor, length: int) -> None:
        """Count those that ended, and hold the best of each sentence."""
        normal = scores / length**self._search.length_penalty
        found, which = normal.masked_fill(~ended, -torch.inf).max(1)
        better = found > self._best_score
        parent = parents.gather(1, which[:, None])
        past = self._tokens.gather(1, parent[:, :, None].expand(-1, -1, length - 1))[:, 0]
        held = self._best_tokens
        held[:, : length - 1] = torch.where(better[:, None], past, held[:, : length - 1])
        held[:, length - 1] = torch.where(better, END, held[:, length - 1])
        held[:, length:] = held[:, length:].masked_fill(better[:, None], PADDING)
        self._best_score = torch.where(better, found, self._best_score)
        self._finished = self._finished + ended.sum(1)

    def _deliver(self, done: Tensor) -> None:
        rows = self._best_tokens[done].tolist()
        scores = self._best_score[done].tolist()
        for number, row, score in zip(self._number[done].tolist(), rows, scores, strict=True):
            whole = row[: row.index(END) + 1] if END in row else [END]
            self.best[number] = (whole, score)

    def keep(self, sentences: Tensor) -> None:
        """Go on with some of the sentences."""
        for name in ("_limits", "_number", "scores", "_tokens", "last", "_finished",
                     "_best_score", "_best_tokens"):  # fmt: skip
            setattr(self, name, getattr(self, name)[sentences])


def translate(
    model: nn.Module,
    sentences: Sentences | Sequence[Sequence[int]],
    search: BeamSearch,
    *,
    words: int | None = None,
    tokens: int = 4000,
    device: torch.device,
) -> list[list[int]]:
    """The best translation of every sentence, in their order; so many source tokens at once.

    `words` is the size of the vocabulary, of which a model may score more.
    """
    held = sentences if isinstance(sentences, Sentences) else Sentences.of(sentences)
    made: list[list[int]] = [[END]] * len(held)
    was_training = model.training
    model.eval()
    try:
        for shape, chosen in by_length(np.asarray(held.lengths), tokens):
            source = source_in(held, chosen, shape).to(device)
            found = translate_batch(model, source, search, decoder_of(model, words))
            for position, (numbers, _) in zip(chosen, found, strict=True):
                made[position] = numbers
    finally:
        model.train(was_training)
    return made
