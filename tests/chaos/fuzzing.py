"""Damaged and hostile inputs: bytes that were changed, and values that were swapped for others."""

from __future__ import annotations

import math
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from chaos import COUNTS, HANG_SECONDS, OwnTime
from shoestring.errors import ShoestringError

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, 0.0, -0.0, 0.5, 1e308, math.nan, math.inf,
    "", "x", "\0", "\n\\input{x}", "é\u2028\udcff", "../../x", "a" * 5000, [], [[]], [None], {},
    {"x": {"x": []}}, [1, "a", None], "nan", "9" * 50, {"event": 3},
)  # fmt: skip


class Hang(BaseException):
    """It took longer than anything may."""


@contextmanager
def attacked(what: str, shown: Any = "") -> Iterator[None]:
    """Count an input; it may be taken or refused, and nothing else may happen."""

    own = OwnTime(os.getpid())

    def ring(*_: object) -> None:
        if own.look() > HANG_SECONDS:
            raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
    COUNTS["fuzzed inputs"] += 1
    COUNTS[f"fuzzed inputs: {what}"] += 1
    try:
        yield
        COUNTS["fuzzed inputs that were taken as they are"] += 1
    except ShoestringError as error:
        assert error.message.strip()
        COUNTS["fuzzed inputs that were refused in one line"] += 1
    except Hang:
        COUNTS["hangs"] += 1
        raise AssertionError(f"{what} hangs: {shown!r}"[:3000]) from None
    except Exception:
        COUNTS["tracebacks"] += 1
        raise AssertionError(f"{what}: {shown!r}"[:3000] + traceback.format_exc()) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def damaged(data: bytes, chance: Random) -> bytes:
    """One to four changes: bits, cuts, copies, zeros, other bytes."""
    made = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        if not made:
            break
        at = chance.randrange(len(made))
        size = min(chance.choice((1, 1, 2, 8, 64, 4096)), len(made) - at)
        kind = chance.randrange(6)
        if kind == 0:
            made[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del made[at:]
        elif kind == 2:
            del made[at : at + size]
        elif kind == 3:
            made[at:at] = made[at : at + size]
        elif kind == 4:
            made[at : at + size] = bytes(size)
        else:
            made[at : at + size] = chance.randbytes(size)
    return bytes(made)


def swapped(value: Any, chance: Random) -> Any:
    """The same structure with one to three values removed, added or swapped for odd ones."""
    for _ in range(chance.randint(1, 3)):
        value = _swap(value, chance)
    return value


def _swap(value: Any, chance: Random) -> Any:
    if isinstance(value, dict) and value and chance.random() < 0.9:
        made = dict(value)
        name = chance.choice(list(made))
        kind = chance.random()
        if kind < 0.15:
            del made[name]
        elif kind < 0.25:
            made[chance.choice(("x", "", "event", "seed", "\udcff"))] = chance.choice(ODD)
        else:
            made[name] = _swap(made[name], chance)
        return made
    if isinstance(value, (list, tuple)) and len(value) and chance.random() < 0.8:
        listed = list(value)
        at = chance.randrange(len(listed))
        if chance.random() < 0.2:
            del listed[at]
        elif chance.random() < 0.2:
            listed.insert(at, chance.choice(ODD))
        else:
            listed[at] = _swap(listed[at], chance)
        return type(value)(listed)
    return chance.choice(ODD)
