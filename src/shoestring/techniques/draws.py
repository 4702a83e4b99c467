"""The random numbers of recomputation: recomputation draws what the forward pass drew.

Eagerly, `torch.utils.checkpoint` puts the generator back by itself. A CUDA graph cannot: while it
is captured, nothing may read or write a generator's state. So an eager step notes where in the
random stream each of its recomputations starts, in the order they run, and the captured step takes
generators that were made ready for those places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol


class RecomputeObserver(Protocol):
    """Observes every recomputation of a step."""

    keeps_state: bool
    """Whether PyTorch puts the generators back."""

    def again(self) -> AbstractContextManager[None]:
        """The context of the next recomputation."""
        ...


class RngRecorder:
    """Notes where in the random stream every recomputation starts."""

    keeps_state = True

    def __init__(self, position: Callable[[], Any]) -> None:
        self._position = position
        self.found: list[Any] = []
        """None for one that draws nothing."""

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside of what PyTorch restores: the generator stands where it did in the first pass."""
        number, start = len(self.found), self._position()
        self.found.append(None)
        try:
            yield
        finally:  # recomputation ends by an exception as soon as all that is needed is there
            if self._position() != start:
                self.found[number] = start


class RngReplay:
    """Gives every recomputation its place in the random stream, in the order they were noted."""

    keeps_state = False

    def __init__(
        self, places: Sequence[Any], at: Callable[[Any], AbstractContextManager[None]]
    ) -> None:
        self._places, self._at = places, at
        self._count = 0

    def again(self) -> AbstractContextManager[None]:
        """Drawing from the next place, or as outside if nothing is drawn."""
        if self._count == len(self._places):
            raise RuntimeError("the step recomputes more often than it did before")
        place = self._places[self._count]
        self._count += 1
        return nullcontext() if place is None else self._at(place)

    @property
    def all_used(self) -> bool:
        """Whether every place was taken."""
        return self._count == len(self._places)


_observers: list[RecomputeObserver | None] = []
"""Of the process: backward runs in threads of autograd's own."""


@contextmanager
def observed_by(observer: RecomputeObserver | None) -> Iterator[None]:
    """Notify it of every recomputation until the end; None: no observer."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.pop()


def observer() -> RecomputeObserver | None:
    """The current observer."""
    return _observers[-1] if _observers else None
