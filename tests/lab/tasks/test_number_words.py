"""Number words against those that people wrote down, and the split."""

import pytest

from shoestring.lab.tasks.number_words import TEST, TRAIN, VALID, english, german, number_words


@pytest.mark.parametrize(
    ("number", "de", "en"),
    [
        (0, "null", "zero"),
        (1, "eins", "one"),
        (12, "zwölf", "twelve"),
        (16, "sechzehn", "sixteen"),
        (17, "siebzehn", "seventeen"),
        (21, "einundzwanzig", "twenty-one"),
        (30, "dreißig", "thirty"),
        (66, "sechsundsechzig", "sixty-six"),
        (77, "siebenundsiebzig", "seventy-seven"),
        (101, "einhunderteins", "one hundred one"),
        (324, "dreihundertvierundzwanzig", "three hundred twenty-four"),
        (1000, "eintausend", "one thousand"),
        (1001, "eintausendeins", "one thousand one"),
        (21_011, "einundzwanzigtausendelf", "twenty-one thousand eleven"),
        (101_101, "einhunderteintausendeinhunderteins", "one hundred one thousand one hundred one"),
        (
            999_999,
            "neunhundertneunundneunzigtausendneunhundertneunundneunzig",
            "nine hundred ninety-nine thousand nine hundred ninety-nine",
        ),
    ],
)
def test_words(number, de, en):
    assert (german(number), english(number)) == (de, en)


def test_no_two_numbers_share_a_word():
    for words in (german, english):
        assert len({words(n) for n in range(0, 1_000_000, 7)}) == len(range(0, 1_000_000, 7))


def test_parts_have_no_number_in_common():
    parts = number_words().parts
    sets = [set(parts[name].source) for name in ("train", "valid", "test")]
    assert [len(held) for held in sets] == [TRAIN, VALID, TEST]
    assert len(set.union(*sets)) == TRAIN + VALID + TEST
    assert parts["train"].source == number_words().parts["train"].source
