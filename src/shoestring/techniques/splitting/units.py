"""Units that a part's loss is averaged over; they weight the parts of a batch.

A loss that is a mean over examples, over labels that are not ignored, or over a mask is the sum of
its parts' losses, each weighed by its share of the units. A summed loss is the plain sum of them.
Units that follow from a tensor of the batch are written as text, so that a plan can be saved:
"labels[:, 1:] != -100" counts the labels from the second position on that are not -100; "mask"
adds up a mask; "targets != nan" counts those that are not missing.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...errors import InputError
from ...trace.batches import is_record
from ...trace.fakes import readable
from ...trace.split import examples_of

Units = Callable[[Any], float | torch.Tensor]

AUTO, EXAMPLES, SUM = "auto", "examples", "sum"
_TEXT = re.compile(r"(?P<path>[\w.-]+)(?P<shifted>\[:, 1:\])?(?: != (?P<ignored>-?\d+|nan))?")
HINT = (
    "'auto' (found on the first batch), 'examples', 'sum', a tensor of the batch such as "
    "'labels != -100' or 'mask', or a function from a part of the batch to its number of units"
)


def check_units(units: str | Units) -> None:
    """InputError for what cannot be read."""
    readable_text = isinstance(units, str) and _TEXT.fullmatch(units)
    if not callable(units) and not readable_text:
        raise InputError(f"unknown microbatch units {units!r}", hint=HINT)


def tensors_by_path(batch: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a batch that has a first dimension, by keys and positions: "0.labels"."""
    if isinstance(batch, torch.Tensor):
        return {path or "batch": batch} if batch.dim() else {}
    found: dict[str, torch.Tensor] = {}
    for key, value in _items(batch):
        found |= tensors_by_path(value, f"{path}.{key}" if path else str(key))
    return found


def _items(batch: Any) -> list[tuple[Any, Any]]:
    if isinstance(batch, Mapping):
        return list(batch.items())
    if isinstance(batch, (list, tuple)):
        return list(enumerate(batch))
    if is_record(batch):
        return [(f.name, getattr(batch, f.name)) for f in dataclasses.fields(batch)]
    return []


def counter(units: str | Units) -> Units:
    """The function that counts a part's units."""
    if callable(units):
        return units
    if units in (AUTO, EXAMPLES):
        return lambda part: float(examples_of(part) or 0)
    if units == SUM:
        return lambda part: 1.0
    match = _TEXT.fullmatch(units)
    assert match is not None

    def count(part: Any) -> torch.Tensor:
        held = tensors_by_path(part).get(match["path"])
        if held is None:
            known = ", ".join(sorted(tensors_by_path(part)))
            raise InputError(
                f"microbatches weigh by {units!r}, and the batch has no tensor {match['path']!r}",
                hint=f"units= names one of its tensors: {known}",
            )
        held = held.detach()
        if match["shifted"]:
            held = held[:, 1:]
        return (held if match["ignored"] is None else is_not(held, float(match["ignored"]))).sum()

    return count


def is_not(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """Where it is another number, or any number for NaN."""
    return ~tensor.isnan() if math.isnan(value) else tensor != value


def weights(units: str | Units, parts: list[Any]) -> list[float | torch.Tensor]:
    """Of the parts of one batch; they add up to one, but for a summed loss, where each is one."""
    if units == SUM:
        return [1.0] * len(parts)
    count = counter(units)
    counts = [_wide(count(part)) for part in parts]
    total = sum(counts)
    known = not isinstance(total, torch.Tensor) or readable(total)
    if known and not total > 0:
        raise InputError(
            f"the units of the microbatches add up to {float(total):g}",
            hint="units(part) must give the number of units the part's loss is averaged over",
        )
    return [held / total for held in counts]


def _wide(units: float | torch.Tensor) -> float | torch.Tensor:
    """Counts of any type as 64-bit numbers, so that weights do not round before the loss does."""
    if not isinstance(units, torch.Tensor):
        return float(units)
    return float(units.detach()) if readable(units) else units.detach().double()
