"""Whether a tensor that is packed now is the kept input of what will be recomputed.

Hooks on saved tensors are told of a tensor, not for whom it is kept. What recomputes says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0


@contextmanager
def keeps_inputs() -> Iterator[None]:
    """Within: what goes to the hooks outside is kept to recompute something from it."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def inputs_are_kept() -> bool:
    """Whether this runs within `keeps_inputs`."""
    return _depth > 0
