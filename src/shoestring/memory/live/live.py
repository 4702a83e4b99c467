"""The allocations on a CUDA device at the peak of one step, block by block.

The allocator's history says which blocks lived when (`history`), a dispatch mode which operation of
which module asked for each (`watch`). Both count allocations, and find each other by the count.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ...torch_private.cuda_memory import record_history, snapshot
from ...trace.graph import Phase
from ..cuda.allocator import rounded
from .history import AllocatedBlock, blocks_at_peak
from .names import Names, address, resident_names
from .watch import OperationWatch


@dataclass(frozen=True)
class LiveBlock:
    """A block that was allocated at the peak."""

    category: str
    where: str
    """Tensor, or operation and its module."""
    line: str
    """The innermost line of Python outside of PyTorch, where there was any."""
    requested_bytes: int
    nbytes: int


@dataclass(frozen=True)
class LivePeak:
    """The peak of a step and what it consists of."""

    peak_bytes: int
    """The sum of the blocks."""
    allocator_bytes: int
    """The allocator's own peak in the same step."""
    during: str
    """The operation that ran at the peak."""
    blocks: tuple[LiveBlock, ...]

    def by_category(self) -> dict[str, tuple[int, int]]:
        """Category → (bytes asked for, blocks); what was added to them at the end."""
        found: dict[str, tuple[int, int]] = {}
        for block in self.blocks:
            nbytes, count = found.get(block.category, (0, 0))
            found[block.category] = (nbytes + block.requested_bytes, count + 1)
        found = dict(sorted(found.items(), key=lambda item: -item[1][0]))
        fine = [rounded(block.requested_bytes) - block.requested_bytes for block in self.blocks]
        coarse = [block.nbytes - rounded(block.requested_bytes) for block in self.blocks]
        found["rounding to 512 bytes"] = (sum(fine), sum(map(bool, fine)))
        found["cached blocks handed out uncut"] = (sum(coarse), sum(map(bool, coarse)))
        return found

    def grouped(self) -> list[tuple[LiveBlock, int]]:
        """Blocks of one category, place and line as one, with their number; the largest first."""
        found: dict[tuple[str, str, str], list[LiveBlock]] = {}
        for block in self.blocks:
            found.setdefault((block.category, block.where, block.line), []).append(block)
        joined = [
            (
                LiveBlock(*key, sum(b.requested_bytes for b in held), sum(b.nbytes for b in held)),
                len(held),
            )
            for key, held in found.items()
        ]
        return sorted(joined, key=lambda pair: -pair[0].nbytes)

    def table(self, most: int = 12) -> str:
        """Categories, then the largest groups of blocks."""
        lines = [f"peak {self.peak_bytes:,} bytes (allocator: {self.allocator_bytes:,})"]
        lines.append(f"reached in {self.during}")
        for category, (nbytes, count) in self.by_category().items():
            lines.append(f"  {category:32s} {nbytes:12,d} {count:6d}")
        for block, count in self.grouped()[:most]:
            if block.category not in _NAMED:
                text = f"{block.category}: {block.where}"
                lines.append(f"    {block.nbytes:12,d} {count:4d}x {text}  {block.line}".rstrip())
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Everything, blocks in groups."""
        return {
            "peak_bytes": self.peak_bytes,
            "allocator_bytes": self.allocator_bytes,
            "during": self.during,
            "categories": {
                category: {"bytes": nbytes, "count": count}
                for category, (nbytes, count) in self.by_category().items()
            },
            "blocks": [{**asdict(block), "count": count} for block, count in self.grouped()],
        }


def live_at_peak(
    step: Callable[[Callable[[Phase], None]], Any],
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
) -> LivePeak:
    """Run one step on CUDA, eagerly, and take its peak apart; `step` says which phase it enters."""
    device = next(model.parameters()).device
    names = resident_names(model, batch, optimizer)
    gradients: Names = {}
    counted_at = 0
    gc.collect()
    torch.cuda.synchronize()
    memory = torch.cuda.memory
    record_history("all", context="alloc", stacks="python", clear_history=True)
    try:
        before = snapshot()
        torch.cuda.reset_peak_memory_stats(device)
        watch = OperationWatch(
            lambda: memory.memory_stats_as_nested_dict(device)["allocation"]["all"]["allocated"]
        )

        def entering(phase: Phase) -> None:
            nonlocal counted_at
            watch.entering(phase)
            if phase is Phase.OPTIMIZER:
                counted_at = watch.count
                for name, parameter in model.named_parameters():
                    if parameter.grad is not None:
                        gradients[address(parameter.grad)] = ("gradients", name)

        with watch.following(model), watch:
            step(entering)
        allocator_bytes = torch.cuda.max_memory_allocated(device)
        after = snapshot()
    finally:
        record_history(None)
    known = len(before["device_traces"][device.index or 0])
    trace = after["device_traces"][device.index or 0][known:]
    history = [entry for entry in trace if entry["action"] != "snapshot"]
    segments = [s for s in before["segments"] if s["device"] == (device.index or 0)]
    peak_bytes, reached, blocks = blocks_at_peak(segments, history)
    described = tuple(
        describe(block, watch, names if block.born < 0 else {}, gradients, counted_at)
        for block in blocks
    )
    ran = watch.of(reached)
    part = sum(phase is Phase.FORWARD and at <= reached for at, phase in watch.phases)
    during = "nothing" if ran is None else f"{ran.phase} of {ran.module} {ran.name}, part {part}"
    return LivePeak(peak_bytes, allocator_bytes, during, described)


def describe(
    block: AllocatedBlock, watch: OperationWatch, names: Names, gradients: Names, counted_at: int
) -> LiveBlock:
    """Describe a block: its name, or else who allocated it and how long it lived."""
    ran = watch.of(block.born) if block.born >= 0 else None
    until = float("inf") if block.died is None else block.died
    where = "" if ran is None else f"{ran.module} {ran.name}".strip()
    if block.born < 0:
        category, where = names.get(block.address, ("resident, without a name", ""))
    elif block.address in gradients and block.born < counted_at <= until:
        category, where = gradients[block.address]
    elif ran is None:
        category = "outside of operations"
    elif block.address not in ran.returned:
        category = "workspaces"
    elif ran.phase is Phase.FORWARD:
        backward = [at for at, phase in watch.phases if phase is Phase.BACKWARD and at > block.born]
        category = "activations kept" if backward and until > backward[0] else "in forward"
    else:
        category = _BY_PHASE[ran.phase]
    return LiveBlock(category, where, _line(block.frames), block.requested_bytes, block.nbytes)


_BY_PHASE = {
    Phase.RECOMPUTE: "recomputed",
    Phase.BACKWARD: "in backward",
    Phase.OPTIMIZER: "in the update",
}
_NAMED = frozenset({"weights", "normalization parameters", "optimizer state"})


def _line(frames: list[Any]) -> str:
    for frame in frames:
        file = str(frame["filename"])
        if file.endswith(".py") and "/torch/" not in file and not file.endswith("memory/watch.py"):
            return f"{'/'.join(file.split('/')[-2:])}:{frame['line']} {frame['name']}"
    return ""
