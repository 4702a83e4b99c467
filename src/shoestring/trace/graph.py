"""The frozen result of a trace: operations, the values they read and write, the storages behind.

A *storage* is one allocation. A *value* is what a storage holds between two writes: an in-place
operation makes a new value on the same storage, a view refers to the value it looks at. So memory
questions are asked of storages, and what a gradient needs is asked of values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch


class Phase(StrEnum):
    """Which part of the training step an operation belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"


class Role(StrEnum):
    """The role of a storage's bytes, in the report's words (Section 2.1).

    Examples:
        >>> profile = ss.profile(model, batch, loss=loss, optimizer=optimizer)
        >>> profile.bytes_by_role[ss.Role.GRADIENT]
    """

    MODEL = "model"
    BUFFER = "buffer"
    INPUT = "input"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    FORWARD_ACTIVATION = "forward_activation"
    BACKWARD_ACTIVATION = "backward_activation"
    TRANSIENT = "transient"
    WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation, live at the operations `birth <= i < death` (birth -1: before the step)."""

    index: int
    nbytes: int
    birth: int
    death: int
    role: Role
    module: str


@dataclass(frozen=True, slots=True)
class Value:
    """The contents of one storage between two writes."""

    index: int
    storage: int
    numel: int
    dtype: torch.dtype
    producer: int
    """Index of the operation that wrote it; -1 for what existed before the step."""
    information_bits: int | None = None
    """Bits of information per element, where fewer than the dtype has (a dropout mask: 1)."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as one operation sees it: a view of a value."""

    value: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @property
    def numel(self) -> int:
        """Number of elements the view shows."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True, slots=True)
class Op:
    """One operation as PyTorch's dispatcher saw it, below autograd."""

    index: int
    name: str
    phase: Phase
    module: str
    inputs: tuple[tuple[str, TensorSpec], ...]
    """Tensor arguments by the names of the operator's schema; lists as `name.0`, `name.1`, …"""
    outputs: tuple[TensorSpec, ...]
    flops: int
    is_view: bool
    mutates: tuple[str, ...]
    """Arguments written in place."""
    differentiable: bool
    """Autograd recorded it: gradients were enabled and an input requires one."""
    function: int = -1
    """The call of a custom autograd function it ran inside of; -1 for none."""
    forward_op: int = -1
    """For a backward operation, the forward operation whose gradient it computes."""
    saved: tuple[int, ...] = ()
    """Values a custom autograd function asked to keep (set on its last operation)."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Arguments that are numbers, truth values or lists of them, by name: strides, dimensions, …"""
    strided: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Tensor arguments that are not contiguous, which some kernels copy first, each with the order
    of its dimensions in memory (slowest first); empty where elements overlap or leave gaps."""
    conjugated: tuple[str, ...] = ()
    """Complex arguments whose conjugate is read, though memory holds them as they are."""
    times: int = 1
    """How many alike it stands for, one after the other (`passes.counted`); `flops` are of all."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One trainable or frozen parameter tensor and how it is to be stored."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    storage: int
    has_gradient: bool
    state_elements: tuple[int, ...] = ()
    """Elements of each optimizer state tensor beside it (scalars left out)."""
    state_dtype: torch.dtype | None = None
    """Of the optimizer's state; None: the parameter's own."""
    normalization: bool = False
    sparsifiable: bool = False
    density: float = 1.0
    on_host: bool = False
    """A technique keeps it there, and another of its size is on the device."""

    @property
    def numel(self) -> int:
        """Dense number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True)
class Trace:
    """A whole training step: forward, backward, optimizer, in the order they run."""

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    storages: tuple[Storage, ...]
    parameters: tuple[ParameterSpec, ...]
    modules: tuple[tuple[str, str], ...]
    """(path, class name) of every module, containers included."""
    inputs: tuple[int, ...]
    """Values of the batch."""
    loss: int
    """The value of the loss."""
    device: str
    optimizer: str
    checkpoint: str = "none"
    """The recomputation strategy a technique asked for; the trace itself is of the plain step."""
    checkpoint_blocks: tuple[str, ...] = ()
    """The modules that count as blocks for it; empty for those that are found."""
    on_host: str = ""
    """Tensors a technique keeps on the host between the passes: "inputs" of recomputed blocks, or
    "all" that is saved."""
    warnings: tuple[str, ...] = field(default=())
    capturable: bool = False
    """On CUDA the step can be one graph: its update stays on the device."""
    moved: frozenset[str] = frozenset()
    """Modules whose buffers the forward pass assigns, or whose counters and lists it changes."""

    @cached_property
    def forward_ops(self) -> tuple[Op, ...]:
        """The operations of the forward pass, the loss included."""
        return tuple(op for op in self.ops if op.phase is Phase.FORWARD)

    @cached_property
    def update_start(self) -> int:
        """The first operation of the update; the number of all if none runs after the passes."""
        return next((op.index for op in self.ops if op.phase is Phase.OPTIMIZER), len(self.ops))

    @cached_property
    def draws(self) -> bool:
        """Whether an operation draws random numbers from PyTorch's generators."""
        return any(map(_is_random, {op.name for op in self.ops}))

    @property
    def forward_flops(self) -> int:
        """Floating-point operations of the forward pass."""
        return self._flops(Phase.FORWARD)

    @property
    def backward_flops(self) -> int:
        """Floating-point operations of the backward pass, without recomputation."""
        return self._flops(Phase.BACKWARD)

    def _flops(self, phase: Phase) -> int:
        return sum(op.flops for op in self.ops if op.phase is phase)


def _is_random(name: str) -> bool:
    packet = getattr(torch.ops.aten, name.removeprefix("aten."), None)
    if packet is None or name == "aten._scaled_dot_product_flash_attention_for_cpu":
        return False  # tagged, but without dropout
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def without_update(trace: Trace) -> Trace:
    """The passes alone, and no optimizer state, as if the step had no optimizer."""
    end = trace.update_start
    return replace(
        trace,
        ops=trace.ops[:end],
        storages=tuple(
            replace(s, birth=end, death=end)
            if s.birth >= end or s.role is Role.OPTIMIZER_STATE
            else replace(s, death=min(s.death, end))
            for s in trace.storages
        ),
    )


def live_bytes(trace: Trace) -> int:
    """The most that storages hold at once."""
    changes: dict[int, int] = {}
    for storage in trace.storages:
        if storage.birth < storage.death:
            for at, nbytes in ((storage.birth, storage.nbytes), (storage.death, -storage.nbytes)):
                changes[at] = changes.get(at, 0) + nbytes
    return max(accumulate(changes[at] for at in sorted(changes)), default=0)


def channels_last_order(dims: int) -> tuple[int, ...]:
    """The order of dimensions in memory by which a pixel's channels lie beside each other."""
    return (0, *range(2, dims), 1)
