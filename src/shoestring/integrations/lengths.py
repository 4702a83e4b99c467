"""How long the examples of a data set are, and what that means for a plan.

Batches are padded to their longest example, and data are shuffled: the worst batch has the longest
example of all. A plan for it holds for every other one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BudgetError, InputError, first_line
from ..step.predict import evaluation_bytes
from ..units import format_size, plural
from .configurations import Configured, loss_of
from .sizes import Sizes

_TOKENS = b'"input_ids"'
_TEXTS = ("text", "prompt", "completion", "content")
_HINT = "a number of tokens on each line, or JSON lines with input_ids, length or text"
_CHUNK = 1000
_MOST = 10**18
"""Tokens of a line: more would not go into an array."""
_NAMED = 3


@dataclass(frozen=True)
class Lengths:
    """Tokens of every example of a file."""

    name: str
    tokens: np.ndarray[Any, np.dtype[np.int64]]
    lines: np.ndarray[Any, np.dtype[np.int64]]
    """Where each example stands."""

    @classmethod
    def read(cls, name: str, model: str = "") -> Lengths:
        """From a file; texts are cut by the tokenizer beside the model's configuration."""
        path = Path(name)
        if not path.is_file():
            raise InputError(f"there is no file {name}", hint=_HINT)
        if path.suffix == ".npy":
            found = _array(path)
            lines = np.arange(1, len(found) + 1)
        elif path.suffix in (".jsonl", ".json", ".ndjson"):
            found, lines = _json_lines(path, model)
        else:
            found, lines = _numbers(path)
        if not len(found):
            raise InputError(f"{name} has no examples", hint=_HINT)
        if found.min() < 1:
            worst = int(lines[int(found.argmin())])
            raise InputError(f"{name}: line {worst} has no tokens", hint="leave that line out")
        return cls(name, found, lines)

    @property
    def longest(self) -> int:
        """Of all examples."""
        return int(self.tokens.max())

    def cut(self, most: int | None) -> Lengths:
        """As a trainer cuts them, to so many tokens."""
        if most is None:
            return self
        return Lengths(self.name, np.minimum(self.tokens, most), self.lines)

    def over(self, tokens: int) -> str:
        """Which examples are longer, the longest first; "" for none."""
        some = np.flatnonzero(self.tokens > tokens)
        if not len(some):
            return ""
        first = some[np.argsort(-self.tokens[some], kind="stable")][:_NAMED]
        named = ", ".join(f"line {self.lines[i]:,}: {self.tokens[i]:,} tokens" for i in first)
        more = ", …" * (len(some) > _NAMED)
        return f"{len(some):,} of {plural(len(self.tokens), 'example')} ({named}{more})"

    def __str__(self) -> str:
        at = int(self.tokens.argmax())
        return (
            f"{plural(len(self.tokens), 'example')} in {self.name}, the longest has "
            f"{self.longest:,} tokens (line {self.lines[at]:,}), half of them at most "
            f"{int(np.median(self.tokens)):,}"
        )


def too_long(error: BudgetError, lengths: Lengths, sizes: Sizes, budget_bytes: int) -> BudgetError:
    """The error for a data set: which examples do not fit, and where to cut them."""
    room = sizes.margin.limit(budget_bytes)
    fits = sizes.largest("tokens", room, room)
    over = lengths.over(fits)
    if not over:
        return error
    told = f"no plan fits {lengths.name}: {over} are longer than the {fits:,} tokens that fit"
    hint = f"cut them: --tokens {fits}; or leave those lines out" if fits else error.hint
    return BudgetError(told, hint=hint, smallest_bytes=error.smallest_bytes)


def check_evaluation(model: Configured, optimizer: str, limit_bytes: int) -> int:
    """Bytes of an evaluation; BudgetError with the batch that fits where this one does not."""
    needed = _evaluated(model, optimizer)
    if needed <= limit_bytes:
        return needed
    one = _evaluated(model.sized(batch=1), optimizer)
    each = (needed - one) / max(model.batch - 1, 1)
    fits = int(1 + (limit_bytes - one) / max(each, 1)) if one <= limit_bytes else 0
    told = f"evaluation of {model.batch} × {model.tokens:,} tokens takes {format_size(needed)}"
    raise BudgetError(
        f"{told}, and {format_size(limit_bytes)} are free for it",
        hint=f"evaluate {fits} at a time" if fits else "cut the examples that are evaluated",
    )


def _evaluated(model: Configured, optimizer: str) -> int:
    built, batch = model.build()
    return evaluation_bytes(built, batch, loss=loss_of, optimizer=optimizer, device="cuda")


def _array(path: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    try:
        with np.errstate(invalid="raise"):
            return np.load(path, allow_pickle=False).astype(np.int64).ravel()
    except Exception as error:  # damaged files raise nearly anything
        raise InputError(f"{path} cannot be read: {first_line(error)}", hint=_HINT) from None


def _numbers(path: Path) -> tuple[Any, Any]:
    lines = path.read_bytes().splitlines()
    where = np.array([n for n, line in enumerate(lines, 1) if line.strip()], dtype=np.int64)
    try:
        return np.array([int(line) for line in lines if line.strip()], dtype=np.int64), where
    except (ValueError, OverflowError):
        wrong = next(n for n, line in enumerate(lines, 1) if line.strip() and not _whole(line))
        raise InputError(f"{path}: line {wrong} is not a number of tokens", hint=_HINT) from None


def _whole(line: bytes) -> bool:
    return line.strip().isdigit() and len(line.strip()) < 19


def _json_lines(path: Path, model: str) -> tuple[Any, Any]:
    found, where, texts = [], [], _Texts(path, model)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            start = line.find(_TOKENS)
            if start >= 0 and (start := line.find(b"[", start)) >= 0:
                # Counting commas takes a hundredth of reading numbers.
                stop = line.find(b"]", start)
                inside = line[start + 1 : stop]
                found.append(inside.count(b",") + 1 if inside.strip() else 0)
            elif line.strip():
                found.append(texts.length(line, number, len(found)))
            else:
                continue
            where.append(number)
    counts = np.array(found, dtype=np.int64)
    for place, count in texts.rest():
        counts[place] = count
    return counts, np.array(where, dtype=np.int64)


class _Texts:
    """Lines without tokens: a length, or texts that a tokenizer cuts, many at a time."""

    def __init__(self, path: Path, model: str) -> None:
        self._path, self._model = path, model
        self._tokenizer: Any = None
        self._waiting: list[tuple[int, str]] = []
        self._counted: list[tuple[int, int]] = []

    def length(self, line: bytes, number: int, place: int) -> int:
        try:
            held = json.loads(line)
            text = "\n".join(_texts_in(held)).encode(errors="replace").decode()
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{self._path}: line {number} is not JSON: {first_line(error)}", hint=_HINT
            ) from None
        length = held.get("length") if isinstance(held, dict) else held
        if type(length) is int and abs(length) < _MOST:
            return length
        if not text:
            raise InputError(
                f"{self._path}: line {number} has no input_ids, length or text", hint=_HINT
            )
        self._tokenizer = self._tokenizer or self._made()
        self._waiting.append((place, text))
        if len(self._waiting) == _CHUNK:
            self._count()
        return 1

    def rest(self) -> list[tuple[int, int]]:
        """Place and tokens of every text."""
        self._count()
        return self._counted

    def _count(self) -> None:
        if self._waiting:
            cut = self._tokenizer([text for _, text in self._waiting])["input_ids"]
            for (place, _), tokens in zip(self._waiting, cut, strict=True):
                self._counted.append((place, len(tokens)))
            self._waiting = []

    def _made(self) -> Any:
        name = self._model.removeprefix("hf:")
        hint = "a folder with a tokenizer beside config.json, or --lengths with tokens of each line"
        try:
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(
                name, local_files_only=Path(name).exists(), trust_remote_code=False
            )
        except Exception as error:
            raise InputError(
                f"{self._path} has texts, and {name or 'the model'} no tokenizer: "
                f"{first_line(error)[:120]}",
                hint=hint,
            ) from None


def _texts_in(held: Any) -> Iterator[str]:
    """All that a tokenizer is given, as chats, instructions and plain texts have it."""
    if isinstance(held, dict):
        for key, value in held.items():
            if isinstance(value, str) and key in _TEXTS:
                yield value
            elif isinstance(value, (list, dict)):
                yield from _texts_in(value)
    elif isinstance(held, list):
        for value in held:
            yield from _texts_in(value)
