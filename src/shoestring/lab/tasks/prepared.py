"""Text that went through BPE, in a folder: made once, small to carry, read in an instant."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tempfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ... import files
from ...errors import InputError, first_line
from . import iwslt14
from .bpe import Sentences, Vocabulary, merges_in
from .corpus import Corpus, read_corpus
from .text import LONGEST, TextTask, encoded

FORMAT = 1
MERGES = 10_000
"""Of BPE, learnt on both languages together, as in the recipe of IWSLT'14."""
NOTES, CODES, PAIRS = "notes.json", "codes", "pairs.npz"
CACHE_VARIABLE = "SHOESTRING_CACHE"
_PARTS = ("train", "valid", "test")
_PREPARING = ".preparing-"
_STALE_SECONDS = 86_400
MOST_BYTES = 2**33
"""Of a text in memory: a small archive can unfold to more than any machine has."""


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
    raw = iwslt14.is_raw(folder)
    if raw and languages not in (None, "de-en"):
        raise InputError(f"{folder} is IWSLT'14 from German to English, not {languages}")
    corpus = None if raw else read_corpus(folder, name, languages)
    key = _key(corpus, merges, longest) if corpus is not None else iwslt14.raw_key(folder)
    inside = f"prepared-{merges}-{key}"
    places = [folder / inside, cache_folder() / f"{name}-{inside}"]
    if not folder.stat().st_mode & 0o222:  # nobody is to write there, an administrator neither
        places.pop(0)
    for place in places:
        if is_prepared(place):
            return load(place)
    corpus = corpus or iwslt14.raw_corpus(folder, name)
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
        _remove_stale(folder.parent)
        made = Path(tempfile.mkdtemp(prefix=_PREPARING, dir=folder.parent))
        _write(task, made)
        made.chmod(0o755)
        files.flush_names(made)
        made.rename(folder)
        files.flush_names(folder.parent)
    except OSError as error:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        if not is_prepared(folder):  # somebody else was quicker
            raise InputError(f"cannot write {folder}: {error.strerror}") from None


def _remove_stale(parent: Path) -> None:
    """Remove the rest of a killed process; preparing a text never takes a day."""
    for left in parent.glob(f"{_PREPARING}*"):
        with suppress(OSError):
            if abs(time.time() - left.stat().st_mtime) > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _write(task: TextTask, folder: Path) -> None:
    about = {
        "format": FORMAT,
        "name": task.name,
        "source_language": task.source_language,
        "target_language": task.target_language,
        "notes": task.notes,
    }
    _put(folder / NOTES, files.json_text(about, indent=1))
    write_vocabularies(task, folder)
    for part in ("valid", "test"):
        lines = getattr(task, f"{part}_references")
        text = "".join(f"{line}\n" for line in lines)
        _put(folder / f"references.{part}", text)
    arrays = {}
    for part in _PARTS:
        for side, sentences in zip(("source", "target"), getattr(task, part), strict=True):
            small = sentences.numbers.max(initial=0) < 2**16
            arrays[f"{part}_{side}"] = sentences.numbers.astype(np.uint16 if small else np.int32)
            arrays[f"{part}_{side}_lengths"] = sentences.lengths.astype(np.int32)
    held = io.BytesIO()
    np.savez_compressed(held, **arrays)
    files.write(folder / PAIRS, held.getbuffer())


def _put(path: Path, text: str) -> None:
    files.write(path, text.encode(errors="backslashreplace"))


def write_vocabularies(task: TextTask, folder: Path) -> None:
    """Converts a sentence to numbers and back."""
    if task.codes is not None:
        _put(folder / CODES, task.codes)
    for side in ("source", "target"):
        text = getattr(task, f"{side}_vocabulary").to_text()
        _put(folder / f"vocabulary.{side}", text)


def read_vocabularies(folder: Path) -> tuple[str | None, Vocabulary, Vocabulary]:
    """Codes, source and target."""
    codes = folder / CODES
    try:
        source, target = (
            Vocabulary.from_text(_text(folder / f"vocabulary.{side}"))
            for side in ("source", "target")
        )
        return _text(codes) if codes.exists() else None, source, target
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or error
        raise InputError(f"no vocabularies in {folder}: {said}") from None


def _text(path: Path) -> str:
    """With its line ends as they are."""
    return files.read(path, MOST_BYTES).decode()


def load(folder: Path) -> TextTask:
    """Read a file of `save`; InputError for any other file, from any source."""
    try:
        about = json.loads(_text(folder / NOTES))
        if about["format"] != FORMAT:
            raise InputError(f"{folder} was prepared by another version", hint="prepare it again")
        _check_about(about)
        sides = _all_sides(files.read(folder / PAIRS, MOST_BYTES))
        references = {
            part: _lines(_text(folder / f"references.{part}")) for part in ("valid", "test")
        }
        codes, source, target = read_vocabularies(folder)
        if codes is not None:
            merges_in(codes)
        for part, (one, other) in sides.items():
            _check_fits(part, one, other, source, target, references.get(part))
    except InputError:
        raise
    except Exception as error:  # a file that was changed by hand can raise anything
        raise InputError(
            f"{folder} is damaged: {first_line(error)}",
            hint="remove it, and prepare the text again",
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


def _check_about(about: dict[str, Any]) -> None:
    """ValueError where the notes are not those of a text."""
    notes, names = about["notes"], ("name", "source_language", "target_language")
    if not all(type(about[name]) is str and about[name].isprintable() for name in names):
        raise ValueError("its name or a language is not a text")
    for wanted in ("merges", "merges_wanted"):
        if not (notes.get(wanted) is None or type(notes[wanted]) is int):
            raise ValueError(f"{wanted} is not a whole number")
    for found in notes["remarks"].values():
        for held in found.values():
            numbers = [held["pairs"], *held["first_lines"]]
            if not all(type(number) is int for number in numbers):
                raise ValueError("a remark that counts nothing")


def _all_sides(data: bytes) -> dict[str, tuple[Sentences, Sentences]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        unfolded = sum(entry.file_size for entry in archive.infolist())
        if unfolded > MOST_BYTES:
            raise ValueError(f"{PAIRS} unfolds to {unfolded:,} bytes")
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return {part: _sides(arrays, part) for part in _PARTS}


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
    if not len(one):
        raise ValueError(f"{part} has no sentences")
    for side, vocabulary in ((one, source), (other, target)):
        if int(side.numbers.min()) < 0:
            raise ValueError(f"{part} has a piece below 0")
        most = int(side.numbers.max(initial=0))
        if most >= len(vocabulary.pieces):
            raise ValueError(f"{part} has piece {most} of {len(vocabulary.pieces)}")


def _sides(arrays: Any, part: str) -> tuple[Sentences, Sentences]:
    made = []
    for side in ("source", "target"):
        held = arrays[f"{part}_{side}_lengths"], arrays[f"{part}_{side}"]
        if any(one.dtype.kind not in "iu" or one.ndim != 1 for one in held):
            raise ValueError(f"{part} {side} is not whole numbers in a row")
        lengths, numbers = held[0].astype(np.int64), held[1].astype(np.int32)
        if lengths.min(initial=1) < 1 or lengths.max(initial=1) > len(numbers):
            raise ValueError(f"{part} {side} has a sentence without words, or without an end")
        starts = np.concatenate([[0], lengths.cumsum()])
        if starts[-1] != len(numbers):
            raise ValueError(f"{part} {side} has {len(numbers)} numbers, not {starts[-1]}")
        made.append(Sentences(numbers, starts))
    return made[0], made[1]


def _lines(text: str) -> tuple[str, ...]:
    return tuple(text.split("\n")[:-1])
