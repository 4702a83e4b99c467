"""Every technique that is wrong on purpose is caught, and every right one passes."""

from __future__ import annotations

from typing import Any

import pytest

from shoestring.techniques import Precision
from tiers import slow_but
from verification.sabotage import CASES, WRONG, broken, cases, compared, technique

QUICK = [
    *cases(("mlp", "vae", "cnn"), ("fp32",)),
    *cases(("mlp",), ("bf16",)),
    *(case for case in cases(("transformer",), ("fp32",)) if case[2] == "checkpointing"),
]


def named(given: list[Any], *marks: Any) -> list[Any]:
    return [
        pytest.param(*one, id="-".join(part or "honest" for part in one), marks=marks)
        for one in given
    ]


def told(*case: Any) -> None:
    found = broken(*case)
    assert bool(found) is (case[3] is not None), found


@pytest.mark.parametrize(
    ("name", "kind", "carrier", "wrong"),
    [*named(QUICK), *named([case for case in cases(CASES) if case not in QUICK], pytest.mark.slow)],
)
def test_sabotage(name: str, kind: str, carrier: str, wrong: str | None) -> None:
    told(name, kind, carrier, wrong)


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("wrong", slow_but(2, [None, "longer", "wrong_weight", "skipped"]))
def test_16_bits_hide_nothing(kind: str, wrong: str | None) -> None:
    """Beside a technique that rounds by more than the mistake is large."""
    rows = compared("tied", [Precision(kind), technique("microbatching", "tied", wrong)])
    assert all(row.ok for row in rows) is (wrong is None), rows


def test_there_are_enough() -> None:
    assert len(CASES) >= 12 and len(WRONG) == 10
