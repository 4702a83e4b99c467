"""The collector's view while a step is planned."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from shoestring.trace.garbage import only_new_garbage


class Cyclic:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_was_there_is_frozen_only_inside() -> None:
    with only_new_garbage():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_after_an_error_nothing_is_frozen() -> None:
    with pytest.raises(KeyError), only_new_garbage(), only_new_garbage():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_garbage_between_two_traces_goes() -> None:
    with only_new_garbage():
        with only_new_garbage():
            left = weakref.ref(Cyclic())
        with only_new_garbage():
            assert left() is None


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with only_new_garbage(), only_new_garbage():
        pass
    assert gc.get_freeze_count() >= before - 10
