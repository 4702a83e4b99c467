"""Minibatches of sentences by tokens: few shapes, grouped by length, in an order of (seed, epoch).

Every batch of a shape has the same number of rows and columns, so that a captured step can be
replayed; there are as few padded positions as that number of shapes allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...errors import InputError
from .bpe import BEGIN, PADDING, SPECIAL, Sentences
from .text import Sides, TextTask

SHAPES = 8
"""As many as steps are kept captured."""

AHEAD = 3
"""Batches of the largest shape with which a training begins: run, captured and replayed."""

TextBatch = dict[str, Tensor]
_ORDER = 2


@dataclass(frozen=True)
class Shape:
    """Rows (sentences) and columns (positions, on both sides)."""

    rows: int
    length: int


def best_lengths(lengths: np.ndarray, tokens: int, shapes: int) -> list[int]:
    """At most so many lengths to pad to, such that the fewest batches are needed.

    A batch padded to L has tokens // L rows: cost is the sum over sentences of 1 / rows. Dynamic
    programming over the lengths that occur.
    """
    values, counts = np.unique(lengths, return_counts=True)
    below = np.concatenate([[0], counts.cumsum()])
    costs = 1.0 / (tokens // values)
    n = len(values)
    best = np.where(np.arange(n + 1) == 0, 0.0, np.inf)
    choices = []
    for _ in range(min(shapes, n)):
        # best[j]: sentences of the first j lengths; the last shape takes lengths i to j.
        table = best[:, None] + (below[None, 1:] - below[:, None]) * costs[None, :]
        table[np.arange(n + 1)[:, None] > np.arange(n)[None, :]] = np.inf
        chosen = table.argmin(0)
        best = np.concatenate([[0.0], table[chosen, np.arange(n)]])
        choices.append(chosen)
    picked, j = [], n
    for chosen in reversed(choices):
        if j == 0:
            break
        picked.append(int(values[j - 1]))
        j = int(chosen[j - 1])
    return picked[::-1]


class TextFeed:
    """The batches of a task: order from (seed, epoch) alone, any of them can be reproduced.

    Sentences that do not fill a batch of their length go to the next longer one; what is left of
    the longest fills up with rows of padding, so every sentence is seen once an epoch. The first
    epoch begins with large batches: whether memory is enough shows at once, not after an hour.
    """

    resident_bytes = 0
    """Sentences and their order stay on the host."""
    in_place = False

    def __init__(
        self,
        task: TextTask,
        tokens: int,
        *,
        seed: int,
        device: torch.device,
        shapes: int = SHAPES,
    ) -> None:
        self.task, self.seed, self.device = task, seed, device
        longest = np.maximum(*(side.lengths for side in task.train))
        if tokens < longest.max():
            raise InputError(
                f"a batch of {tokens} tokens cannot hold a sentence of {longest.max()}",
                hint="a larger --batch",
            )
        self.shapes = [Shape(tokens // n, n) for n in best_lengths(longest, tokens, shapes)]
        self._members = self._sorted(longest)
        self._batches = self._count()
        self.steps_per_epoch = len(self._batches)
        self._epoch: int | None = None

    def _sorted(self, longest: np.ndarray) -> list[np.ndarray]:
        ends = np.array([shape.length for shape in self.shapes])
        which = np.searchsorted(ends, longest)
        return [np.flatnonzero(which == number) for number in range(len(ends))]

    def _count(self) -> list[int]:
        """The shape of every batch of an epoch; the same in each."""
        found, left = [], 0
        for number, (shape, members) in enumerate(zip(self.shapes, self._members, strict=True)):
            full, left = divmod(left + len(members), shape.rows)
            found += [number] * full
        return found + ([len(self.shapes) - 1] if left else [])

    @property
    def filled(self) -> float:
        """The part of all positions that is not padding."""
        held = sum(len(side.numbers) for side in self.task.train)
        shapes = [self.shapes[number] for number in self._batches]
        return held / (2 * sum(shape.rows * shape.length for shape in shapes))

    def _start(self, epoch: int) -> None:
        draw = np.random.Generator(np.random.PCG64([self.seed, _ORDER, epoch]))
        batches: list[tuple[Shape, np.ndarray]] = []
        left = np.empty(0, dtype=np.int64)
        for shape, members in zip(self.shapes, self._members, strict=True):
            waiting = draw.permutation(np.concatenate([left, members]))
            full = len(waiting) // shape.rows * shape.rows
            batches += [(shape, part) for part in waiting[:full].reshape(-1, shape.rows)]
            left = waiting[full:]
        if len(left):
            batches.append((self.shapes[-1], left))
        drawn = [batches[position] for position in draw.permutation(len(batches))]
        if epoch == 0:
            largest = _largest(self.shapes, None)
            large = [at for at, (shape, _) in enumerate(drawn) if shape == largest][:AHEAD]
            drawn = [drawn.pop(at) for at in reversed(large)] + drawn
        self._drawn, self._epoch = drawn, epoch

    def batch(self, epoch: int, number: int) -> TextBatch:
        """Batch `number` of an epoch, both counted from 0."""
        if epoch != self._epoch:
            self._start(epoch)
        shape, chosen = self._drawn[number]
        return self._sent(sides_in(self.task.train, chosen, shape))

    def sample(self, at_once: int | None = None) -> TextBatch:
        """A batch of the largest shape, all of it words: for predictions of memory.

        Where only `at_once` tokens run at once, two such parts of the shape in which they are the
        most: all others are like the second.
        """
        largest = _largest(self.shapes, at_once)
        count = min(largest.rows, (1 if at_once is None else 2) * _rows(largest, at_once))
        ones = torch.full((count, largest.length), len(SPECIAL))
        return {name: ones.clone() for name in ("source", "target_in", "target_out")}

    def _sent(self, batch: TextBatch) -> TextBatch:
        if self.device.type == "cpu":
            return batch
        # Pinned memory is used again only when the copy is done: the allocator sees to that.
        return {k: t.pin_memory().to(self.device, non_blocking=True) for k, t in batch.items()}

    def held_out(self, tokens: int) -> list[TextBatch]:
        """All of the validation set in batches of about so many tokens, by length."""
        return [
            self._sent(sides_in(self.task.valid, chosen, shape))
            for shape, chosen in by_length(
                np.maximum(*(s.lengths for s in self.task.valid)), tokens
            )
        ]


def _rows(shape: Shape, at_once: int | None) -> int:
    """Of a shape, that run at once."""
    return shape.rows if at_once is None else min(shape.rows, max(at_once // shape.length, 1))


def _largest(shapes: list[Shape], at_once: int | None) -> Shape:
    """Attention takes memory with the square of the length, and little of it."""
    return max(shapes, key=lambda s: _rows(s, at_once) * s.length * (256 + s.length))


def by_length(lengths: np.ndarray, tokens: int) -> list[tuple[Shape, np.ndarray]]:
    """All sentences, the short ones first, in batches of at most so many tokens (or one)."""
    order = np.argsort(lengths, kind="stable")
    made, start = [], 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and (stop + 1 - start) * lengths[order[stop]] <= tokens:
            stop += 1
        chosen = order[start:stop]
        made.append((Shape(len(chosen), int(lengths[chosen[-1]])), chosen))
        start = stop
    return made


def sides_in(sides: Sides, chosen: np.ndarray, shape: Shape) -> TextBatch:
    """The chosen pairs in tensors of the shape: the target as it is fed, and as it is asked for."""
    source, target = (side.padded(chosen, shape.rows, shape.length) for side in sides)
    fed = np.full_like(target, PADDING)
    fed[:, 0] = BEGIN
    fed[:, 1:] = np.where(target[:, 1:] == PADDING, PADDING, target[:, :-1])
    fed[len(chosen) :] = PADDING
    made = {"source": source, "target_in": fed, "target_out": target}
    return {name: torch.from_numpy(array) for name, array in made.items()}


def source_in(sentences: Sentences, chosen: np.ndarray, shape: Shape) -> Tensor:
    """The chosen sentences alone, to be translated."""
    return torch.from_numpy(sentences.padded(chosen, shape.rows, shape.length))


def target_tokens(part: TextBatch) -> Tensor:
    """The number a part's loss is averaged over; on the part's device, without waiting."""
    return (part["target_out"] != PADDING).sum()
