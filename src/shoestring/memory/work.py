"""The work of a device: operations, traffic, kernels. Costs turn it into seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..trace.graph import Op, Phase, Trace

_ALLOCATIONS = {f"aten.{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty")}
"""No kernel runs for them, and nothing is read or written."""
_NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a device: operations, traffic, kernels launched."""

    flops: float = 0
    bytes_moved: float = 0
    launches: float = 0
    convolved: float = 0
    """Of the operations, those of convolutions."""
    narrow: float = 0
    """Of the operations, those on numbers of 16 bits."""
    narrow_convolved: float = 0
    """Of convolutions, those on numbers of 16 bits."""
    link: float = 0
    """Bytes that go to the host in the forward pass, and come back in the backward pass."""

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.bytes_moved + other.bytes_moved,
            self.launches + other.launches,
            self.convolved + other.convolved,
            self.narrow + other.narrow,
            self.narrow_convolved + other.narrow_convolved,
            self.link + other.link,
        )

    def __sub__(self, other: Work) -> Work:
        return self + other.times(-1, -1, -1)

    def times(self, flops: float, bytes_moved: float, launches: float = 1) -> Work:
        """So many times each."""
        return Work(
            self.flops * flops,
            self.bytes_moved * bytes_moved,
            self.launches * launches,
            self.convolved * flops,
            self.narrow * flops,
            self.narrow_convolved * flops,
            self.link * bytes_moved,
        )


Cost = Callable[[Work], float]
"""Work → seconds, or whatever is to be small. Costs of stages are added up."""


def work_of(op: Op) -> Work:
    """The work of one operation; BatchNorm reads its input twice, once for the statistics."""
    if op.name in _ALLOCATIONS:
        return Work()
    specs = [spec for _, spec in op.inputs] + list(op.outputs)
    if "batch_norm" in op.name:
        specs.append(specs[0])
    moved = op.times * sum(spec.numel * spec.dtype.itemsize for spec in specs)
    convolved = op.flops if "convolution" in op.name else 0
    narrow = op.flops > 0 and any(spec.dtype in _NARROW for _, spec in op.inputs)
    return Work(op.flops, moved, op.times, convolved, *((op.flops, convolved) if narrow else ()))


def work_of_passes(trace: Trace) -> Work:
    """Forward, backward and what is recomputed, without the update."""
    total = Work()
    for op in trace.ops:
        if op.phase is not Phase.OPTIMIZER and not op.is_view:
            total += work_of(op)
    return total


def link_bytes(trace: Trace) -> int:
    """Bytes the forward pass copies to the host, where a storage takes none on the device."""
    return sum(to for op, to, _ in _over_link(trace) if op.phase is Phase.FORWARD)


def brought_bytes(trace: Trace) -> int:
    """Bytes the forward pass copies from the host: weights, which backward reads, too."""
    return sum(back for op, _, back in _over_link(trace) if op.phase is Phase.FORWARD)


def _over_link(trace: Trace) -> Iterator[tuple[Op, int, int]]:
    """Copies to the host and from there, with the bytes each way."""
    for op in trace.ops:
        if op.name.startswith("aten.copy_") and len(op.inputs) > 1:
            written, read = (spec for _, spec in op.inputs[:2])
            there, here = (
                not trace.storages[trace.values[spec.value].storage].nbytes
                for spec in (written, read)
            )
            if there or here:
                nbytes = written.numel * written.dtype.itemsize
                yield op, nbytes * there, nbytes * (here and not there)
