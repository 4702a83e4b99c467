"""Aligned text: a folder of train, valid and test in two languages → pairs of lines, and remarks.

Pairs that cannot be trained on are counted, and the numbers of their first lines are told.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import files
from ...errors import InputError

SPLITS: dict[str, tuple[str, ...]] = {
    "train": ("train",),
    "valid": ("valid", "val", "dev"),
    "test": ("test", "tst"),
}
"""How the names of their files may begin."""
CONTINUED = "@@"
"""Ends a piece of a word that goes on, in text after BPE; alone it is a word."""
_GOES_ON = re.compile(rf"(?<=\S){CONTINUED} ")
NAMED_LINES = 5
MOST_BYTES = 2**32
"""Of one side of a text: a small archive can unfold to more than any machine has."""
_OPEN: dict[str, Callable[..., Any]] = {
    ".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open,
}  # fmt: skip


class Remarks:
    """Remarks about the data: for each the number of lines, and the first line."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}

    def note(self, what: str, line: int) -> None:
        """Line `line`, counted from 1, is empty, not UTF-8, too long, …"""
        held = self.found.setdefault(what, {"pairs": 0, "first_lines": []})
        held["pairs"] += 1
        if len(held["first_lines"]) < NAMED_LINES:
            held["first_lines"].append(line)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """For the records."""
        return self.found


@dataclass
class Pairs:
    """Lines of one part, side by side."""

    source: list[str]
    target: list[str]
    source_file: str = ""
    target_file: str = ""
    damaged: frozenset[int] = frozenset()
    """Positions of pairs with bytes that are not UTF-8."""
    remarks: Remarks = field(default_factory=Remarks)

    def __len__(self) -> int:
        return len(self.source)


@dataclass
class Corpus:
    """Text to train on, to choose by, and to test on."""

    name: str
    source_language: str
    target_language: str
    parts: Mapping[str, Pairs]
    codes: str | None = None
    """Merges of BPE that came with the text."""


def read_corpus(folder: Path, name: str, languages: str | None = None) -> Corpus:
    """The standard layout: {train,valid,test}*.{de,en}, plain or compressed; codes if there.

    Of several files that fit, one without any addition to its name is taken, else the first.
    """
    source, target = _languages(folder, languages)
    parts = {}
    for split, beginnings in SPLITS.items():
        paths = [_find(folder, split, beginnings, language) for language in (source, target)]
        parts[split] = _read_pairs(*paths)
    return Corpus(name, source, target, parts, _codes(folder))


def _languages(folder: Path, wanted: str | None) -> tuple[str, str]:
    found = set()
    for path in folder.iterdir():
        match = re.fullmatch(r"train.*\.((?!xz|gz)[a-z]{2,3})(\.xz|\.gz|\.bz2)?", path.name)
        if match:
            found.add(match[1])
    if wanted is None and {"de", "en"} <= found:
        return "de", "en"
    pair = (wanted or "").split("-")
    if len(pair) == 2 and all(re.fullmatch(r"[a-z]{2,3}", language) for language in pair):
        return pair[0], pair[1]
    if wanted is not None:
        raise InputError(f"cannot read the languages {wanted!r}", hint="such as de-en")
    if not found:
        raise InputError(
            f"no text to train on in {folder}",
            hint="files train.de, train.en, valid.de, … (or .xz, .gz), one sentence a line",
        )
    raise InputError(
        f"{folder} has {', '.join(sorted(found))}: from which language to which?",
        hint="say it with --languages, such as --languages fr-en",
    )


def _find(folder: Path, split: str, beginnings: Iterable[str], language: str) -> Path:
    fitting = []
    for path in folder.iterdir():
        for rank, beginning in enumerate(beginnings):
            name = rf"{beginning}(?:[._-].*)?\.{language}(?:\.xz|\.gz|\.bz2)?"
            if re.fullmatch(name, path.name):
                added = path.name.count(".") + path.name.count("_") + path.name.count("-")
                plain = re.fullmatch(rf"{beginning}\.{language}(\.\w+)?", path.name) is None
                fitting.append((plain, rank, added, path.name, path))
    if not fitting:
        raise InputError(
            f"{folder} has no {split}.{language}", hint="the layout is train, valid, test.{de,en}"
        )
    return min(fitting)[-1]


def _read_pairs(source: Path, target: Path) -> Pairs:
    pairs = Pairs([], [], source.name, target.name)
    bad: set[int] = set()
    sides = []
    for path in (source, target):
        lines, damaged = read_lines(path)
        bad |= damaged
        sides.append(lines)
    pairs.source, pairs.target = _same_length(pairs, sides)
    if not len(pairs):
        raise InputError(
            f"{source} and {target.name} have no lines",
            hint="training needs a train, a valid and a test part, one sentence a line",
        )
    pairs.damaged = frozenset(position for position in bad if position < len(pairs))
    for position in sorted(pairs.damaged):
        pairs.remarks.note("not UTF-8", position + 1)
    for position, (one, other) in enumerate(zip(pairs.source, pairs.target, strict=True)):
        if not one or not other:
            pairs.remarks.note("empty", position + 1)
    return pairs


def _same_length(pairs: Pairs, sides: list[list[str]]) -> tuple[list[str], list[str]]:
    """Empty lines at the end of one side belong to nothing; more than that is another text."""
    shorter = min(len(side) for side in sides)
    for side in sides:
        if any(side[shorter:]):
            raise InputError(
                f"{pairs.source_file} has {len(sides[0]):,} lines, {pairs.target_file} "
                f"{len(sides[1]):,}",
                hint="line n of one file must translate line n of the other",
            )
        for line in range(shorter, len(side)):
            pairs.remarks.note("empty line after the other side's end", line + 1)
    return sides[0][:shorter], sides[1][:shorter]


def read_lines(path: Path) -> tuple[list[str], set[int]]:
    """The lines of a file, single spaces between words, and which were not UTF-8.

    Only a line feed ends a line: Unicode has more that do, and a text that uses one inside of a
    sentence would lose its alignment.
    """
    try:
        packed = files.read(path, MOST_BYTES)
        opened = _OPEN.get(path.suffix)
        data = packed
        if opened is not None:
            with opened(io.BytesIO(packed)) as file:
                data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise EOFError(f"more than {MOST_BYTES:,} bytes")
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError, MemoryError) as error:
        said = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {path}: {said}") from None
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(f"{path} is UTF-16, not UTF-8", hint="iconv -f UTF-16 -t UTF-8")
    return lines_of(data)


def lines_of(data: bytes) -> tuple[list[str], set[int]]:
    """The same of bytes; the mark that some editors put before a text is not part of it."""
    raw = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    if not raw[-1]:
        raw.pop()
    lines, damaged = [], set()
    for position, one in enumerate(raw):
        try:
            text = one.decode("utf-8")
        except UnicodeDecodeError:
            text = one.decode("utf-8", errors="replace")
            damaged.add(position)
        lines.append(" ".join(text.split()))
    return lines, damaged


def _codes(folder: Path) -> str | None:
    for path in sorted(folder.iterdir()):
        if re.fullmatch(r"(codes?|bpe[\w-]*codes?)(\.xz|\.gz|\.bz2)?", path.name):
            return "\n".join(read_lines(path)[0]) + "\n"
    return None


def is_split(lines: list[str]) -> bool:
    """Whether a text went through BPE already: a word that goes on, in one line of a hundred."""
    marked = sum(_GOES_ON.search(line) is not None for line in lines)
    return marked * 100 > len(lines)


def joined(line: str) -> str:
    """Words of pieces."""
    return _GOES_ON.sub("", line + " ").removesuffix(" ")
