"""Every technique that is wrong on purpose is caught, and every right one passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shoestring.techniques import Precision
from verification.sabotage import CASES, WRONG, broken, cases, compared, technique

CHEAP = ("mlp", "vae", "cnn", "transformer")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Steady where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def named(given: list[Any]) -> list[Any]:
    return [pytest.param(*one, id="-".join(part or "honest" for part in one)) for one in given]


def told(*case: Any) -> None:
    found = broken(*case)
    assert bool(found) is (case[3] is not None), found


@pytest.mark.parametrize(
    ("name", "kind", "carrier", "wrong"),
    named([*cases(CHEAP, ("fp32",)), *cases(("mlp",), ("bf16",))]),
)
def test_sabotage(name: str, kind: str, carrier: str, wrong: str | None) -> None:
    told(name, kind, carrier, wrong)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "carrier", "wrong"), named(cases(CASES)))
def test_all_sabotage(name: str, kind: str, carrier: str, wrong: str | None) -> None:
    told(name, kind, carrier, wrong)


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("wrong", [None, "longer", "wrong_weight", "skipped"])
def test_16_bits_hide_nothing(kind: str, wrong: str | None) -> None:
    """Beside a technique that rounds by more than the mistake is large."""
    rows = compared("tied", [Precision(kind), technique("microbatching", "tied", wrong)])
    assert all(row.ok for row in rows) is (wrong is None), rows


def test_there_are_enough() -> None:
    assert len(CASES) >= 12 and len(WRONG) == 10
