"""Which rank runs which examples of a minibatch, and what they weigh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..errors import InputError
from ..techniques.plan import Plan
from ..techniques.splitting.units import AUTO, EXAMPLES, SUM, Units, counter
from ..trace.split import cut, examples_of
from .group import KINDS, ShardingName, communication_device, rank, ranks


@dataclass(frozen=True)
class Parallel:
    """How the ranks of a process group share a step.

    Args:
        kind: "ddp", where every rank holds the whole model; or "fsdp", which splits parameters,
            gradients and optimizer state over the ranks (FSDP2).
        batches: "whole" where every rank is given the same minibatch and runs its share of it;
            "shares" where each is given its own part, as `DistributedSampler` does.
        weight: What the loss is averaged over; by default as the plan says.

    Examples:
        >>> parallel = ss.Parallel("fsdp", batches="shares")  # ss.apply(…, parallel=parallel)
    """

    kind: ShardingName = "ddp"
    batches: Literal["whole", "shares"] = "whole"
    weight: str | Units | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"unknown parallel {self.kind!r}", hint="'ddp' or 'fsdp'")
        if self.batches not in ("whole", "shares"):
            raise InputError(f"unknown batches {self.batches!r}", hint="'whole' or 'shares'")


def cut_evenly(examples: int, parts: int, unit: int = 1) -> list[tuple[int, int]]:
    """First and last (exclusive) example of each part, in whole microbatches of `unit`.

    So every microbatch, and what BatchNorm sees, is the one that a single process would run; only
    where there are fewer microbatches than parts are they cut.
    """
    blocks = -(-examples // unit)
    if blocks < parts:
        blocks, unit = examples, 1
    bounds = [min(unit * (blocks * part // parts), examples) for part in range(parts + 1)]
    return list(pairwise(bounds))


def shares_of(
    examples: int, parallel: Parallel, plan: Plan, batch: Any = None
) -> list[tuple[int, int]]:
    """Which examples of a minibatch each rank runs; the batch where tokens make microbatches."""
    unit = plan.examples_together(batch)
    uneven = -(-examples // unit) % ranks() != 0
    as_many = uneven and _needs_as_many(parallel, plan, batch)
    return cut_evenly(examples, ranks(), 1 if as_many else unit)


def _needs_as_many(parallel: Parallel, plan: Plan, batch: Any) -> bool:
    """Whether all ranks must run the same number of microbatches."""
    return parallel.kind == "fsdp" and plan.examples_at_once(batch) is not None


class Shares:
    """batch → this rank's part of it and its weight, in place of the whole batch.

    Under `fsdp` all ranks gather parameters together and so need as many microbatches: each cuts
    its share into that many, where whole ones do not come out even.
    """

    def __init__(
        self,
        parallel: Parallel,
        plan: Plan,
        test: Callable[[Any], str | Units] = lambda batch: EXAMPLES,
    ) -> None:
        self._parallel, self._plan, self._test = parallel, plan, test
        self._whole = parallel.batches == "whole"
        self._units = parallel.weight or plan.loss_units

    def __call__(self, batch: Any) -> Iterator[tuple[Any, float | torch.Tensor]]:
        examples = examples_of(batch) or 0
        if self._units == AUTO:
            self._units = _of_first_rank(lambda: self._test(batch))
        total = self._count(batch, (0, examples))
        unit = self._plan.examples_together(batch)
        if self._whole:
            shares = shares_of(examples, self._parallel, self._plan, batch)
        else:
            shares = [(0, examples)] * ranks()
            total = _over_ranks(total, dist.ReduceOp.SUM)
        sizes = [stop - start for start, stop in shares]
        count = self._microbatches(batch, max(sizes), unit)
        if min(sizes) < count:  # said on all ranks, before one waits for another
            raise InputError(
                f"a minibatch of {examples} has no {count} microbatches for each of {ranks()} ranks"
                if count > 1
                else f"a minibatch of {examples} has no share for each of {ranks()} ranks",
                hint="a larger minibatch, larger microbatches or fewer ranks",
            )
        first, last = shares[rank()]
        unit = unit if -(-(last - first) // unit) == count else 1
        for start, stop in cut_evenly(last - first, count, unit):
            part = (first + start, first + stop)
            weight = 1.0 if self._units == SUM else self._count(batch, part) / total
            yield cut(batch, *part), weight

    def _microbatches(self, batch: Any, examples: int, unit: int) -> int:
        """How many parts every rank makes of its share; 1 leaves the cutting to the plan."""
        if not _needs_as_many(self._parallel, self._plan, batch):
            return 1
        count = -(-examples // unit)
        return count if self._whole else int(_over_ranks(count, dist.ReduceOp.MAX))

    def _count(self, batch: Any, part: tuple[int, int]) -> float | torch.Tensor:
        """The units that a part's loss is averaged over."""
        units = counter(self._units)(cut(batch, *part))
        return units.detach().double() if isinstance(units, torch.Tensor) else float(units)


def _of_first_rank(test: Callable[[], str | Units]) -> Any:
    """The result or the error of rank 0 on its batch: all ranks weight alike."""
    held: list[Any] = [None]
    if rank() == 0:
        try:
            held = [test()]
        except InputError as error:
            held = [(error.message, error.hint)]
    dist.broadcast_object_list(held, src=0)
    if isinstance(held[0], tuple):
        raise InputError(held[0][0], hint=held[0][1])
    return held[0]


def _over_ranks(number: float | torch.Tensor, op: Any) -> torch.Tensor:
    """A number of every rank, reduced; nobody waits for the device."""
    own = torch.as_tensor(number, dtype=torch.float64)
    mine = own.detach().clone().to(communication_device())
    dist.all_reduce(mine, op=op)
    return mine
