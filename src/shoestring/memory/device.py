"""The `device` accounting: what PyTorch's allocator will show for the plain step.

The trace holds when each storage was made and dropped, under autograd's own rules. On the CPU that
is the answer. On CUDA the step is replayed through a simulated caching allocator
(`memory.allocator`) together with what operators allocate for themselves (`memory.workspaces`),
three times over, since what a step leaves in the cache shapes the blocks of the next.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ..trace.graph import Phase, Role, Storage, Trace
from .cuda.allocator import Allocator, CachingAllocator
from .cuda.cudnn import ConvolutionTable
from .cuda.operands import Temporary
from .cuda.workspaces import Persistent, persistent, temporaries
from .timeline import Change, Timeline, build

STEPS = 3
"""Steps replayed: the optimizer's state appears in the first, the third is the steady one."""


def device_timeline(trace: Trace, convolutions: ConvolutionTable | None = None) -> Timeline:
    """Bytes by role at every operation of the step.

    On CUDA, bytes are those of allocator blocks, and WORKSPACE at an operation is what its
    temporaries add to the peak inside it. `convolutions` replaces the shipped calibration.
    """
    if convolutions is not None:
        return _made(trace, convolutions)
    for known, timeline in _recent:
        if known() is trace:
            return timeline
    timeline = _made(trace, ConvolutionTable.shipped())
    _recent.append((weakref.ref(trace), timeline))
    return timeline


_recent: deque[tuple[weakref.ref[Trace], Timeline]] = deque(maxlen=2)
"""Of the traces that were asked for last: a planner asks for the plain step's several times."""


def _made(trace: Trace, convolutions: ConvolutionTable) -> Timeline:
    labels = [(op.name, str(op.phase), op.module) for op in trace.ops]
    if trace.device == "cuda":
        return build(Replay(trace, convolutions, CachingAllocator()).run(), labels)
    changes: list[Change] = []
    for storage in trace.storages:
        if storage.birth >= storage.death or not storage.nbytes:
            continue
        changes.append(Change(max(storage.birth, 0), storage.nbytes, storage.role, storage.module))
        changes.append(Change(storage.death, -storage.nbytes, storage.role, storage.module))
    return build(changes, labels)


class Events:
    """Allocations and frees of a trace's operations, in order: the same for every replay."""

    def __init__(self, trace: Trace, convolutions: ConvolutionTable) -> None:
        count = len(trace.ops)
        self.born: list[list[Storage]] = [[] for _ in range(count + 1)]
        self.dying: list[list[Storage]] = [[] for _ in range(count + 1)]
        self.state: list[Storage] = []
        self.before: list[Storage] = []
        """There before the step, but for the optimizer's state."""
        for storage in trace.storages:
            if storage.birth >= storage.death or not storage.nbytes:
                continue
            if storage.birth >= 0:
                self.born[storage.birth].append(storage)
                self.dying[min(storage.death, count)].append(storage)
            elif storage.role is Role.OPTIMIZER_STATE:
                self.state.append(storage)
            else:
                self.before.append(storage)
        self.temporaries: list[tuple[Temporary, ...]] = [
            temporaries(op, convolutions) for op in trace.ops
        ]
        self.workspaces = persistent(trace)


@dataclass
class Replay:
    """Steps of a trace run through a simulated allocator."""

    trace: Trace
    convolutions: ConvolutionTable
    allocator: Allocator
    events: Events | None = None
    """Of the same trace, where another replay has them."""

    def __post_init__(self) -> None:
        self.events = events = self.events or Events(self.trace, self.convolutions)
        self._born, self._dying = events.born, events.dying
        self._temporaries = events.temporaries
        self.state, self.workspaces = events.state, events.workspaces
        self._resident: list[tuple[int, Role, str]] = []
        self._held: dict[int, int] = {}
        self._changes: list[Change] | None = None
        self.keep(events.before)

    def run(self) -> list[Change]:
        """Block sizes of the last step as changes of live bytes."""
        changes: list[Change] = []
        for step in range(STEPS):
            first = step == 0
            seen = changes if step == STEPS - 1 else None
            self.step(self.workspaces if first else (), self.state if first else [], changes=seen)
        for handle, role, module in self._resident:
            nbytes = self.allocator.block_bytes(handle)
            changes.append(Change(0, nbytes, role, module))
        return changes

    def keep(self, storages: Iterable[Storage]) -> None:
        """Allocate what stays for good."""
        for storage in storages:
            self._keep(storage.nbytes, storage.role, storage.module)

    def _keep(self, nbytes: int, role: Role, module: str) -> None:
        self._resident.append((self.allocator.allocate(nbytes), role, module))

    def step(
        self,
        kept: tuple[Persistent, ...],
        state: list[Storage],
        *,
        update: bool = True,
        share: float = 1.0,
        changes: list[Change] | None = None,
    ) -> None:
        """One step, or its passes without the update; what is kept for good appears in it.

        Tensors of the passes have only a share of their bytes where a smaller part of the batch
        runs. `changes` is given the changes of live bytes.
        """
        self._share, self._changes = share, changes
        allocator = self.allocator
        first_use: dict[int, list[Persistent]] = {}
        for workspace in kept:
            first_use.setdefault(workspace.operation, []).append(workspace)
        awaiting_state = bool(state)
        count = len(self.trace.ops) if update else self.trace.update_start
        for index, op in enumerate(self.trace.ops[:count]):
            self._release(index)
            if op.phase is Phase.OPTIMIZER:
                self._share = 1.0
                if awaiting_state:
                    awaiting_state = False
                    self.keep(state)
            for workspace in first_use.get(index, ()):
                self._keep(workspace.nbytes, Role.WORKSPACE, "")
            peak = self._operate(index)
            excess = peak - allocator.allocated_bytes
            if excess > 0 and changes is not None:
                changes.append(Change(index, excess, Role.WORKSPACE, op.module))
                changes.append(Change(index + 1, -excess, Role.WORKSPACE, op.module))
        if awaiting_state:
            self.keep(state)
        self._release(count)
        for handle in self._held.values():  # of passes whose update is left out
            allocator.free(handle)
        self._held.clear()

    def drop_workspaces(self) -> None:
        """Give back what libraries keep."""
        for handle, role, _ in self._resident:
            if role is Role.WORKSPACE:
                self.allocator.free(handle)

    def _operate(self, index: int) -> int:
        """Allocate an operation's results and temporaries as it would; return the peak inside."""
        allocator, results = self.allocator, iter(self._born[index])
        allocator.reset_peak()
        made = 0
        for temporary in self._temporaries[index]:
            while made < temporary.results and (storage := next(results, None)) is not None:
                self._make(storage)
                made += 1
            handles = [allocator.allocate(self._scaled(nbytes)) for nbytes in temporary.nbytes]
            for handle in handles:
                allocator.free(handle)
        for storage in results:
            self._make(storage)
        return allocator.peak_allocated_bytes

    def _scaled(self, nbytes: int) -> int:
        return nbytes if self._share == 1 else int(nbytes * self._share)

    def _make(self, storage: Storage) -> None:
        own = storage.role is Role.GRADIENT
        handle = self.allocator.allocate(storage.nbytes if own else self._scaled(storage.nbytes))
        self._held[storage.index] = handle
        if self._changes is not None:
            nbytes = self.allocator.block_bytes(handle)
            self._changes.append(Change(storage.birth, nbytes, storage.role, storage.module))

    def _release(self, index: int) -> None:
        for storage in self._dying[index]:
            handle = self._held.pop(storage.index)
            if self._changes is not None:
                nbytes = self.allocator.block_bytes(handle)
                self._changes.append(Change(index, -nbytes, storage.role, storage.module))
            self.allocator.free(handle)
