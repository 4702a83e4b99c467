"""Text to translate: sentences in pieces, as numbers, with what decodes and scores them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

from ...errors import InputError
from .bpe import Pieces, Sentences, Vocabulary, learn, merges_in
from .corpus import Corpus, Pairs, Remarks, is_split, joined

LONGEST = 250
"""Pieces of a sentence, its end counted, that is trained on: the report's microbatch."""

Sides = tuple[Sentences, Sentences]
"""Source and target."""


@dataclass(frozen=True)
class TextTask:
    """Pairs of sentences in two languages, in pieces and encoded."""

    name: str
    split: str
    """The set that BLEU is computed on: test or validation."""
    source_language: str
    target_language: str
    codes: str | None
    """Merges of BPE; None where the text came in pieces, without them."""
    source_vocabulary: Vocabulary
    target_vocabulary: Vocabulary
    train: Sides
    valid: Sides
    test: Sides
    valid_references: tuple[str, ...]
    test_references: tuple[str, ...]
    """Words of the target, not pieces: what translations are compared with."""
    notes: dict[str, Any]
    """Files, counts, and what could not be used; plain values for the records."""

    unit: ClassVar[str] = "tokens"
    """The unit of a minibatch's size."""
    written_in_place: ClassVar[bool] = False
    """Minibatches have several shapes: each is a tensor of its own."""

    @property
    def threads(self) -> int | None:
        """Kernels as small as those of number words gain nothing from more than one.

        On a busy machine they wait for each other: with two threads they took eight times the
        processor's time.
        """
        return 1 if self.name == "number_words" else None

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on text that cannot be trained on as it is."""
        lines = []
        for part, found in self.notes["remarks"].items():
            for what, held in found.items():
                first = ", ".join(f"{line:,}" for line in held["first_lines"])
                more = ", …" if held["pairs"] > len(held["first_lines"]) else ""
                lines.append(
                    f"{self.name}, {part}: {held['pairs']:,} pairs {what} (line {first}{more})"
                )
        return tuple(lines)

    @property
    def scored(self) -> tuple[Sentences, tuple[str, ...]]:
        """The sentences to translate, and what should come out."""
        if self.split == "validation":
            return self.valid[0], self.valid_references
        return self.test[0], self.test_references

    def with_split(self, split: str) -> TextTask:
        """The same, scored on the other part."""
        return replace(self, split=split)


class TextEncoder:
    """Words → pieces → numbers."""

    def __init__(self, codes: str | None, vocabulary: Vocabulary) -> None:
        self._pieces = None if codes is None else Pieces(codes)
        self._vocabulary = vocabulary

    def __call__(self, line: str) -> list[int]:
        words = " ".join(line.split())
        if self._pieces is not None:  # what came in pieces is split again, as for training
            words = self._pieces(joined(words))
        return self._vocabulary.encode(words)


def encoded(corpus: Corpus, *, merges: int, longest: int = LONGEST) -> TextTask:
    """Learn codes on both languages together, vocabularies on each alone, and encode all of it.

    Text that comes in pieces stays so. A training pair that is empty, damaged or longer than
    `longest` is left out and remarked on; what is evaluated on is kept whatever it is.
    """
    train = corpus.parts["train"]
    good = [
        position
        for position in range(len(train))
        if train.source[position] and train.target[position] and position not in train.damaged
    ]
    if not good:
        raise InputError(f"{corpus.name} has no pair of sentences to train on")
    source, target = ([side[p] for p in good] for side in (train.source, train.target))
    codes, learnt = corpus.codes, {}
    if codes is None and not (is_split(source) and is_split(target)):
        words = chain(_words(source), _words(target))
        codes, learnt = learn(words, merges), {"merges_wanted": merges}
    pieces = _Splitter(codes, train.remarks)
    in_pieces = [pieces(source, train.source_file), pieces(target, train.target_file)]
    vocabularies = [Vocabulary.of(lines) for lines in in_pieces]
    sides = [[v.encode(ln) for ln in lns] for v, lns in zip(vocabularies, in_pieces, strict=True)]
    kept = _short_enough(sides, good, longest, train.remarks)
    used = tuple(Sentences.of([side[k] for k in kept]) for side in sides)
    held = {}
    for name in ("valid", "test"):
        pairs = corpus.parts[name]
        lines = pieces(pairs.source, pairs.source_file), pieces(pairs.target, pairs.target_file)
        held[name] = tuple(
            Sentences.of([v.encode(line) for line in side])
            for v, side in zip(vocabularies, lines, strict=True)
        )
    return TextTask(
        name=corpus.name,
        split="test",
        source_language=corpus.source_language,
        target_language=corpus.target_language,
        codes=codes,
        source_vocabulary=vocabularies[0],
        target_vocabulary=vocabularies[1],
        train=used,  # type: ignore[arg-type]
        valid=held["valid"],  # type: ignore[arg-type]
        test=held["test"],  # type: ignore[arg-type]
        valid_references=_words(corpus.parts["valid"].target),
        test_references=_words(corpus.parts["test"].target),
        notes={**_notes(corpus, used, vocabularies, codes), **learnt},
    )


def _words(lines: list[str]) -> tuple[str, ...]:
    """The text as it was before it went through BPE, if it did."""
    return tuple(joined(line) for line in lines) if is_split(lines) else tuple(lines)


class _Splitter:
    """Lines in pieces, whether they come so or not."""

    def __init__(self, codes: str | None, remarks: Remarks) -> None:
        self._codes, self._remarks = codes, remarks
        self._pieces: Pieces | None = None

    def __call__(self, lines: list[str], file: str) -> list[str]:
        came_split = is_split(lines)
        if self._codes is None:
            if came_split:
                return lines
            raise InputError(
                f"{file} is not in pieces, but the text to train on is, and no codes came with it",
                hint="put the codes it was made with beside it, in a file called code",
            )
        self._pieces = self._pieces or Pieces(self._codes)
        if not came_split:
            return [self._pieces(line) for line in lines]
        made = [self._pieces(joined(line)) for line in lines]
        other = [n for n, (one, two) in enumerate(zip(lines, made, strict=True)) if one != two]
        for position in other:
            self._remarks.note(f"{file}: split again, by the codes beside it", position + 1)
        return made


def _short_enough(
    sides: list[list[list[int]]], lines: list[int], longest: int, remarks: Remarks
) -> list[int]:
    kept = []
    for position, pair in enumerate(zip(*sides, strict=True)):
        if max(len(one) for one in pair) <= longest:
            kept.append(position)
        else:
            remarks.note(f"longer than {longest} pieces", lines[position] + 1)
    if not kept:
        raise InputError(f"every sentence to train on is longer than {longest} pieces")
    return kept


def _notes(
    corpus: Corpus, used: tuple[Sentences, ...], vocabularies: list[Vocabulary], codes: str | None
) -> dict[str, Any]:
    languages = (corpus.source_language, corpus.target_language)

    def files(pairs: Pairs) -> list[str]:
        return [pairs.source_file, pairs.target_file]

    return {
        "languages": list(languages),
        "files": {name: files(pairs) for name, pairs in corpus.parts.items()},
        "pairs": {name: len(pairs) for name, pairs in corpus.parts.items()},
        "pairs_trained_on": len(used[0]),
        "tokens_trained_on": [len(side.numbers) for side in used],
        "vocabulary": [len(vocabulary.pieces) for vocabulary in vocabularies],
        "merges": None if codes is None else merges_in(codes),
        "remarks": {
            name: pairs.remarks.as_dict()
            for name, pairs in corpus.parts.items()
            if pairs.remarks.as_dict()
        },
    }
