"""A traced step cut into the stages of a chain: head, blocks, tail, forward and backward.

A model of two blocks, whose step has 100 operations before the update:

    operations   0 … 9   10 … 19   20 … 29   30 … 34   35 … 44   45 … 64   65 … 84   85 … 99
    stage        head    block 1   block 2   tail      tail      block 2   block 1   head
                 forward                               backward

`BlockWatch` notes by hooks where each block begins and ends, forward and backward; `StagedRun` adds
up what each stage makes, keeps and costs.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from ...memory.device import device_timeline
from ...memory.timeline import resident_bytes
from ...memory.work import Work, work_of
from ...torch_private.trees import tree_leaves
from ...trace.graph import Phase, Role, Trace
from ...trace.recorder import Recorder

_ALLOCATION_BYTES = {"cpu": 1, "cuda": 512}


@dataclass
class BlockWatch:
    """When each block began and ended, forward and backward, in operations of the recorder."""

    paths: tuple[str, ...]
    calls: list[tuple[int, int, int]] = field(default_factory=list)
    """(block, first operation, first operation after it) in the order they ran."""
    outputs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Storages of each block's output."""
    follows: set[int] = field(default_factory=set)
    """Blocks whose first argument is what the block before gave back."""
    backward: dict[int, int] = field(default_factory=dict)
    """First operation of each block's backward pass; -1: of what comes before the first block."""
    gradient_bytes: dict[int, int] = field(default_factory=dict)

    def follow(self, model: nn.Module, recorder: Recorder) -> None:
        """Hook the blocks of the model that is about to run."""
        for seen in (self.calls, self.outputs, self.follows, self.backward, self.gradient_bytes):
            seen.clear()  # of a trace before, at another draw
        modules = dict(model.named_modules())
        last: list[weakref.ref[Any]] = []

        def hooked(block: int, module: nn.Module) -> None:
            began = [0]

            def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
                if not recorder.recording:
                    return
                began[0] = len(recorder.ops)
                if args and last and args[0] is last[-1]():
                    self.follows.add(block)
                if not self.calls:
                    self._on_gradient(recorder, -1, (args, kwargs))

            def leave(_: nn.Module, args: Any, out: Any) -> None:
                if not recorder.recording:
                    return
                self.calls.append((block, began[0], len(recorder.ops)))
                tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
                records = [recorder.storage_of(t) for t in tensors]
                self.outputs[block] = tuple(r.index for r in records if r is not None)
                self._on_gradient(recorder, block, out)
                if isinstance(out, torch.Tensor):  # not held: it would live on
                    last.append(weakref.ref(out))

            module.register_forward_pre_hook(enter, with_kwargs=True)
            module.register_forward_hook(leave)

        for block, path in enumerate(self.paths):
            hooked(block, modules[path])

    def _on_gradient(self, recorder: Recorder, block: int, tensors: Any) -> None:
        def reached(gradient: torch.Tensor | None) -> None:
            if gradient is None:  # of one output of a function whose others are read
                return
            self.backward.setdefault(block, len(recorder.ops))
            self.gradient_bytes[block] = self.gradient_bytes.get(block, 0) + gradient.nbytes

        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(reached)

    def once(self) -> tuple[str, ...]:
        """The blocks that ran once, in that order."""
        often = Counter(block for block, _, _ in self.calls)
        return tuple(self.paths[block] for block, _, _ in self.calls if often[block] == 1)


class StagedRun:
    """One traced step, cut into stages: 0 is the head, the last is the tail."""

    def __init__(self, trace: Trace, watch: BlockWatch) -> None:
        self.trace, self.watch = trace, watch
        timeline = device_timeline(trace)
        self.totals = timeline.totals
        ops = trace.ops
        begin = next((op.index for op in ops if op.phase is not Phase.FORWARD), len(ops))
        end = next((op.index for op in ops if op.phase is Phase.OPTIMIZER), len(ops))
        self.fixed_bytes = resident_bytes(timeline)
        self.update_peak_bytes = int(self.totals[end:].max(initial=0))
        if watch.once() != watch.paths:
            self.forward = self.backward = []
            return
        count = len(watch.paths)
        entered = [first for _, first, _ in watch.calls]
        edges = [0, *entered, watch.calls[-1][2] if count else 0, begin]
        self.forward = [range(a, b) for a, b in pairwise(edges)]
        # Tail first: a block's backward begins when the gradient of its output is there.
        starts, latest = [begin], begin
        for block in range(count - 1, -2, -1):
            latest = max(latest, watch.backward.get(block, end if block < 0 else latest))
            starts.append(latest)
        self.backward = [range(a, b) for a, b in pairwise([*starts, end])][::-1]
        self._sizes(begin)

    def _sizes(self, begin: int) -> None:
        unit = _ALLOCATION_BYTES[self.trace.device]
        self.kept = [0] * len(self.forward)
        self.gradients = [0] * len(self.forward)
        last = len(self.forward) - 3  # what follows the last block is in no region that keeps it
        boundary = {s for b, held in self.watch.outputs.items() if b != last for s in held}
        for storage in self.trace.storages:
            if storage.birth < 0 or not storage.nbytes:
                continue
            nbytes = -(-storage.nbytes // unit) * unit
            if storage.role is Role.GRADIENT:
                self.gradients[_where(self.backward, storage.birth)] += nbytes
            elif storage.birth < begin and (storage.death > begin or storage.index in boundary):
                self.kept[_where(self.forward, storage.birth)] += nbytes
        self.freed = [0, *(self._freed(block, begin, unit) for block in range(last + 1)), 0]
        self.kept = [
            max(kept - freed, 0) for kept, freed in zip(self.kept, self.freed, strict=True)
        ]
        self.before = np.cumsum([0, *self.kept])
        self.later = np.cumsum([0, *self.gradients[::-1]])[::-1]

    def _freed(self, block: int, begin: int, unit: int) -> int:
        """Of what the block before gave back, and kept for it: what goes when this one has run."""
        if block < 1:
            return 0
        given = (self.trace.storages[index] for index in set(self.watch.outputs[block - 1]))
        dead = (s.nbytes for s in given if 0 <= s.birth < begin and s.death <= begin)
        return sum(-(-nbytes // unit) * unit for nbytes in dead)

    def forward_peak(self, i: int) -> int:
        """Peak of a stage's forward pass, above what the stages before it keep."""
        return self._peak(self.forward[i]) - self.fixed_bytes - int(self.before[i])

    def backward_peak(self, i: int) -> int:
        """Peak of its backward pass, and of running again if it is a region."""
        return self._above(i, self.backward[i])

    def rerun_peak(self, i: int) -> int:
        """Peak of a region that is recomputed, without the backward pass that follows."""
        ops = self.backward[i]
        run = [k for k in ops if self.trace.ops[k].phase is Phase.RECOMPUTE]
        return self._above(i, range(ops.start, run[-1] + 1) if run else ops)

    def _above(self, i: int, ops: range) -> int:
        resident = self.fixed_bytes + int(self.before[i]) + int(self.later[i + 1])
        return self._peak(ops) - resident

    def _peak(self, ops: range) -> int:
        return int(self.totals[ops.start : ops.stop].max(initial=0))

    def work(self, ops: range, phase: Phase) -> Work:
        """The work of one phase's operations."""
        total = Work()
        for index in ops:
            op = self.trace.ops[index]
            if op.phase is phase and not op.is_view:
                total += work_of(op)
        return total

    def joins(self, block: int) -> bool:
        """Only the next block reads this one's output, and nothing runs between the two."""
        calls = self.watch.calls
        if block + 1 >= len(calls) or block + 1 not in self.watch.follows:
            return False
        if calls[block][2] != calls[block + 1][1]:
            return False
        storages, values = set(self.watch.outputs[block]), self.trace.values
        return not any(
            values[spec.value].storage in storages
            for op in self.trace.forward_ops[calls[block + 1][2] :]
            for _, spec in op.inputs
        )


def _where(parts: list[range], index: int) -> int:
    return next((i for i, part in enumerate(parts) if index in part), len(parts) - 1)
