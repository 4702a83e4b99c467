"""The random streams a training step may draw from: where they are, and back to where they were."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from .untouched import Untouched


def stream_states() -> tuple[Any, ...]:
    """The state of every global generator, to be compared with ==."""
    keys = np.random.get_state()
    return (
        torch.get_rng_state().numpy().tobytes(),
        tuple(state.numpy().tobytes() for state in _cuda()),
        random.getstate(),
        tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in keys),
    )


def kept_streams() -> Callable[[], None]:
    """A function that takes every generator back to where it is now."""
    held = torch.get_rng_state(), random.getstate(), np.random.get_state(), _cuda()

    def rewind() -> None:
        torch.set_rng_state(held[0])
        random.setstate(held[1])
        np.random.set_state(held[2])
        for number, state in enumerate(held[3]):
            torch.cuda.set_rng_state(state, number)

    return rewind


@contextmanager
def rewound_streams() -> Iterator[Callable[[], None]]:
    """`kept_streams`, called at the end, too."""
    rewind = kept_streams()
    try:
        yield rewind
    finally:
        rewind()


@contextmanager
def rewound(
    functions: Iterable[Callable[..., Any]], model: nn.Module, trial: Callable[[], object]
) -> Iterator[Callable[[], None]]:
    """Restores random streams and all that a step touches beside its model; at the end too.

    `trial` takes such a step, of a model that may change, and shows what that is.
    """
    with rewound_streams() as rewind_streams:
        others = Untouched(functions, [model])
        with others:
            trial()

        def rewind() -> None:
            rewind_streams()
            others.restore()

        rewind()
        try:
            yield rewind
        finally:
            others.restore()


def _cuda() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
