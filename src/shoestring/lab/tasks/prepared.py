"""Text that went through BPE, in a folder: made once, small to carry, read in an instant."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InputError
from .bpe import Sentences, Vocabulary
from .corpus import Corpus, read_corpus
from .text import LONGEST, TextTask, encoded

FORMAT = 1
MERGES = 10_000
"""Of BPE, learnt on both languages together, as in the recipe of IWSLT'14."""
NOTES, CODES, PAIRS = "notes.json", "codes", "pairs.npz"
CACHE_VARIABLE = "SHOESTRING_CACHE"
_PARTS = ("train", "valid", "test")
_DAMAGED = (
    OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def is_prepared(folder: Path) -> bool:
    """Whether `save` wrote it."""
    return (folder / NOTES).is_file() and (folder / PAIRS).is_file()


def text_in(
    folder: Path,
    name: str,
    *,
    merges: int | None = None,
    languages: str | None = None,
    longest: int = LONGEST,
) -> TextTask:
    """The text of a folder, encoded; what was made before is found beside it, or in the cache.

    InputError where a folder was prepared with other merges or languages than those given.
    """
    if is_prepared(folder):
        task = load(folder)
        _check_same(task, folder, merges, languages)
        return task
    merges = MERGES if merges is None else merges
    corpus = read_corpus(folder, name, languages)
    inside = f"prepared-{merges}-{_key(corpus, merges, longest)}"
    places = [folder / inside, cache_folder() / f"{name}-{inside}"]
    if not folder.stat().st_mode & 0o222:  # nobody is to write there, an administrator neither
        places.pop(0)
    for place in places:
        if is_prepared(place):
            return load(place)
    task = encoded(corpus, merges=merges, longest=longest)
    for place in places:
        try:
            save(task, place)
            break
        except InputError:
            continue  # read-only: the next one; where none can be written it is made every time
    return task


def _check_same(task: TextTask, folder: Path, merges: int | None, languages: str | None) -> None:
    held = "-".join((task.source_language, task.target_language))
    if languages not in (None, held):
        raise InputError(
            f"{folder} was prepared from {held}, not {languages}",
            hint="leave out --languages, or prepare the text again",
        )
    made = task.notes["merges"]
    if merges not in (None, made, task.notes.get("merges_wanted")):
        raise InputError(
            f"{folder} was prepared with {'no' if made is None else f'{made:,}'} merges, "
            f"not {merges:,}",
            hint="leave out --merges, or prepare the text again",
        )


def numbers_prepared() -> TextTask:
    """The number words; the cache spares some seconds, and BPE where that is not installed."""
    from . import number_words

    inside = f"number_words-{number_words.VERSION}-{FORMAT}"
    place = cache_folder() / inside
    if is_prepared(place):
        return load(place)
    task = encoded(number_words.number_words(), merges=number_words.MERGES)
    with suppress(InputError):
        save(task, place)
    return task


def cache_folder() -> Path:
    """SHOESTRING_CACHE, or shoestring in the user's cache."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoestring"


def _key(corpus: Corpus, merges: int, longest: int) -> str:
    """Of all that decides the result."""
    digest = hashlib.sha256(json.dumps([FORMAT, merges, longest, corpus.codes]).encode())
    for name in _PARTS:
        pairs = corpus.parts[name]
        digest.update(json.dumps([name, pairs.source_file, pairs.target_file]).encode())
        for side in (pairs.source, pairs.target):
            digest.update("\n".join(side).encode())
    return digest.hexdigest()[:12]


def check_place(folder: Path) -> None:
    """InputError where `save` could not write: it replaces nothing."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there and not empty", hint="name another folder with --out")


def save(task: TextTask, folder: Path) -> None:
    """Write everything beside the place it goes to, and rename it: whole or not at all."""
    made = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".preparing-", dir=folder.parent))
        _write(task, made)
        made.chmod(0o755)
        made.rename(folder)
    except OSError as error:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        if not is_prepared(folder):  # somebody else was quicker
            raise InputError(f"cannot write {folder}: {error.strerror}") from None


def _write(task: TextTask, folder: Path) -> None:
    about = {
        "format": FORMAT,
        "name": task.name,
        "source_language": task.source_language,
        "target_language": task.target_language,
        "notes": task.notes,
    }
    (folder / NOTES).write_text(json.dumps(about, indent=1, ensure_ascii=False), encoding="utf-8")
    write_vocabularies(task, folder)
    for part in ("valid", "test"):
        lines = getattr(task, f"{part}_references")
        text = "".join(f"{line}\n" for line in lines)
        (folder / f"references.{part}").write_text(text, encoding="utf-8")
    arrays = {}
    for part in _PARTS:
        for side, sentences in zip(("source", "target"), getattr(task, part), strict=True):
            small = sentences.numbers.max(initial=0) < 2**16
            arrays[f"{part}_{side}"] = sentences.numbers.astype(np.uint16 if small else np.int32)
            arrays[f"{part}_{side}_lengths"] = sentences.lengths.astype(np.int32)
    np.savez_compressed(folder / PAIRS, **arrays)


def write_vocabularies(task: TextTask, folder: Path) -> None:
    """What a sentence needs on its way to numbers and back."""
    if task.codes is not None:
        (folder / CODES).write_text(task.codes, encoding="utf-8")
    for side in ("source", "target"):
        text = getattr(task, f"{side}_vocabulary").to_text()
        (folder / f"vocabulary.{side}").write_text(text, encoding="utf-8")


def read_vocabularies(folder: Path) -> tuple[str | None, Vocabulary, Vocabulary]:
    """Codes, source and target."""
    codes = folder / CODES
    try:
        source, target = (
            Vocabulary.from_text((folder / f"vocabulary.{side}").read_text(encoding="utf-8"))
            for side in ("source", "target")
        )
        return codes.read_text(encoding="utf-8") if codes.is_file() else None, source, target
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or error
        raise InputError(f"no vocabularies in {folder}: {said}") from None


def load(folder: Path) -> TextTask:
    """What `save` wrote."""
    try:
        about = json.loads((folder / NOTES).read_text(encoding="utf-8"))
        if about["format"] != FORMAT:
            raise InputError(f"{folder} was prepared by another version", hint="prepare it again")
        with (folder / PAIRS).open("rb") as file, np.load(file) as arrays:
            sides = {part: _sides(arrays, part) for part in _PARTS}
        references = {
            part: _lines((folder / f"references.{part}").read_text(encoding="utf-8"))
            for part in ("valid", "test")
        }
        codes, source, target = read_vocabularies(folder)
        for part, (one, other) in sides.items():
            _check_fits(part, one, other, source, target, references.get(part))
    except _DAMAGED as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{folder} is damaged: {error}", hint="remove it, and prepare the text again"
        ) from None
    return TextTask(
        name=about["name"],
        split="test",
        source_language=about["source_language"],
        target_language=about["target_language"],
        codes=codes,
        source_vocabulary=source,
        target_vocabulary=target,
        train=sides["train"],
        valid=sides["valid"],
        test=sides["test"],
        valid_references=references["valid"],
        test_references=references["test"],
        notes=about["notes"],
    )


def _check_fits(
    part: str,
    one: Sentences,
    other: Sentences,
    source: Vocabulary,
    target: Vocabulary,
    references: tuple[str, ...] | None,
) -> None:
    """ValueError where files of one folder are not of one text, or not whole."""
    counts = {len(one), len(other), len(one) if references is None else len(references)}
    if len(counts) > 1:
        raise ValueError(f"{part} has {min(counts)} and {max(counts)} sentences")
    for side, vocabulary in ((one, source), (other, target)):
        most = int(side.numbers.max(initial=0))
        if most >= len(vocabulary.pieces):
            raise ValueError(f"{part} has piece {most} of {len(vocabulary.pieces)}")


def _sides(arrays: Any, part: str) -> tuple[Sentences, Sentences]:
    made = []
    for side in ("source", "target"):
        lengths = arrays[f"{part}_{side}_lengths"].astype(np.int64)
        starts = np.concatenate([[0], lengths.cumsum()])
        numbers = arrays[f"{part}_{side}"].astype(np.int32)
        if starts[-1] != len(numbers):
            raise ValueError(f"{part} {side} has {len(numbers)} numbers, not {starts[-1]}")
        made.append(Sentences(numbers, starts))
    return made[0], made[1]


def _lines(text: str) -> tuple[str, ...]:
    return tuple(text.split("\n")[:-1])
