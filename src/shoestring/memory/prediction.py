"""Prediction: what one training step is predicted to take. Nothing of it was measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..plain_values import PlainValues


@dataclass(frozen=True)
class Prediction(PlainValues):
    """Predicted bytes and seconds of one step, with the accounting and the costs used.

    Examples:
        >>> plan.predicted.peak_bytes, plan.predicted.seconds, plan.plain.peak_bytes
    """

    peak_bytes: int
    """The largest sum of live bytes."""
    accounting: str
    """Either "fundamental" or "device"."""
    device: str
    """Either "cpu" or "cuda"; "any" for the fundamental accounting."""
    seconds: float | None = None
    """Of one step."""
    flops: int | None = None
    """Forward, backward and what is recomputed."""
    costs: str | None = None
    """Where the seconds come from."""
    scratch_bytes: int = 0
    """Upper bound for scratch of CPU kernels and for memory no trace shows; CUDA's are
    in `peak_bytes`."""
    reserved_bytes: int = 0
    """Bytes CUDA's allocator reserves for it; 0 where that was not predicted."""
    captured: bool = False
    """Whether the step is taken to run as one CUDA graph."""
    graph_bytes: int = 0
    """Bytes it would reserve as a CUDA graph; 0 where it cannot, or was not predicted."""
    link_bytes: int = 0
    """Bytes that are copied from the host and back."""
    link_seconds: float = 0.0
    """How long that takes."""
    hidden_seconds: float = 0.0
    """Of it, what runs under other work."""

    curve: tuple[int, ...] = field(default=(), compare=False, repr=False)
    """Live bytes from the start of the step to its end, thinned, for pictures."""

    @property
    def needed_bytes(self) -> int:
        """Bytes a budget must have: the allocator's peak; on CUDA, reserved bytes."""
        return max(self.peak_bytes + self.scratch_bytes, self.reserved_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "peak_bytes": self.peak_bytes,
            "step_seconds": self.seconds,
            "flops": self.flops,
            "accounting": self.accounting,
            "device": self.device,
            "costs": self.costs,
            "scratch_bytes": self.scratch_bytes,
            "reserved_bytes": self.reserved_bytes,
            "captured": self.captured,
            "link_bytes": self.link_bytes,
            "link_seconds": self.link_seconds,
            "hidden_seconds": self.hidden_seconds,
        }
