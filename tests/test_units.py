import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.errors import InputError, SizeError
from shoestring.units import format_count, format_flops, format_size, parse_size

SIZES = {
    "404.8 MB": 404_800_000,
    "8GB": 8_000_000_000,
    "12.2 MiB": 12_792_627,
    "123 B": 123,
    "123": 123,
    "0 B": 0,
    "1 KB": 1_000,
    "1 KiB": 1_024,
    "1.5 TB": 1_500_000_000_000,
    "2 TiB": 2_199_023_255_552,
    "0.5 GiB": 536_870_912,
    "13_000_000 B": 13_000_000,
    "  13\tMB ": 13_000_000,
    "0.001 KB": 1,
    "0.0019 KB": 1,
}
NOT_SIZES = [
    "", " ", "6M", "6Mi", "NaN MB", "nan", "inf GB", "infinity", "-1 MB", "+1 MB", "- 1 MB",
    "404.8", "1.5 B", "MB", "1e3 MB", "1,000 MB", "1 000 MB", "1. MB", ".5 MB", "1__0 MB", "_1 MB",
    "8gb", "8 Mb", "8 MBs", "8 PB", "8 MB 8", "٣ MB", "9" * 5000, "1/2 MB", "0x10",
    True, False, 1.0, math.nan, None, -1, b"1 MB",
]  # fmt: skip


@pytest.mark.parametrize(("text", "n_bytes"), SIZES.items())
def test_sizes_worked_out_by_hand(text, n_bytes):
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize("wrong", NOT_SIZES, ids=lambda wrong: repr(wrong)[:20])
def test_what_is_not_a_size_is_refused_with_a_way_out(wrong):
    with pytest.raises(SizeError) as caught:
        parse_size(wrong)
    assert caught.value.hint
    assert isinstance(caught.value, InputError)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("6M", "write '6 MB' or '6 MiB'"),
        ("6m", "write '6 MB' or '6 MiB'"),
        ("8gb", "write '8 GB' or '8 GiB'"),
        ("2 Gi", "write '2 GB' or '2 GiB'"),
    ],
)
def test_the_hint_names_the_units_that_were_probably_meant(wrong, hint):
    with pytest.raises(SizeError) as caught:
        parse_size(wrong)
    assert caught.value.hint == hint


@given(st.text(max_size=20) | st.from_regex(r"[-+0-9._ ]{1,8}[A-Za-z]{0,3}", fullmatch=True))
def test_any_text_is_a_size_or_a_size_error(text):
    try:
        assert parse_size(text) >= 0
    except SizeError as error:
        assert error.hint


@given(st.integers(min_value=0))
def test_whole_bytes_are_themselves(n_bytes):
    assert parse_size(n_bytes) == n_bytes


@given(st.integers(0, 10**18))
def test_text_with_enough_digits_comes_back_exactly(n_bytes):
    assert parse_size(format_size(n_bytes, digits=9)) == n_bytes
    assert parse_size(f"{n_bytes:_} B") == n_bytes


@given(st.integers(0, 10**15), st.integers(0, 6))
def test_text_is_off_by_half_of_its_last_digit_at_most(n_bytes, digits):
    text = format_size(n_bytes, digits)
    unit_bytes = parse_size("1 " + text.split()[1])
    assert abs(parse_size(text) - n_bytes) * 2 * 10**digits <= unit_bytes


@given(st.integers(0, 10**12 - 10**9), st.integers(0, 3))
def test_the_unit_leaves_at_most_three_places_before_the_point(n_bytes, digits):
    assert len(format_size(n_bytes, digits).split()[0].split(".")[0]) <= 3


@given(st.integers(0, 10**6), st.sampled_from(["KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
def test_a_whole_number_of_units_is_exact(number, unit):
    unit_bytes = (2**10 if "i" in unit else 10**3) ** ("KMGT".index(unit[0]) + 1)
    assert parse_size(f"{number} {unit}") == number * unit_bytes


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.0 KB"),
        (404_810_296, "404.8 MB"),
        (999_949, "999.9 KB"),
        (999_950, "1.0 MB"),
        (8_000_000_000, "8.0 GB"),
        (2_500_000_000_000, "2500.0 GB"),
        (-404_810_296, "-404.8 MB"),
    ],
)
def test_sizes_are_written_as_in_the_report(n_bytes, text):
    assert format_size(n_bytes) == text


def test_digits_after_the_point():
    assert format_size(404_810_296, digits=0) == "405 MB"
    assert format_size(404_810_296, digits=3) == "404.810 MB"


def test_counts_and_flops():
    assert format_count(1_456_858) == "1,456,858"
    assert format_flops(38_400_000_000) == "38.4 GFLOPs"
    assert format_flops(512) == "512 FLOPs"
    assert format_flops(1_300_000_000_000, digits=2) == "1.30 TFLOPs"
