"""The contract of a technique: one transformation, here of the prediction."""

from __future__ import annotations

from typing import Any, Protocol

from ..trace.graph import Trace


class Technique(Protocol):
    """One way to need less memory; each is a frozen dataclass."""

    def prepare(self, batch: Any) -> Any:
        """The part of the batch that runs at once."""
        ...

    def predict(self, trace: Trace) -> Trace:
        """What the technique does to sizes, types and schedule. Pure."""
        ...


class WholeBatch:
    """A technique that leaves the batch alone."""

    def prepare(self, batch: Any) -> Any:
        """The whole batch."""
        return batch
