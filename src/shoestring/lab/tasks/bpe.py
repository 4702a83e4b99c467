"""Words in pieces: byte-pair encoding by `subword-nmt` (Sennrich et al., 2016); vocabularies."""

from __future__ import annotations

import importlib
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType

import numpy as np

from ...errors import InputError, needs_extra

BEGIN, PADDING, END, UNKNOWN = range(4)
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
ROUND_TO = 8
"""Vocabularies have a multiple of so many entries, as fairseq's: matrix units like it."""


def _subword_nmt(name: str) -> ModuleType:
    with needs_extra("lab", "subword-nmt", "splitting words into pieces"):
        return importlib.import_module(f"subword_nmt.{name}")


def learn(lines: Iterable[str], merges: int) -> str:
    """The codes of a text: `merges` times the most frequent pair becomes one piece."""
    module = _subword_nmt("learn_bpe")
    out = io.StringIO()
    # It shows a bar, and says that no pair comes twice any more; where none is left at all it fails
    # after all codes were written.
    with redirect_stderr(io.StringIO()), suppress(ValueError):
        module.learn_bpe(lines, out, merges)
    return out.getvalue()


def merges_in(codes: str) -> int:
    """How many pairs codes have; InputError for what cannot be read."""
    lines = codes.splitlines()
    first = 1 if lines and lines[0].startswith("#version") else 0
    if first and lines[0] not in ("#version: 0.1", "#version: 0.2"):
        raise InputError(f"the BPE codes begin with {lines[0]!r}", hint="versions are 0.1 and 0.2")
    for number, line in enumerate(lines[first:], start=first + 1):
        if len(line.split(" ")) != 2:
            raise InputError(f"line {number} of the BPE codes is not a pair: {line!r}")
    return len(lines) - first


class Pieces:
    """Splits lines by codes."""

    def __init__(self, codes: str) -> None:
        # Without the number it takes codes of no pair for a wrong one, and ends the process.
        self._bpe = _subword_nmt("apply_bpe").BPE(io.StringIO(codes), merges=merges_in(codes))

    def __call__(self, line: str) -> str:
        return self._bpe.process_line(line)


@dataclass(frozen=True)
class Vocabulary:
    """Pieces of one language by number, the special ones first, then by frequency."""

    pieces: tuple[str, ...]

    @classmethod
    def of(cls, lines: Iterable[str]) -> Vocabulary:
        """All pieces of a text; of equally frequent ones the first in the alphabet first."""
        counts: Counter[str] = Counter()
        for line in lines:
            counts.update(line.split())
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return cls((*SPECIAL, *(piece for piece, _ in ordered if piece not in SPECIAL)))

    @property
    def size(self) -> int:
        """With what rounds it up."""
        return -(-len(self.pieces) // ROUND_TO) * ROUND_TO

    @cached_property
    def _numbers(self) -> dict[str, int]:
        # A word of the text that is spelt like a special piece is none: it would end a sentence.
        return {piece: n for n, piece in enumerate(self.pieces) if n >= len(SPECIAL)}

    def encode(self, line: str) -> list[int]:
        """Numbers of the pieces of a line, and the end."""
        held = self._numbers
        return [*(held.get(piece, UNKNOWN) for piece in line.split()), END]

    def decode(self, numbers: Sequence[int]) -> str:
        """The line up to its end, in pieces."""
        shown = []
        for number in numbers:
            if number == END:
                break
            if number not in (BEGIN, PADDING):
                known = number < len(self.pieces)
                shown.append(self.pieces[number] if known else SPECIAL[UNKNOWN])
        return " ".join(shown)

    def to_text(self) -> str:
        """One piece a line."""
        return "".join(f"{piece}\n" for piece in self.pieces)

    @classmethod
    def from_text(cls, text: str) -> Vocabulary:
        """Read the text of `to_text`."""
        pieces = tuple(text.split("\n")[:-1])
        if pieces[: len(SPECIAL)] != SPECIAL:
            raise InputError("not a vocabulary", hint="it begins with " + " ".join(SPECIAL))
        return cls(pieces)


@dataclass(frozen=True)
class Sentences:
    """Many sentences as numbers: all in one row, with the place where each begins."""

    numbers: np.ndarray
    starts: np.ndarray
    """One more than there are sentences."""

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Sentences:
        """From one list for each."""
        lengths = np.array([len(one) for one in lists], dtype=np.int64)
        flat = np.fromiter((n for one in lists for n in one), np.int32, int(lengths.sum()))
        return cls(flat, np.concatenate([[0], lengths.cumsum()]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """In pieces, the end counted."""
        return np.diff(self.starts)

    def __getitem__(self, position: int) -> list[int]:
        return self.numbers[self.starts[position] : self.starts[position + 1]].tolist()

    def padded(self, chosen: np.ndarray, rows: int, length: int) -> np.ndarray:
        """The chosen ones in a matrix (rows, length) with padding to the right and below."""
        made = np.full((rows, length), PADDING, dtype=np.int64)
        columns = np.arange(length)
        lengths = self.lengths[chosen]
        inside = columns < lengths[:, None]
        places = np.minimum(self.starts[chosen][:, None] + columns, len(self.numbers) - 1)
        made[: len(chosen)][inside] = self.numbers[places][inside]
        return made
