"""Texts that train in seconds, for tests of the loop."""

from __future__ import annotations

from functools import cache

from shoestring.lab.tasks.bpe import learn
from shoestring.lab.tasks.corpus import Corpus, Pairs
from shoestring.lab.tasks.number_words import english, german
from shoestring.lab.tasks.text import TextTask, encoded

SMALL = "dc-transformer-tiny-width-16-decoder-1"


@cache
def small_text(train: int = 120, held_out: int = 12) -> TextTask:
    """Numbers of two and three digits, as words: of few lengths, so in few shapes."""
    numbers = [20 + n for n in range(train + 2 * held_out)]
    lines = [(german(n), english(n)) for n in numbers]
    parts = {
        "valid": lines[:held_out],
        "test": lines[held_out : 2 * held_out],
        "train": lines[2 * held_out :],
    }
    pairs = {
        name: Pairs([s for s, _ in held], [t for _, t in held]) for name, held in parts.items()
    }
    codes = learn([text for pair in lines for text in pair], 40)
    return encoded(Corpus("number_words", "de", "en", pairs, codes), merges=40)
