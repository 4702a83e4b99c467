"""Run the passes without leaving a trace, to know the norm of their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...trace.attributes import held_by, put_back
from ...trace.fakes import same_random_streams
from ..base import Setup


@contextmanager
def taken_back(setup: Setup) -> Iterator[None]:
    """Random streams, buffers and attributes of modules are as before on leaving."""
    modules = [(module, held_by(module)) for module in setup.model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in setup.model.buffers()]
    noises = [noise for item in setup.state.values() if (noise := getattr(item, "noise", None))]
    counters = [noise.counter.clone() for noise in noises]
    try:
        with same_random_streams():
            yield
    finally:
        for module, held in modules:
            put_back(module, held)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
            for noise, counter in zip(noises, counters, strict=True):
                noise.counter.copy_(counter)
