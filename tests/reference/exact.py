"""The least cost of training a chain, or a small graph, within a budget: a mixed integer program.

It checks `planning.chain` and is far too slow to replace it. After Jain et al., "Checkmate" (2020):
before each stage's backward pass any blocks may run again, in forward order, keeping anything or
nothing. Bytes and costs are those of `planning.stages`, and the head is kept as there. There are
three classes of schedules, each a part of the next:

- "persistent": what is kept stays until the backward pass that reads it, as in nested regions;
- "dropping": it may be dropped before, and made again;
- "parted": the input of a stage may be dropped while what the stage itself keeps stays. Autograd's
  saved tensors hold the input, so this takes another way to execute than regions.

Time is cut into phases, one for each stage's backward pass, from the last to the first; the forward
pass is a part of the first phase. In phase j there is a slot for each stage s ≤ j to run forward
in, then the backward pass of j. Binary variables:

    run[j, s, o]    stage s runs in slot s of phase j, with option o or just passing
    out[j, p]       the output of p is there when phase j begins
    tape[j, p, o]   what option o of stage p keeps is there when phase j begins

and, between 0 and 1, live[j, p, s]: the output of p is there in slot s > p of phase j.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from shoestring.memory.work import Cost
from shoestring.techniques.checkpointing.stages import Chain, flops_only

Terms = list[tuple[Hashable, float]]
Class = Literal["persistent", "dropping", "parted"]


@dataclass(frozen=True)
class Optimum:
    """The least cost, and how far below it the solver could not exclude a better one."""

    cost: float
    bound: float


def optimum(
    chain: Chain,
    budget_bytes: int,
    cost: Cost = flops_only,
    *,
    reads: Sequence[Sequence[int]] | None = None,
    schedules: Class = "persistent",
    seconds: float = 60.0,
) -> Optimum | None:
    """The least cost within the budget; None if nothing fits.

    `reads[i]` are the stages whose output stage i reads, head and tail among them; by default the
    one before it. After `seconds` the best that was found counts, and `bound` tells how good it is.
    """
    count = len(chain.stages)
    given = reads or [(i - 1,) if i else () for i in range(count)]
    program = _Program(chain, budget_bytes, cost, given, schedules)
    return program.solve(seconds)


class _Program:
    def __init__(
        self,
        chain: Chain,
        budget_bytes: int,
        cost: Cost,
        reads: Sequence[Sequence[int]],
        schedules: Class,
    ) -> None:
        self.class_ = schedules
        self.stages, self.later = chain.stages, chain.later_gradient_bytes
        self.room, self.cost, self.reads = budget_bytes - chain.fixed_bytes, cost, reads
        self.end = len(self.stages) - 1
        self.column: dict[Hashable, int] = {}
        self.prices: dict[int, float] = {}
        self.fractional: set[int] = set()
        self.rows: list[tuple[dict[int, float], float, float]] = []
        self.possible = budget_bytes >= chain.floor_bytes
        for j in range(self.end, -1, -1):
            self._phase(j)

    def _options(self, s: int) -> list[str]:
        return ["keep"] if s in (0, self.end) else list(self.stages[s].options)

    def _ways(self, j: int, s: int) -> list[str]:
        """How stage s may run in phase j; passing leaves nothing for its own backward pass."""
        return self._options(s) + (["pass"] if s < j else [])

    def _carried(self, j: int) -> list[int]:
        """Stages whose output may be there when phase j begins: some stage up to j reads it."""
        if j == self.end:
            return []
        return [p for p in range(j) if any(p in self.reads[r] for r in range(p + 1, j + 1))]

    def _phase(self, j: int) -> None:
        first = j == self.end
        for s in range(j + 1):
            for way in self._ways(j, s):
                self._price(("run", j, s, way), self._run_cost(j, s, way))
            self._row([(("run", j, s, way), 1) for way in self._ways(j, s)], upper=1)
        for p in self._carried(j):
            self._variable(("out", j, p))
        for p in range(j + 1):
            for o in [] if first else self._options(p):
                self._variable(("tape", j, p, o))
                for source in self.reads[p] if self.class_ != "parted" else ():
                    self._row([(("tape", j, p, o), 1), (("out", j, source), -1)], upper=0)
        self._follow_outputs(j)
        if not first:  # the head is always kept
            self._row([(("tape", j, 0, "keep"), 1)], lower=1)
            if 0 in self._carried(j):
                self._row([(("out", j, 0), 1)], lower=1)
        if self.class_ == "persistent" and not first:
            kept: list[Any] = [("out", p) for p in self._carried(j - 1)] if j else []
            kept += [("tape", p, o) for p in range(j) for o in self._options(p)]
            for kind, *rest in kept:
                self._row([((kind, j, *rest), 1), ((kind, j - 1, *rest), -1)], upper=0)
        for p in range(j):  # kept for the next phase only if it is there
            for o in self._options(p):
                made: Terms = [(("tape", j - 1, p, o), 1), (("run", j, p, o), -1)]
                self._row(made + ([] if first else [(("tape", j, p, o), -1)]), upper=0)
        self._backward(j)
        for s in range(j + 1 if first else j):
            held = self._held(j, s)
            waiting = self.later[j + 1] + (0 if first else self.stages[j].gradient_bytes)
            needs: Terms = [(("run", j, s, w), self._forward_bytes(s, w)) for w in self._ways(j, s)]
            self._row(held + needs, upper=self.room - waiting)

    def _run_cost(self, j: int, s: int, way: str) -> float:
        option = self.stages[s].options["keep" if way == "pass" else way]
        return self.cost(option.again if s == j < self.end else option.forward)

    def _forward_bytes(self, s: int, way: str) -> int:
        stage = self.stages[s]
        return stage.pass_bytes if way == "pass" else stage.options[way].forward_bytes

    def _follow_outputs(self, j: int) -> None:
        """The slots of phase j in which each output is there, and those in which it must be."""
        carried, onward = self._carried(j), self._carried(j - 1) if j else []
        for p in range(j):
            for s in range(p + 1, j + 2):  # j + 1: the backward pass
                live = ("live", j, p, s)
                self._variable(live, fractional=True)
                if s == p + 1:
                    made: Terms = [(("run", j, p, way), -1) for way in self._ways(j, p)]
                    made += [(("out", j, p), -1)] if p in carried else []
                    self._row([(live, 1), *made], upper=0)
                else:
                    self._row([(live, 1), (("live", j, p, s - 1), -1)], upper=0)
                if s <= j and p in self.reads[s]:
                    for way in self._ways(j, s):
                        self._row([(("run", j, s, way), 1), (live, -1)], upper=0)
            if p in self.reads[j]:
                self._row([(("live", j, p, j + 1), 1)], lower=1)
            if p in onward:
                self._row([(("out", j - 1, p), 1), (("live", j, p, j + 1), -1)], upper=0)

    def _held(self, j: int, slot: int) -> Terms:
        """Bytes there in a slot beside what runs in it; slot j + 1 is the backward pass."""
        carried = self._carried(j)
        terms: Terms = []
        for p in range(j):
            size = self.stages[p].held_bytes
            if p < slot:
                terms.append((("live", j, p, slot), size))
            elif p in carried:
                terms.append((("out", j, p), size))
        for p in range(j + 1):
            for o in self._options(p):
                size = self.stages[p].options[o].kept_bytes - self.stages[p].held_bytes
                if p < slot and p < j:
                    terms.append((("tape", j - 1, p, o), size))
                elif p >= slot and j < self.end:
                    terms.append((("tape", j, p, o), size))
        return terms

    def _backward(self, j: int) -> None:
        """One option of stage j is there, kept or made in this phase, and its gradients fit."""
        first = j == self.end
        uses: Terms = []
        needs: Terms = []
        for o in self._options(j):
            option, run, use = self.stages[j].options[o], ("run", j, j, o), ("use", j, o)
            self._price(use, self.cost(option.backward))
            uses.append((use, 1))
            before: Terms = [] if first else [(("tape", j, j, o), -1)]
            self._row([(use, 1), (run, -1), *before], upper=0)
            self._row([(run, 1), (use, -1)], upper=0)
            needs.append((use, option.backward_bytes))
            if not first:
                needs.append((run, option.again_bytes - option.backward_bytes))
        self._row(uses, lower=1, upper=1)
        self._row(self._held(j, j + 1) + needs, upper=self.room - self.later[j + 1])

    def _variable(self, name: Hashable, fractional: bool = False) -> int:
        index = self.column.setdefault(name, len(self.column))
        if fractional:
            self.fractional.add(index)
        return index

    def _price(self, name: Hashable, price: float) -> None:
        self.prices[self._variable(name)] = price

    def _row(self, terms: Terms, lower: float = -np.inf, upper: float = np.inf) -> None:
        row: dict[int, float] = {}
        for name, factor in terms:
            index = self._variable(name)
            row[index] = row.get(index, 0.0) + factor
        self.rows.append((row, lower, upper))

    def solve(self, seconds: float) -> Optimum | None:
        """Hand it to HiGHS."""
        count = len(self.column)
        largest = max(1.0, *(abs(f) for row, _, _ in self.rows for f in row.values()))
        entries = [(i, c, f) for i, (row, _, _) in enumerate(self.rows) for c, f in row.items()]
        scale = np.array([_scale(row, largest) for row, _, _ in self.rows])
        rows, columns, factors = (np.array(x) for x in zip(*entries, strict=True))
        matrix = csr_matrix((factors / scale[rows], (rows, columns)), shape=(len(self.rows), count))
        lower = np.array([low for _, low, _ in self.rows]) / scale
        upper = np.array([up for _, _, up in self.rows]) / scale
        prices = np.array([self.prices.get(i, 0.0) for i in range(count)])
        if not self.possible:
            return None
        found = milp(
            prices,
            constraints=LinearConstraint(matrix, lower, upper),
            integrality=np.array([i not in self.fractional for i in range(count)]).astype(int),
            bounds=Bounds(0, 1),
            options={"time_limit": seconds, "mip_rel_gap": 1e-6},
        )
        if found.x is None:
            return None
        return Optimum(float(found.fun), float(found.mip_dual_bound))


def _scale(row: Mapping[int, float], largest: float) -> float:
    """Rows of bytes are divided by the largest, so that the solver's tolerance is a small part."""
    return largest if max(map(abs, row.values())) > 1 else 1.0
