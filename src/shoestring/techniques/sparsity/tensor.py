"""A sparse tensor: its values, one index, and the optimizer state that has the same pattern."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ...kernels import has_triton, in_prediction, launched
from ...kernels.bitmask_counts import room_for_starts
from . import index as plain


def in_channels_last(tensor: torch.Tensor) -> bool:
    """Whether the channels of a pixel lie beside each other in memory."""
    return (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )


def set_data(parameter: torch.Tensor, data: torch.Tensor) -> None:
    """Give a parameter other data, of another size.

    The detour over another type makes autograd forget the old size: a loss that is still
    referenced keeps the parameter's gradient accumulator alive, which would insist on it.
    """
    parameter.grad = None
    other = torch.float64 if data.dtype is not torch.float64 else torch.float32
    parameter.data = torch.empty(0, dtype=other, device=data.device)
    parameter.data = data


@dataclass(eq=False)
class SparseTensor:
    """Values (the parameter the optimizer sees) at the nonzeros of one index.

    The parameter object is the one that was dense, so param groups, schedulers and hooks that
    hold it go on; modules that share a weight share this.
    """

    name: str
    shape: torch.Size
    values: nn.Parameter
    index: torch.Tensor
    optimizer: weakref.ref[torch.optim.Optimizer] | None = None
    version: int = 0
    """How often the pattern changed."""
    _starts: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._predicted(self.index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "optimizer": None, "_starts": None}

    @property
    def numel(self) -> int:
        """Dense number of elements."""
        return self.shape.numel()

    @property
    def nonzeros(self) -> int:
        """Number of elements kept."""
        return self.values.numel()

    def mask(self) -> torch.Tensor:
        """Flat, true at the nonzeros."""
        return plain.decode(self.index, self.shape, self.nonzeros)

    def _kernels(self) -> ModuleType | None:
        there = self.index.is_cuda and not plain.is_fake(self.index) and has_triton()
        if not there or not self._has_bits():
            return None
        from ...kernels import bitmask as kernels

        if self._starts is None:
            self._starts = kernels.block_starts(self.index)
        return kernels

    def _has_bits(self) -> bool:
        return plain.is_bitmask(self.index, self.shape)

    def _predicted(self, tensor: torch.Tensor) -> bool:
        """Whether it stands for one that the kernels will go over, with what they look up."""
        there = in_prediction(tensor) and self._has_bits()
        if there and self._starts is None:
            self._starts = room_for_starts(self.index)
        return there

    def dense(
        self,
        values: torch.Tensor,
        dtype: torch.dtype | None = None,
        beside: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The dense weight; the caller drops it as soon as its kernel has run.

        On CUDA it lies as the tensor `beside` it, with which it goes into a convolution.
        """
        values = values.detach() if dtype is None else values.detach().to(dtype)
        last = beside is not None and len(self.shape) == 4 and in_channels_last(beside)
        if self._predicted(values):
            form = torch.channels_last if last else torch.contiguous_format
            kind = {"dtype": values.dtype, "device": values.device, "memory_format": form}
            made: torch.Tensor = torch.empty(self.shape, **kind)  # type: ignore[call-overload]
            launched("sparse_scatter", [values, self.index, *(self._starts or ())], [made])
            return made
        kernels = self._kernels()
        if kernels is not None:
            return kernels.scatter(values, self.index, self._starts, self.shape, last)
        return plain.scatter(values, self.index, self.shape)

    def gather(self, dense: torch.Tensor) -> torch.Tensor:
        """The values of a dense tensor at the nonzeros."""
        last = in_channels_last(dense)
        if self._predicted(dense):
            made = dense.new_empty(self.nonzeros)
            read = dense if last else dense.contiguous()
            launched("sparse_gather", [read, self.index, *(self._starts or ())], [made])
            return made
        kernels = self._kernels()
        if kernels is not None:
            return kernels.gather(dense, self.index, self._starts, self.nonzeros, last)
        return plain.gather(dense, self.index, self.nonzeros)

    def replace(self, values: torch.Tensor, index: torch.Tensor) -> None:
        """Other values on another pattern; optimizer state is the caller's."""
        set_data(self.values, values)
        self.index.data = index
        self.changed()

    def changed(self) -> None:
        """The index was written; what the kernels know of it is made now, not within a graph."""
        self.version += 1
        self._starts = None
        self._kernels()

    def state(self) -> dict[str, Any]:
        """The optimizer's state of the values; empty where there is none."""
        optimizer = self.optimizer() if self.optimizer is not None else None
        return {} if optimizer is None else optimizer.state.get(self.values, {})

    def group(self) -> dict[str, Any]:
        """The optimizer's settings for the values; empty where there are none."""
        optimizer = self.optimizer() if self.optimizer is not None else None
        for group in optimizer.param_groups if optimizer is not None else ():
            if any(p is self.values for p in group["params"]):
                return group
        return {}

    def reset_state(self, old: int) -> None:
        """Optimizer state with `old` entries starts again, at the size the values have now.

        Zero, as the report resets momentum; where an optimizer starts elsewhere (Rprop, Adagrad,
        ASGD), there. Numbers such as a step count stay; a tensor with fewer entries has one for
        each block of so many values, and gets as many as there can be blocks.
        """
        group = self.group()
        state = self.state()
        for key, held in state.items():
            if not isinstance(held, torch.Tensor) or held.dim() != 1 or held.numel() > old:
                continue
            entries = -(-held.numel() * self.nonzeros // max(old, 1))
            fresh = torch.zeros(entries, dtype=held.dtype, device=held.device)
            if key == "step_size":
                fresh.fill_(group.get("lr", 0.0))
            elif key == "sum":
                fresh.fill_(group.get("initial_accumulator_value", 0.0))
            elif key == "ax":
                fresh.copy_(self.values.detach())
            state[key] = fresh


def random_positions(free: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` different positions, uniform among those that are true in a flat mask on the CPU.

    Drawn and drawn again while many are free, so that nothing is made as long as the mask.
    """
    available = int(free.sum())
    if not 0 <= count <= available:
        raise ValueError(f"{count} of {available} free positions")
    if 2 * count > available or 4 * available < free.numel():
        places = free.nonzero().flatten()
        return places[torch.randperm(available, generator=generator)[:count]]
    left = free.clone()
    found: list[torch.Tensor] = []
    while count:
        drawn = torch.randint(free.numel(), (count,), generator=generator).unique()
        drawn = drawn[left[drawn]]
        left[drawn] = False
        found.append(drawn)
        count -= drawn.numel()
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
