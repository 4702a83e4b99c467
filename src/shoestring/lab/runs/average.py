"""The mean of a run's weights at the ends of its last epochs: what the recipe evaluates."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from ...errors import InputError
from . import snapshot

Weights = dict[str, Tensor]


def mean_of(states: Iterable[Weights]) -> tuple[Weights, int]:
    """Element by element in FP64, rounded once; the newest state comes first. And of how many.

    States that place their nonzeros elsewhere than the newest are left out: a rewiring lies
    between, and the mean of two sparse weights is not as sparse.
    """
    newest: Weights | None = None
    sums: Weights = {}
    count = 0
    for state in states:
        if newest is None:
            newest = state
        if not _same_places(newest, state):
            continue
        count += 1
        for name, value in state.items():
            if value.is_floating_point():
                wide = value.double()
                sums[name] = sums[name] + wide if name in sums else wide
    if newest is None:
        raise InputError("there are no weights to average")
    made = {k: (sums[k] / count).to(v.dtype) if k in sums else v for k, v in newest.items()}
    return made, count


def _same_places(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape
        and (one[name].is_floating_point() or one[name].equal(other[name]))
        for name in one
    )


def mean_of_files(paths: Iterable[Path]) -> tuple[Weights, int]:
    """Of weights that a run kept, read one after the other."""
    newest_first = sorted(paths, key=lambda path: path.name, reverse=True)
    return mean_of(map(_weights_in, newest_first))


def _weights_in(path: Path) -> Weights:
    held = snapshot.load(path).get("model")
    if not isinstance(held, dict) or not all(isinstance(v, Tensor) for v in held.values()):
        raise InputError(f"{path} does not hold the weights of a model")
    return held
