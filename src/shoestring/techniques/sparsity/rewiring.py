"""Rewiring: small weights go, as many new ones come elsewhere (Section 3.1, Appendix A)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import InputError
from . import index as plain
from .tensor import SparseTensor, random_positions

Schedule = tuple[tuple[int, int], ...]

REPORT_SCHEDULE: Schedule = ((12_500, 100), (40_000, 200), (70_000, 400), (95_000, 800))
"""(last update, every so many updates) for 100,000 updates; after the last one never."""

METHODS = ("dsr", "set", "static")


def is_due(step: int, schedule: Schedule, frequency_multiplier: float) -> bool:
    """Whether update `step`, counted from 1, is followed by a rewiring."""
    for until, every in schedule:
        if step <= until and frequency_multiplier:
            return step % max(1, round(every / frequency_multiplier)) == 0
    return False


def shares(total: int, weights: Sequence[int], capacity: Sequence[int]) -> list[int]:
    """`total` split in proportion to the weights, never more than fits, to the last one.

    The rest after rounding goes to the largest remainders; what a full tensor cannot take goes to
    the others, in proportion again.
    """
    given = [0] * len(weights)
    left = total
    while left:
        open_ = [i for i in range(len(given)) if given[i] < capacity[i]]
        if not open_:
            raise ValueError(f"{left} of {total} find no place")
        heavy = [i for i in open_ if weights[i] > 0]
        parts = {i: weights[i] for i in heavy} if heavy else {i: capacity[i] for i in open_}
        whole = sum(parts.values())
        exact = {i: left * part / whole for i, part in parts.items()}
        floors = {i: left * part // whole for i, part in parts.items()}
        rest = left - sum(floors.values())
        for i in sorted(parts, key=lambda i: (floors[i] - exact[i], i))[:rest]:
            floors[i] += 1
        for i, count in floors.items():
            taken = min(count, capacity[i] - given[i])
            given[i] += taken
            left -= taken
    return given


@dataclass
class Rewiring:
    """Counts the updates and rewires when it is time; belongs into a snapshot."""

    tensors: list[SparseTensor]
    method: str
    fraction: float
    """Of the elements of all sparse tensors, to rewire at a time."""
    schedule: Schedule
    frequency_multiplier: float
    threshold: float
    generator: torch.Generator
    step: int = 0
    rewirings: int = 0
    rewired: int = 0
    """Weights dropped, and grown elsewhere, so far."""

    def __call__(self) -> bool:
        """To be called after every update; a prediction is of a step without a rewiring."""
        self.step += 1
        due = is_due(self.step, self.schedule, self.frequency_multiplier)
        moves = self.method != "static" and not any(plain.is_fake(t.index) for t in self.tensors)
        if due and moves:
            self.rewire()
        return due and moves

    @torch.no_grad()
    def rewire(self) -> None:
        """Drop and grow now; the number of nonzeros stays, momentum starts again."""
        if not self.tensors:
            return
        run: dict[str, Callable[[list[torch.Tensor]], tuple[list[torch.Tensor], list[int]]]] = {
            "dsr": self._dynamic_reparameterization,
            "set": self._evolution,
        }
        values = _on_host([t.values.detach() for t in self.tensors])
        indices = _on_host([t.index for t in self.tensors])
        with _one_thread():
            dropped, grown = run[self.method](values)
            for tensor, old, index, drop, grow in zip(
                self.tensors, values, indices, dropped, grown, strict=True
            ):
                before = tensor.nonzeros
                _move(tensor, old, index, drop, grow, self.generator)
                tensor.reset_state(before)
        self.rewirings += 1
        self.rewired += sum(grown)

    def _dynamic_reparameterization(
        self, values: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Drop |w| < H everywhere, double or halve H, grow (l_i / L) K.

        Departure: a tensor that loses all it has gets one new position first, or it would stay
        empty for good.
        """
        dropped = [old.abs() < self.threshold for old in values]
        counts = [int(drop.sum()) for drop in dropped]
        total = sum(counts)
        wanted = self.fraction * sum(t.numel for t in self.tensors)
        if total < 0.9 * wanted:
            self.threshold *= 2
        elif total > 1.1 * wanted:
            self.threshold /= 2
        left = [t.nonzeros - count for t, count in zip(self.tensors, counts, strict=True)]
        saved = [int(kept == 0) for kept in left]
        room = [t.numel - k - s for t, k, s in zip(self.tensors, left, saved, strict=True)]
        grown = shares(total - sum(saved), left, room)
        return dropped, [g + s for g, s in zip(grown, saved, strict=True)]

    def _evolution(self, values: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
        """In each tensor drop its share of the smallest and grow as many."""
        dropped, grown = [], []
        for tensor, old in zip(self.tensors, values, strict=True):
            count = min(tensor.nonzeros, round(self.fraction * tensor.numel))
            smallest = old.abs().sort(stable=True).indices[:count]
            drop = torch.zeros(tensor.nonzeros, dtype=torch.bool)
            drop[smallest] = True
            dropped.append(drop)
            grown.append(count)
        return dropped, grown

    def state_dict(self) -> dict[str, Any]:
        """State to save; the patterns are in the model's state."""
        return {
            "step": self.step,
            "threshold": self.threshold,
            "generator": self.generator.get_state(),
            "rewirings": self.rewirings,
            "rewired": self.rewired,
        }

    def counts(self) -> dict[str, int]:
        """For a run's records."""
        return {"rewirings": self.rewirings, "rewired_weights": self.rewired}

    def check_state(self, state: dict[str, Any]) -> None:
        """InputError for a state with more or fewer nonzeros: it is of another density.

        Rewiring moves them from tensor to tensor; how many there are in all never changes.
        """
        names = [f"{tensor.name}_values" for tensor in self.tensors]
        held = sum(state["model"][name].numel() for name in names if name in state["model"])
        own = sum(tensor.nonzeros for tensor in self.tensors)
        if held != own and all(name in state["model"] for name in names):
            raise InputError(
                f"the state has {held:,} nonzeros, the step {own:,}: it has another density",
                hint="apply the plan it was saved under",
            )

    def resized(self, name: str) -> bool:
        """Whether it is of nonzeros that come and go; tied ones have a second name."""
        own = {tensor.name.rpartition(".")[2] for tensor in self.tensors}
        return name.rpartition(".")[2].startswith(tuple(f"{last}_" for last in own))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.step = int(state["step"])
        self.threshold = float(state["threshold"])
        self.generator.set_state(state["generator"])
        self.rewirings = int(state["rewirings"])
        self.rewired = int(state["rewired"])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Threads take longer to meet than such short loops take; on a busy machine far longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Flat tensors on the CPU; those of a GPU come together, since each wait for it is long."""
    if all(t.device.type == "cpu" for t in tensors) or len({t.dtype for t in tensors}) > 1:
        return [t.cpu() for t in tensors]
    return list(torch.cat(tensors).cpu().split([t.numel() for t in tensors]))


def _move(
    tensor: SparseTensor,
    old: torch.Tensor,
    index: torch.Tensor,
    drop: torch.Tensor,
    grow: int,
    generator: torch.Generator,
) -> None:
    """Without the dropped, with `grow` more at random among the zeros, at value 0.

    All on the CPU whatever the device, so that a seed means the same everywhere.
    """
    kept = torch.zeros(tensor.numel, dtype=torch.bool)
    kept.masked_scatter_(plain.decode(index, tensor.shape, tensor.nonzeros), ~drop)
    mask = kept.clone()
    mask[random_positions(~kept, grow, generator)] = True
    values = old.new_zeros(tensor.nonzeros - int(drop.sum()) + grow)
    values.masked_scatter_(kept[mask], old[~drop])
    device = tensor.values.device
    tensor.replace(values.to(device), plain.encode(mask, tensor.shape).to(device))
