"""The mean of a run's weights at the ends of its last epochs: what the recipe evaluates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ...errors import InputError, first_line
from ...step.apply import apply
from ...techniques.base import Technique
from ...techniques.plan import Plan
from ...trace.tracing import Loss
from . import snapshot

Weights = dict[str, Tensor]


def mean_of(states: Iterable[Weights]) -> tuple[Weights, int]:
    """Element by element in FP64, rounded once; the newest state comes first. And of how many.

    Other tensors are the newest's.
    """
    newest: Weights | None = None
    sums: Weights = {}
    count = 0
    for state in states:
        if newest is None:
            newest = state
        if newest.keys() != state.keys():
            raise InputError("weights of different models have no mean")
        count += 1
        for name, value in state.items():
            if value.is_floating_point():
                wide = value.double()
                sums[name] = sums[name] + wide if name in sums else wide
    if newest is None:
        raise InputError("there are no weights to average")
    made = {k: (sums[k] / count).to(v.dtype) if k in sums else v for k, v in newest.items()}
    return made, count


def averaged_model(
    build: Callable[[], tuple[nn.Module, Loss]],
    plan: Plan,
    paths: Iterable[Path],
    device: torch.device,
) -> tuple[nn.Module, int]:
    """A model with the mean of the weights in these files, and of how many they are.

    Sparse weights between which a rewiring lies are zero in different places. As in the report
    their mean is dense (its footnote on averaging), so the model is: only the techniques that
    keep the names and shapes of weights are applied to it.
    """
    storing = [t for t in plan.techniques if t.stores_weights and not t.is_neutral]
    newest_first = sorted(paths, key=lambda path: path.name, reverse=True)
    with torch.random.fork_rng(devices=[]):
        model = applied(build, [t for t in plan.techniques if t not in storing], device)
        states: Iterable[Weights] = map(weights_in, newest_first)
        if storing:
            stored = applied(build, plan.techniques, torch.device("cpu"))
            states = (_plain(stored, storing, state, path)
                      for state, path in zip(states, newest_first, strict=True))  # fmt: skip
        mean, count = mean_of(states)
        _load(model, mean, newest_first[0])
    return model, count


def applied(
    build: Callable[[], tuple[nn.Module, Loss]],
    techniques: Iterable[Technique],
    device: torch.device,
) -> nn.Module:
    """A new model as these techniques store it; those that change only the step do not matter."""
    model, loss = build()
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)  # what texts are trained with
    lasting = Plan(technique for technique in techniques if not technique.revisable)
    return apply(lasting, model, optimizer, loss=loss).model


def _plain(model: nn.Module, storing: Sequence[Technique], state: Weights, path: Path) -> Weights:
    """A state as the model would have it without techniques that store weights otherwise."""
    if len(storing) > 1:  # none knows what the others made of a weight
        raise InputError("weights that two techniques store otherwise have no mean")
    _load(model, state, path)
    found = storing[0].plain_weights(model)
    return {name: value.clone() for name, value in found.items()}


def _load(model: nn.Module, state: Weights, path: Path) -> None:
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise InputError(f"{path} is not of this model: {first_line(error)}") from error


def weights_in(path: Path) -> Weights:
    """The weights that a run kept in a file."""
    held = snapshot.load(path).get("model")
    if not isinstance(held, dict) or not all(isinstance(v, Tensor) for v in held.values()):
        raise InputError(f"{path} does not hold the weights of a model")
    return held
