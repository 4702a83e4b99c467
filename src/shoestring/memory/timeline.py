"""Bytes by role at every instant of a step, whichever accounting made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..plain_values import PlainValues
from ..trace.graph import Role

ROLES: tuple[Role, ...] = tuple(Role)


@dataclass(frozen=True, slots=True)
class Change(PlainValues):
    """So many bytes more (or fewer) from this instant on."""

    instant: int
    nbytes: int
    role: Role
    module: str


@dataclass(frozen=True)
class Timeline(PlainValues):
    """Live bytes at each instant: one row an instant, one column a role.

    Examples:
        >>> timeline = ss.profile(model, batch, loss=loss, optimizer=optimizer).timeline
        >>> timeline.labels[timeline.peak_instant], timeline.totals.max()
    """

    labels: tuple[tuple[str, str, str], ...]
    """(operation, phase, module) of each instant."""
    bytes_by_role: np.ndarray
    """One column for each `Role`, in their order."""
    changes: tuple[Change, ...]
    """Bytes that come and go, with the module they are of."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        same = self.labels == other.labels and self.changes == other.changes
        return same and np.array_equal(self.bytes_by_role, other.bytes_by_role)

    @property
    def totals(self) -> np.ndarray:
        """Live bytes at each instant."""
        totals: np.ndarray = self.bytes_by_role.sum(axis=1)
        return totals

    @property
    def peak_instant(self) -> int:
        """The instant at which most is live; of several, the last."""
        totals = self.totals
        return int(len(totals) - 1 - totals[::-1].argmax()) if len(totals) else 0

    def roles_at(self, instant: int) -> dict[Role, int]:
        """Live bytes by role.

        Args:
            instant: Its row.

        Returns:
            Role → bytes.
        """
        return {role: int(self.bytes_by_role[instant, i]) for i, role in enumerate(ROLES)}

    def modules_at(self, instant: int) -> dict[str, int]:
        """Live bytes by module, largest first.

        Args:
            instant: Its row.

        Returns:
            Path of the module → bytes.
        """
        live: dict[str, int] = {}
        for change in self.changes:
            if change.instant <= instant:
                live[change.module] = live.get(change.module, 0) + change.nbytes
        return dict(sorted(((m, b) for m, b in live.items() if b), key=lambda item: -item[1]))


def build(changes: Sequence[Change], labels: Sequence[tuple[str, str, str]]) -> Timeline:
    """Sum changes into live bytes."""
    column = {role: i for i, role in enumerate(ROLES)}
    table = np.zeros((len(labels) + 1, len(ROLES)), dtype=np.int64)
    for change in changes:
        if change.instant < len(labels):
            table[change.instant, column[change.role]] += change.nbytes
    return Timeline(tuple(labels), table.cumsum(axis=0)[: len(labels)], tuple(changes))


_RESIDENT = (
    Role.MODEL, Role.BUFFER, Role.INPUT, Role.OPTIMIZER_STATE, Role.GRADIENT, Role.WORKSPACE,
)  # fmt: skip


def resident_bytes(timeline: Timeline) -> int:
    """Bytes that are live all the time; without the first operation's own memory."""
    first = sum(c.nbytes for c in timeline.changes if c.instant == 0 and c.role in _RESIDENT)
    gone = (c for c in timeline.changes if c.instant == 1 and c.role is Role.WORKSPACE)
    return first + sum(c.nbytes for c in gone if c.nbytes < 0)


def perfetto(timeline: Timeline) -> dict[str, Any]:
    """Events that Perfetto and chrome://tracing open: live bytes by role, and what ran.

    An instant is a microsecond: a prediction of memory has no clock.
    """
    events: list[dict[str, Any]] = []
    for instant, (operation, phase, module) in enumerate(timeline.labels):
        where = {"ph": "X", "pid": 0, "ts": instant, "dur": 1}
        events.append(
            {**where, "tid": 1, "name": operation, "cat": phase, "args": {"module": module}}
        )
        live = {role.value: size for role, size in timeline.roles_at(instant).items() if size}
        events.append({"ph": "C", "pid": 0, "ts": instant, "name": "live bytes", "args": live})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
