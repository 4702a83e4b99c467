"""IWSLT'14 German to English from the files as they are given out, by the usual recipe.

The recipe is fairseq's, whose data the report uses (Section 4.3): Moses tokens, pairs of 1 to 175
words whose lengths differ by a factor of 1.5 at most, lower case; every 23rd pair is for
validation, and the test is dev2010, dev2012, tst2010, tst2011 and tst2012. Tokens are
`sacremoses`', a port of the recipe's Perl.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from ... import files
from ...errors import InputError, needs_extra
from .corpus import MOST_BYTES, Corpus, Pairs, lines_of

LANGUAGES = ("de", "en")
TESTS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
VALIDATION_EVERY = 23
MOST_WORDS, LARGEST_RATIO = 175, 1.5
_ABOUT = re.compile(r"<(?:url|talkid|keywords)>")
_TAGS = re.compile(r"</?(?:title|description)>")
_SEGMENT = re.compile(r"<seg id=\"[0-9]*\">\s*(.*?)\s*</seg>\s*$")

Tokenize = Callable[[str], str]


def raw_files(folder: Path) -> dict[str, Path]:
    """Every file the recipe reads, by part and language."""
    found = {f"train.{lang}": folder / f"train.tags.de-en.{lang}" for lang in LANGUAGES}
    for part in TESTS:
        for lang in LANGUAGES:
            found[f"{part}.{lang}"] = folder / f"IWSLT14.{part}.de-en.{lang}.xml"
    return found


def is_raw(folder: Path) -> bool:
    """Whether the folder has the files as they are given out."""
    return (folder / "train.tags.de-en.de").is_file()


def raw_key(folder: Path) -> str:
    """Of all bytes that decide the result; to find what was made of them before."""
    digest = hashlib.sha256(b"1")
    for name, path in raw_files(folder).items():
        digest.update(name.encode() + hashlib.sha256(_read(path)).digest())
    return digest.hexdigest()[:12]


def raw_corpus(folder: Path, name: str) -> Corpus:
    """Tokens in lower case, cleaned and split into parts as the recipe does."""
    tokenize = {language: _tokenizer(language) for language in LANGUAGES}
    paths = raw_files(folder)
    sides = [_lines(paths[f"train.{lang}"], _training) for lang in LANGUAGES]
    _check_same(sides, "train.tags.de-en")
    pairs = zip(*([tokenize[k](s) for s in side] for k, side in _by_language(sides)), strict=True)
    kept = [(one, other) for one, other in pairs if fits(one, other)]
    parts = {
        "train": [p for n, p in enumerate(kept, start=1) if n % VALIDATION_EVERY],
        "valid": [p for n, p in enumerate(kept, start=1) if not n % VALIDATION_EVERY],
        "test": [],
    }
    for part in TESTS:
        sides = [_lines(paths[f"{part}.{lang}"], _segments) for lang in LANGUAGES]
        _check_same(sides, f"IWSLT14.{part}.de-en")
        tokens = ([tokenize[k](s) for s in side] for k, side in _by_language(sides))
        parts["test"] += zip(*tokens, strict=True)
    held = {}
    for part, lines in parts.items():
        source, target = ([pair[n].lower() for pair in lines] for n in (0, 1))
        first, second = (f"{part}, raw, {lang}" for lang in LANGUAGES)
        held[part] = Pairs(source, target, first, second)
    return Corpus(name, *LANGUAGES, held)


def fits(one: str, other: str) -> bool:
    """Whether a pair is trained on: by the number of its words."""
    counts = len(one.split()), len(other.split())
    least, most = min(counts), max(counts)
    return least >= 1 and most <= MOST_WORDS and most <= LARGEST_RATIO * least


def _by_language(sides: list[list[str]]) -> Iterable[tuple[str, list[str]]]:
    return zip(LANGUAGES, sides, strict=True)


def _tokenizer(language: str) -> Tokenize:
    with needs_extra("lab", "sacremoses", "tokenizing IWSLT'14"):
        from sacremoses import MosesTokenizer

    moses = MosesTokenizer(lang=language)
    return lambda line: str(moses.tokenize(line, return_str=True))


def _read(path: Path) -> bytes:
    try:
        return files.read(path, MOST_BYTES)
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror}",
            hint="all files of the archive de-en.tgz of IWSLT'14 must lie in one folder",
        ) from None


def _lines(path: Path, kept: Callable[[list[str]], list[str]]) -> list[str]:
    lines, damaged = lines_of(_read(path))
    if damaged:
        raise InputError(f"{path} is not UTF-8 in line {min(damaged) + 1:,}")
    return kept(lines)


def _training(lines: list[str]) -> list[str]:
    """Sentences, titles and descriptions; not what else is said about a talk."""
    return [_TAGS.sub("", line).strip() for line in lines if not _ABOUT.search(line)]


def _segments(lines: list[str]) -> list[str]:
    """The sentences of an XML file, one a line, with plain apostrophes."""
    found = (_SEGMENT.search(line) for line in lines)
    return [match[1].replace("\u2019", "'") for match in found if match]


def _check_same(sides: list[list[str]], name: str) -> None:
    if len(sides[0]) != len(sides[1]) or not sides[0]:
        raise InputError(
            f"{name} has {len(sides[0]):,} sentences in German and {len(sides[1]):,} in English",
            hint="the files must be those of the archive, unchanged",
        )
