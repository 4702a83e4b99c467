"""The items of a schedule: how each block is recomputed, as a value and as text.

A sequence of items, one after the other. An item is a *leaf*, one block that keeps all that
backward reads ("keep"), all but outputs of normalizations and activations ("cheap"), all but
those and products that are much larger than what they read ("lean"), or a *region*, a tuple of
items of which only the input is kept and which is recomputed as a whole. In text a region stands in
brackets, `*` repeats, and `recompute` is `[keep]`, a region of one block:

    keep*3, cheap, recompute*8, [keep*2, [cheap*2], keep]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from ..errors import InputError

Item = str | tuple[Any, ...]
"""The option of a leaf, or the items of a region."""

LEAVES = ("keep", "cheap", "lean")
"""From the one that keeps most."""
_TOKEN = re.compile(r"\s*([a-z]+|\[|\]|,|\*\s*\d+|$)")
_LONGEST = 50_000
_HINT = "such as 'keep*3, cheap*2, recompute*8, [keep*2, [cheap*2]]'"
_MOST = 100_000
"""Blocks a text may stand for, so that a slip of the pen does not fill the memory."""


def leaves(item: Item) -> int:
    """How many blocks an item covers."""
    return 1 if isinstance(item, str) else sum(map(leaves, item))


def part(items: Sequence[Item], start: int, stop: int) -> tuple[Item, ...]:
    """The items cut down to the blocks start…stop-1."""
    found: list[Item] = []
    at = 0
    for item in items:
        count = leaves(item)
        if at < stop and at + count > start:
            if isinstance(item, str):
                found.append(item)
            else:
                found.append(part(item, start - at, stop - at))
        at += count
    return tuple(found)


def write(items: Sequence[Item]) -> tuple[str, ...]:
    """One text for each run of equal items."""
    texts = []
    for item, run in groupby(items):
        count = sum(1 for _ in run)
        texts.append(_text(item) + (f"*{count}" if count > 1 else ""))
    return tuple(texts)


def _text(item: Item) -> str:
    if isinstance(item, str):
        return item
    return "recompute" if item == ("keep",) else f"[{', '.join(write(item))}]"


def read(texts: str | Iterable[str]) -> tuple[Item, ...]:
    """The items that one text, or several one after the other, stand for."""
    text = texts if isinstance(texts, str) else ", ".join(texts)
    if len(text) > _LONGEST:
        raise _unreadable(text, f"{len(text):,} characters")
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _unreadable(text, f"at {text[at:].strip()[:20]!r}")
        tokens.append(match[1])
        at = match.end()
    tokens = [token for token in tokens if token]
    try:
        items = _items(tokens, text)
    except RecursionError:
        raise _unreadable(text, "regions within regions, too deep") from None
    if tokens:
        raise _unreadable(text, f"a {tokens[0]!r} too many")
    return items


def _items(tokens: list[str], text: str) -> tuple[Item, ...]:
    found: list[Item] = []
    while True:
        token = tokens.pop(0) if tokens else ""
        item: Item
        if token == "[":
            item = _items(tokens, text)
            if not tokens or tokens.pop(0) != "]":
                raise _unreadable(text, "a ']' is missing")
        elif token in (*LEAVES, "recompute"):
            item = ("keep",) if token == "recompute" else token
        else:
            raise _unreadable(text, f"{token!r} is not an item" if token else "an item is missing")
        count = 1
        if tokens and tokens[0].startswith("*"):
            count = int(tokens.pop(0)[1:20])  # more digits are too many blocks anyway
        if not 0 < count * leaves(item) <= _MOST:
            raise _unreadable(text, f"{count} times one item")
        found += [item] * count
        if not tokens or tokens[0] != ",":
            return tuple(found)
        tokens.pop(0)


def _unreadable(text: str, why: str) -> InputError:
    shown = text if len(text) < 60 else text[:57] + "..."
    return InputError(f"cannot read the schedule {shown!r}: {why}", hint=_HINT)
