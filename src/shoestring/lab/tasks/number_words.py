"""German number words and English ones: a small language that is there without a download."""

from __future__ import annotations

import numpy as np

from .bpe import learn
from .corpus import Corpus, Pairs

VERSION = 1
"""To be raised with any change to what comes out."""
LARGEST = 999_999
TRAIN, VALID, TEST = 10_000, 500, 1_000
MERGES, LEARN_FROM = 120, 1_000
"""Of BPE, and the lines it is learnt from: all have the same parts, and long words take long."""
SOURCE, TARGET = "de", "en"

_ONES_DE = "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf".split()
_TEENS_DE = dict(zip((13, 14, 15, 16, 17, 18, 19), (
    "dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn"
).split(), strict=True))  # fmt: skip
_TENS_DE = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()
_SMALL_EN = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
_TENS_EN = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def german(number: int) -> str:
    """One word: dreihundertvierundzwanzig."""
    word = _german(number)
    return word + "s" if number % 100 == 1 else word


def _german(number: int) -> str:
    """As before another part of the word: a last one is ein, not eins."""
    if number >= 1000:
        thousands, rest = divmod(number, 1000)
        return _german(thousands) + "tausend" + (_german(rest) if rest else "")
    if number >= 100:
        hundreds, rest = divmod(number, 100)
        return _ONES_DE[hundreds] + "hundert" + (_german(rest) if rest else "")
    if number < 13:
        return _ONES_DE[number]
    if number < 20:
        return _TEENS_DE[number]
    tens, ones = divmod(number, 10)
    return (_ONES_DE[ones] + "und" if ones else "") + _TENS_DE[tens - 2]


def english(number: int) -> str:
    """Several words: three hundred twenty-four."""
    if number >= 1000:
        thousands, rest = divmod(number, 1000)
        return f"{english(thousands)} thousand" + (f" {english(rest)}" if rest else "")
    if number >= 100:
        hundreds, rest = divmod(number, 100)
        return f"{_SMALL_EN[hundreds]} hundred" + (f" {english(rest)}" if rest else "")
    if number < 20:
        return _SMALL_EN[number]
    tens, ones = divmod(number, 10)
    return _TENS_EN[tens - 2] + (f"-{_SMALL_EN[ones]}" if ones else "")


def number_words() -> Corpus:
    """Numbers below a million, drawn once and for all; no number is in two parts.

    Half of them are below ten thousand, so that short words are there as well.
    """
    draw = np.random.Generator(np.random.PCG64(0))
    small = draw.permutation(10_000)
    large = draw.permutation(np.arange(10_000, LARGEST + 1))
    parts, used = {}, 0
    for name, count in (("train", TRAIN), ("valid", VALID), ("test", TEST)):
        few, many = count // 2, count - count // 2
        chosen = np.concatenate([small[:few], large[used : used + many]])
        small, used = small[few:], used + many
        numbers = [int(number) for number in chosen]
        parts[name] = Pairs([german(n) for n in numbers], [english(n) for n in numbers])
    train = parts["train"]
    shown = [*train.source[:: len(train) // LEARN_FROM], *train.target[:: len(train) // LEARN_FROM]]
    return Corpus("number_words", SOURCE, TARGET, parts, learn(shown, MERGES))
