"""A step of one process → the step of one of several ranks, by rule: which bytes a rank has.

`ddp` adds gradients over the ranks where they lie; small ones are packed. `fsdp` (FSDP2) keeps a
share of parameters, gradients and state. It gathers the parameters of a unit before its forward and
before its backward pass, into one flat buffer and from there into tensors, and has the next unit's
buffer under way. Gradients of a unit are copied into a flat buffer and reduced; that buffer goes
when the next one comes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest

from ..trace.graph import ParameterSpec, Phase, Role, Storage, Trace

BUCKET_BYTES = 2**20
"""Smaller gradients are packed into one message of about this size; larger ones go as they are."""


def replicated(trace: Trace) -> Trace:
    """One rank of `ddp`, whose trace is that of its share: with the largest message beside it."""
    start = _start_of(trace, Phase.OPTIMIZER)
    sizes = [s.nbytes for s in trace.storages if s.role is Role.GRADIENT and s.death > start]
    return _with(trace, [(messages_bytes(sizes), start, start + 1, Role.TRANSIENT, "")])


def messages_bytes(sizes: Sequence[int]) -> int:
    """Of gradients of these sizes, as they are packed: one message, and the one before it.

    A backend may hold a message for a moment after it was sent.
    """
    packs = [0]
    for nbytes in sizes:
        if nbytes < BUCKET_BYTES:
            packs[-1] += nbytes
            if packs[-1] >= BUCKET_BYTES:
                packs.append(0)
    return sum(sorted(packs)[-2:])


def sharded(
    trace: Trace,
    ranks: int,
    units: Sequence[tuple[str, ...]],
    *,
    keeps_gathered: bool = False,
    accumulates: bool = False,
    releases: bool = False,
) -> Trace:
    """One rank of `fsdp`; each unit is the paths of modules that are gathered together.

    `keeps_gathered`: parameters stay from the forward to the backward pass. `accumulates`: several
    microbatches run, and gradients stay whole until the last. `releases`: parameters are updated
    when their gradients are reduced, which then go.
    """
    of_parameter = {p.storage: _unit_of(p.name, units) for p in trace.parameters}
    share = {p.storage: _share(p, ranks) for p in trace.parameters}
    every = _Units(trace, units)
    whole: dict[int, int] = {}
    for parameter in trace.parameters:
        unit = of_parameter[parameter.storage]
        whole[unit] = whole.get(unit, 0) + _nbytes(parameter)
    kept: dict[int, int] = dict.fromkeys(whole, 0)
    for parameter in trace.parameters:
        kept[of_parameter[parameter.storage]] += share[parameter.storage]
    total = sum(whole.values()) or 1
    ratio = sum(kept.values()) / total
    found: list[Storage] = []
    reduced: dict[int, int] = {}
    most, copies = _of_updates(trace) if releases else (None, set())
    for storage in trace.storages:
        if storage.index in copies:  # they come when gradients are reduced, and are of a share
            storage = replace(storage, nbytes=0)
        unit = _unit_of(storage.module, units)
        if storage.role is Role.MODEL and storage.index in share:
            found.append(replace(storage, nbytes=share[storage.index]))
        elif storage.role is Role.OPTIMIZER_STATE and storage.nbytes > 8:
            found.append(replace(storage, nbytes=-(-int(storage.nbytes * ratio) // 4) * 4))
        elif storage.role is Role.GRADIENT:
            done = every.reduced_at(unit) + 1  # copied into the flat buffer first
            found.append(replace(storage, death=max(done, storage.birth + 1)))
            reduced[unit] = reduced.get(unit, 0) + storage.nbytes
        else:
            found.append(storage)
    extra = every.gathered(whole, keeps_gathered)
    shares = {u: kept[u] / max(whole[u], 1) for u in whole}
    passing = None if most is None else int(ratio * most)
    extra += every.reductions(reduced, shares, passing)
    if accumulates:
        extra += every.further(reduced)
    return _with(replace(trace, storages=tuple(found)), extra)


_Extra = tuple[int, int, int, Role, str]
_OUTSIDE = -1


class _Units:
    """When the units of a step run."""

    def __init__(self, trace: Trace, units: Sequence[tuple[str, ...]]) -> None:
        self._forward: dict[int, tuple[int, int]] = {}
        self._backward: dict[int, tuple[int, int]] = {}
        self.end = _start_of(trace, Phase.OPTIMIZER)
        self._last = len(trace.ops)
        # Traces of planned steps know no modules: a unit runs where its parameters are read, and
        # its backward pass ends with its last gradient.
        owner = {p.storage: _unit_of(p.name, units) for p in trace.parameters}
        of_value = {v.index: owner[v.storage] for v in trace.values if v.storage in owner}
        for op in trace.ops:
            if op.phase is not Phase.OPTIMIZER:
                ran = self._forward if op.phase is Phase.FORWARD else self._backward
                for unit in {of_value.get(spec.value, _OUTSIDE) for _, spec in op.inputs}:
                    self._extend(ran, unit, op.index)
        for storage in trace.storages:
            if storage.role is Role.GRADIENT and storage.birth >= 0:
                self._extend(self._backward, _unit_of(storage.module, units), storage.birth)

    @staticmethod
    def _extend(ran: dict[int, tuple[int, int]], unit: int, at: int) -> None:
        if unit != _OUTSIDE:
            first, last = ran.get(unit, (at, at))
            ran[unit] = (min(first, at), max(last, at))

    def reduced_at(self, unit: int) -> int:
        """After its last gradient; what is outside of all units comes last."""
        return self._backward[unit][1] + 1 if unit in self._backward else self.end

    def gathered(self, whole: dict[int, int], keeps: bool) -> list[_Extra]:
        """Whole parameters while they are needed, and the flat buffers they come in."""
        found: list[_Extra] = []
        outside = whole.get(_OUTSIDE, 0)
        if outside:
            found.append((outside, 0, self.end, Role.TRANSIENT, ""))
            found.append((outside, 0, self._next(self._forward, 0), Role.TRANSIENT, ""))
        for ran, backward in ((self._forward, False), (self._backward, True)):
            order = sorted(ran, key=lambda unit: ran[unit][0])
            for unit, later in zip_longest(order, order[1:]):
                first, last = ran[unit]
                nbytes = whole.get(unit, 0)
                if not (backward and keeps):
                    stop = self._backward.get(unit, (0, last))[1] if keeps else last
                    found.append((nbytes, first, stop + 1, Role.TRANSIENT, ""))
                if backward and keeps:
                    continue
                begin = ran[later][0] if later is not None else last + 1
                if not backward:  # its own buffer, until the next one is there
                    found.append((nbytes, first, begin, Role.TRANSIENT, ""))
                elif later is not None:  # the next one's is under way
                    found.append((whole.get(later, 0), first, begin + 1, Role.TRANSIENT, ""))
        return found

    def reductions(
        self, sizes: dict[int, int], share: dict[int, float], passing: int | None
    ) -> list[_Extra]:
        """Flat buffers of gradients, and what is kept of them: nothing where updates follow.

        Those need as much as `passing` beside; None where they wait for the end.
        """
        found: list[_Extra] = []
        order = sorted(sizes, key=self.reduced_at)
        for unit, later in zip_longest(order, order[1:]):
            at = self.reduced_at(unit)
            until = self.end if later is None else self.reduced_at(later)
            own = int(sizes[unit] * share.get(unit, 1.0))
            found.append((sizes[unit], at, max(until, at + 1), Role.TRANSIENT, ""))
            gone = self._last + 1 if passing is None else at + 1
            found.append((own, at, gone, Role.GRADIENT, ""))
            found.append((passing or 0, at, at + 1, Role.TRANSIENT, ""))
        return found

    def further(self, sizes: dict[int, int]) -> list[_Extra]:
        """Gradients of a further microbatch, beside those of the ones before."""
        return [
            (sizes[unit], first, last + 1, Role.TRANSIENT, "")
            for unit, (first, last) in self._backward.items()
            if unit in sizes
        ]

    @staticmethod
    def _next(ran: dict[int, tuple[int, int]], after: int) -> int:
        return min((first for first, _ in ran.values() if first >= after), default=after + 1)


def _with(trace: Trace, extra: Sequence[_Extra]) -> Trace:
    storages, last = list(trace.storages), len(trace.ops) + 1
    for nbytes, birth, death, role, module in extra:
        if nbytes > 0 and death > birth:
            storages.append(Storage(len(storages), nbytes, birth, min(death, last), role, module))
    return replace(trace, storages=tuple(storages))


def _of_updates(trace: Trace) -> tuple[int, set[int]]:
    """Copies that updates make between their uses of the state: most of one parameter, and all."""
    owner = {v.index: v.storage for v in trace.values}
    state = {s.index for s in trace.storages if s.role is Role.OPTIMIZER_STATE and s.nbytes > 8}
    used: dict[int, tuple[int, int]] = {}
    for op in trace.ops:
        for index in {owner.get(spec.value, -1) for _, spec in op.inputs} & state:
            first, _ = used.get(index, (op.index, op.index))
            used[index] = first, op.index
    kept = (Role.MODEL, Role.BUFFER, Role.OPTIMIZER_STATE, Role.GRADIENT)
    made = sorted((s for s in trace.storages if s.role not in kept), key=lambda s: s.birth)
    births = [s.birth for s in made]
    most, every = 0, set()
    for first, last in set(used.values()):
        changes: dict[int, int] = {}
        for storage in made[bisect_left(births, first) : bisect_right(births, last)]:
            if storage.death <= last + 1:
                every.add(storage.index)
                for at, sign in ((storage.birth, 1), (storage.death, -1)):
                    changes[at] = changes.get(at, 0) + sign * storage.nbytes
        sums = accumulate(changes[at] for at in sorted(changes))
        most = max(most, max(sums, default=0))
    return most, every


def _start_of(trace: Trace, phase: Phase) -> int:
    return next((op.index for op in trace.ops if op.phase is phase), len(trace.ops) - 1)


def _unit_of(path: str, units: Sequence[tuple[str, ...]]) -> int:
    for number, unit in enumerate(units):
        if any(path == block or path.startswith(f"{block}.") for block in unit):
            return number
    return _OUTSIDE


def _share(parameter: ParameterSpec, ranks: int) -> int:
    """Rows of the first rank, which has most."""
    rows = parameter.shape[0] if parameter.shape else 1
    return -(-rows // ranks) * (_nbytes(parameter) // max(rows, 1))


def _nbytes(parameter: ParameterSpec) -> int:
    return parameter.numel * parameter.dtype.itemsize
