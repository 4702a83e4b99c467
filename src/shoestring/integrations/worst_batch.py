"""The batch of a data set that needs most memory, before it comes.

Examples are scanned for their sizes, and the largest are put together by the trainer's own
collator. A plan for that batch holds for the others: they are padded to less.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

SECONDS = 5.0
"""For the scan; of more examples than that a part is seen, evenly spread."""


@dataclass(frozen=True)
class Worst:
    """The largest examples together."""

    batch: Any
    seen: int
    examples: int
    at: int
    """Index of the largest one."""

    @property
    def whole(self) -> bool:
        """Whether every example was seen."""
        return self.seen == self.examples


def worst_batch(
    dataset: Any, count: int, collate: Callable[[list[Any]], Any], seconds: float = SECONDS
) -> Worst | None:
    """The `count` largest examples, collated; None where a data set has no length or no sizes."""
    try:
        total = len(dataset)
    except TypeError:  # a stream
        return None
    if not total:
        return None
    with _no_draws():
        sizes, places = _arrow_sizes(dataset)
        if sizes is None:
            sizes, places = _scanned(dataset, total, seconds)
        if not len(sizes):
            return None
        order = np.argsort(-sizes.sum(axis=1), kind="stable")
        # The longest of every field first: a source and a target may be long in different examples.
        first = [int(sizes[:, field].argmax()) for field in range(sizes.shape[1])]
        chosen = list(dict.fromkeys([*first, *map(int, order[:count])]))[:count]
        examples = [dataset[int(places[n])] for n in chosen]
        batch = collate(examples)
    return Worst(batch, len(sizes), total, int(places[order[0]]))


def _arrow_sizes(dataset: Any) -> tuple[Any, Any]:
    """Of a Hugging Face data set, by its columns: no example is made."""
    if getattr(dataset, "_format_type", "") is not None or not hasattr(dataset, "with_format"):
        return None, None  # it makes its examples when asked for them
    import pyarrow.compute as arrow

    table = dataset.with_format("arrow")[:]
    columns = []
    for name in table.column_names:
        kind = str(table.schema.field(name).type)
        if kind.startswith(("list", "large_list")):
            lengths = arrow.fill_null(arrow.list_value_length(table[name]), 0)
            columns.append(np.asarray(lengths))
    if not columns:
        return None, None
    return np.stack(columns, axis=1).astype(np.int64), np.arange(len(columns[0]))


def _scanned(dataset: Any, total: int, seconds: float) -> tuple[Any, Any]:
    """Of a part that is seen within the time, in an order that spreads over the whole set."""
    start, found, places = time.perf_counter(), [], []
    names: list[Any] | None = None
    for number in _spread(total):
        sizes = sizes_of_example(dataset[number])
        names = list(sizes) if names is None else names
        found.append([sizes.get(name, 0) for name in names])
        places.append(number)
        if len(places) % 64 == 0 and time.perf_counter() - start > seconds:
            break
    if not names:
        return np.zeros((0, 0), dtype=np.int64), np.zeros(0, dtype=np.int64)
    return np.array(found, dtype=np.int64), np.array(places, dtype=np.int64)


def _spread(total: int) -> Iterator[int]:
    """Every number once; the first ones lie far apart."""
    step = max(int(total * 0.6180339887), 1)
    while np.gcd(step, total) != 1:
        step += 1
    place = 0
    for _ in range(total):
        yield place
        place = (place + step) % total


def sizes_of_example(example: Any) -> dict[Any, int]:
    """Elements of each field that has any."""
    if isinstance(example, Mapping):
        fields: Any = example.items()
    elif isinstance(example, (tuple, list)) and not _numbers(example):
        fields = enumerate(example)
    else:
        fields = [(0, example)]
    sizes = {}
    for name, value in fields:
        if isinstance(value, (torch.Tensor, np.ndarray)):
            sizes[name] = int(np.prod(value.shape))
        elif isinstance(value, (list, tuple)):
            sizes[name] = len(value)
    return sizes


def _numbers(example: Sequence[Any]) -> bool:
    return bool(example) and isinstance(example[0], (int, float))


@contextmanager
def _no_draws() -> Iterator[None]:
    """Random streams go on as if nothing had been drawn: collators mask, data sets augment."""
    kept, drawn, numbers = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(kept)
        np.random.set_state(drawn)
        torch.set_rng_state(numbers)
