"""A predicted timeline as a memory snapshot, which PyTorch's memory_viz opens.

The file is what PyTorch itself dumps on CUDA: events of blocks that come and go, and
what is there at the end. A block's frame is the operation that made it, its module and its role.
"""

from __future__ import annotations

import pickle
from typing import Any

from ..trace.graph import Role
from .timeline import Change, Timeline

_PAGE = 2**21


def snapshot(timeline: Timeline) -> dict[str, Any]:
    """The step from its first operation to its last; an operation takes a microsecond."""
    events: list[dict[str, Any]] = []
    space, held = _Space(), {}  # type: ignore[var-annotated]
    last = len(timeline.labels)
    # Within an instant what goes, goes first, as in the timeline.
    for change in sorted(timeline.changes, key=lambda c: (c.instant, c.nbytes > 0)):
        if change.instant >= last or not change.nbytes:
            continue
        key = (change.role, change.module, abs(change.nbytes))
        frames = [_frame(timeline, change)]
        if change.nbytes > 0:
            address = space.take(change.nbytes)
            held.setdefault(key, []).append((address, frames))
            events.append(_event("alloc", address, change, frames))
        else:
            address, _ = held[key].pop()
            space.give(address, -change.nbytes)
            for action in ("free_requested", "free_completed"):
                events.append(_event(action, address, change, frames))
    kept = [(a, k[2], f) for k, blocks in held.items() for a, f in blocks]
    return {
        "segments": [_segment(space, kept)],
        "device_traces": [events],
        "allocator_settings": {},
        "external_annotations": [],
    }


def pickled(timeline: Timeline) -> bytes:
    """The bytes of a snapshot's file."""
    return pickle.dumps(snapshot(timeline))


def _frame(timeline: Timeline, change: Change) -> dict[str, Any]:
    operation, phase, _ = timeline.labels[change.instant]
    name = f"{phase}: {operation}"
    if change.instant == 0 and change.role in (
        Role.MODEL, Role.BUFFER, Role.OPTIMIZER_STATE, Role.INPUT,
    ):  # fmt: skip
        name = "before the step"
    return {
        "name": name,
        "filename": f"{change.module or 'model'} ({change.role.value})",
        "line": 0,
    }


def _event(action: str, address: int, change: Change, frames: list[Any]) -> dict[str, Any]:
    return {
        "action": action, "addr": address, "size": abs(change.nbytes), "stream": 0,
        "time_us": change.instant, "compile_context": "", "frames": frames,
    }  # fmt: skip


def _segment(space: _Space, kept: list[tuple[int, int, list[Any]]]) -> dict[str, Any]:
    """All that was ever used, with what is live at the end and the gaps between."""
    total = -(-(space.end - space.start) // _PAGE) * _PAGE
    blocks, at = [], space.start
    for address, size, frames in sorted(kept, key=lambda block: block[0]):
        if address > at:
            blocks.append(_block(at, address - at, "inactive", []))
        blocks.append(_block(address, size, "active_allocated", frames))
        at = address + size
    if at < space.start + total:
        blocks.append(_block(at, space.start + total - at, "inactive", []))
    live = sum(size for _, size, _ in kept)
    return {
        "device": 0, "address": space.start, "total_size": total, "allocated_size": live,
        "active_size": live, "requested_size": live, "stream": 0, "segment_type": "large",
        "segment_pool_id": (0, 0), "is_expandable": True, "frames": [], "blocks": blocks,
    }  # fmt: skip


def _block(address: int, size: int, state: str, frames: list[Any]) -> dict[str, Any]:
    return {
        "address": address, "size": size, "requested_size": size, "state": state, "frames": frames,
    }  # fmt: skip


class _Space:
    """Addresses: the first gap that is large enough, else the end."""

    start = 2**40

    def __init__(self) -> None:
        self.end = self.start
        self._gaps: list[tuple[int, int]] = []

    def take(self, size: int) -> int:
        for number, (address, room) in enumerate(self._gaps):
            if room >= size:
                rest = [(address + size, room - size)] if room > size else []
                self._gaps[number : number + 1] = rest
                return address
        self.end += size
        return self.end - size

    def give(self, address: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for begin, room in sorted([*self._gaps, (address, size)]):
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((begin, room))
        self._gaps = merged
