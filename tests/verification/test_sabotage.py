"""Every technique that is wrong on purpose is caught, and every right one passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shoestring.techniques import Precision
from verification.sabotage import CASES, WRONG, applies, compared, technique

CARRIERS = ("checkpointing", "microbatching")
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHEAP = ("mlp", "vae", "cnn", "transformer")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Steady where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cases(names: Any, types: Any = TYPES) -> list[Any]:
    """(model, type, carrier, mistake or None)."""
    return [
        pytest.param(name, kind, carrier, wrong, id=f"{name}-{kind}-{carrier}-{wrong or 'honest'}")
        for name in names
        for kind in types
        for carrier in CARRIERS
        for wrong in (None, *WRONG)
        if wrong is None or applies(wrong, name, carrier)
    ]


def told(name: str, kind: str, carrier: str, wrong: str | None) -> None:
    rows = compared(name, [technique(carrier, name, wrong)], TYPES[kind])
    broken = [f"{row.what} ({row.tensor}): {row.why}" for row in rows if not row.ok]
    assert bool(broken) is (wrong is not None), broken


@pytest.mark.parametrize(
    ("name", "kind", "carrier", "wrong"),
    [*cases(CHEAP, ("fp32",)), *cases(("mlp",), ("bf16",))],
)
def test_sabotage(name: str, kind: str, carrier: str, wrong: str | None) -> None:
    told(name, kind, carrier, wrong)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "carrier", "wrong"), cases(CASES))
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
