"""The garbage collector while many fakes are made: it looks at them, and not at all of the rest."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_inside = False


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Let the collector look at what is made from here on, which is all that matters and little.

    Within another one, it leaves alone as well what was made so far and is in use. Inside,
    `gc.get_objects()` does not know what was there before. Nothing happens where the program has
    frozen objects itself.
    """
    global _inside
    if _inside:
        gc.collect()
        gc.freeze()
        yield
    elif gc.get_freeze_count():
        yield
    else:
        gc.freeze()
        _inside = True
        try:
            yield
        finally:
            _inside = False
            gc.unfreeze()
