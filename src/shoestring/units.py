"""Sizes and counts as people write them: MB is 10^6 bytes as in the report, MiB is 2^20."""

import re
from decimal import Decimal
from fractions import Fraction

from .errors import SizeError

_UNIT_BYTES = {
    "B": 1,
    "KB": 10**3,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_DIGITS = "[0-9]+(?:_[0-9]+)*"
_SIZE = re.compile(rf"\s*(?P<number>{_DIGITS}(?:\.{_DIGITS})?)\s*(?P<unit>[A-Za-z]*)\s*")
_HINT = "write a number and a unit, such as '404.8 MB' (10^6 bytes) or '12.2 MiB' (2^20 bytes)"


def parse_size(size: str | int) -> int:
    """The bytes meant by '404.8 MB', '8GB', '12.2 MiB', '123 B' or a whole number of bytes.

    A part of a byte is dropped, so that a budget is never more than was written.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise SizeError(f"a size cannot be negative: {size}", hint=_HINT)
        return size
    if not isinstance(size, str):
        raise SizeError(f"not a size: {size!r}", hint=_HINT)
    match = _SIZE.fullmatch(size)
    if match is None:
        raise SizeError(f"cannot read {size!r} as a size", hint=_HINT)
    number, unit = match["number"], match["unit"]
    if unit in ("", "B"):
        if "." in number:
            raise SizeError(f"{size!r} is not a whole number of bytes", hint=_HINT)
        unit = "B"
    if unit not in _UNIT_BYTES:
        raise SizeError(f"cannot read {size!r}: unknown unit {unit!r}", hint=_unit_hint(match))
    try:
        return int(Fraction(number) * _UNIT_BYTES[unit])
    except ValueError:  # more digits than Python converts
        raise SizeError(f"a number of {len(number)} digits is not a size", hint=_HINT) from None


def _unit_hint(match: re.Match[str]) -> str:
    """Both units that begin like the one written: '6M' may mean '6 MB' or '6 MiB'."""
    number, unit = match["number"], match["unit"]
    likely = [f"'{number} {known}'" for known in _UNIT_BYTES if known[0] == unit[0].upper() != "B"]
    return f"write {' or '.join(likely)}" if likely else _HINT


def format_size(n_bytes: int, digits: int = 1) -> str:
    """The size in B, KB, MB or GB (steps of 10^3): 404_810_296 is '404.8 MB'."""
    return _scaled(n_bytes, digits, ("B", "KB", "MB", "GB"))


def format_count(count: int) -> str:
    """A count with its thousands apart: '1,456,858'."""
    return f"{count:,}"


def plural(count: int, noun: str, several: str | None = None) -> str:
    """A count with its noun: '1 run', '2 runs'; `several` where an s does not make it."""
    return f"{format_count(count)} {noun if count == 1 else several or noun + 's'}"


def format_flops(flops: int, digits: int = 1) -> str:
    """A number of floating point operations: '38.4 GFLOPs'."""
    return _scaled(flops, digits, ("FLOPs", "KFLOPs", "MFLOPs", "GFLOPs", "TFLOPs", "PFLOPs"))


def format_seconds(seconds: float) -> str:
    """'12.3 ms'."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1 or unit == "µs":
            return f"{seconds * scale:.3g} {unit}"
    raise AssertionError


def _scaled(amount: int, digits: int, units: tuple[str, ...]) -> str:
    """The amount in the first unit that needs at most three places before the point."""
    if abs(amount) < 1000:
        return f"{amount} {units[0]}"
    text = ""
    for power, unit in enumerate(units[1:], start=1):
        # Decimal: in binary 999.95 would round up or down by accident.
        number = f"{Decimal(amount).scaleb(-3 * power):.{digits}f}"
        text = f"{number} {unit}"
        if abs(Decimal(number)) < 1000:
            break
    return text
