"""Blocks: pieces of parameters that are updated together, in one flat FP32 copy.

Small tensors share a block and large ones are cut into several, so an update takes few kernels and
little memory, however a model is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...torch_private.kernels import foreach_copy_
from ...trace.fakes import is_fake

LARGEST = 2**20
SMALLEST = 2**14

Rows = Any  # a slice, or all


def block_elements(total: int) -> int:
    """A sixteenth of the model, so that FP32 copies are small beside it; within bounds."""
    return min(max(total // 16, SMALLEST), LARGEST)


@dataclass(frozen=True)
class Piece:
    """Some rows of a parameter."""

    parameter: torch.Tensor
    rows: Rows
    index: int
    last: bool
    times: int = 1
    """How many alike it stands for, in a trace."""

    @property
    def narrow(self) -> torch.Tensor:
        """The rows themselves."""
        return self.parameter.detach()[self.rows]

    @property
    def gradient(self) -> torch.Tensor:
        """Their gradient."""
        assert self.parameter.grad is not None
        return self.parameter.grad[self.rows]


@dataclass(frozen=True)
class UpdateBlock:
    """Pieces that share settings, type and the names of their state."""

    group: dict[str, Any]
    keys: tuple[str, ...]
    pieces: list[Piece]

    @property
    def times(self) -> int:
        """How many alike it stands for, in a trace: a piece that does is alone in its block."""
        return self.pieces[0].times


@dataclass(frozen=True)
class Flat:
    """Tensors beside each other in one."""

    whole: torch.Tensor
    views: list[torch.Tensor]

    def like(self, other: torch.Tensor) -> list[torch.Tensor]:
        """Views of another flat tensor, of the same shapes."""
        parts = other.split([view.numel() for view in self.views])
        return [part.view(view.shape) for part, view in zip(parts, self.views, strict=True)]


def cut(tensor: torch.Tensor, elements: int) -> list[Rows]:
    """Consecutive rows, at most about so many elements at a time."""
    if tensor.numel() <= elements:
        return [...]
    rows = max(1, elements * tensor.shape[0] // tensor.numel())
    return [slice(start, start + rows) for start in range(0, tensor.shape[0], rows)]


def gather(tensors: list[torch.Tensor], dtype: torch.dtype) -> Flat:
    """Copies in one flat tensor of this type."""
    sizes = [tensor.numel() for tensor in tensors]
    whole = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
    views = [
        part.view(tensor.shape) for part, tensor in zip(whole.split(sizes), tensors, strict=True)
    ]
    foreach_copy_(views, tensors)
    return Flat(whole, views)


def pieces(parameter: torch.Tensor, rows: list[Rows]) -> list[Piece]:
    """All of them; of a fake tensor one stands for those between, which no others join in a block.

    The last may be smaller and share a block with the one before it.
    """
    found = [Piece(parameter, part, i, i == len(rows) - 1) for i, part in enumerate(rows)]
    if not is_fake(parameter) or len(rows) < 5:
        return found
    return [found[0], replace(found[1], times=len(rows) - 3), *found[-2:]]


def blocks(
    work: Iterable[tuple[dict[str, Any], tuple[str, ...], torch.Tensor, list[Rows]]], elements: int
) -> Iterator[UpdateBlock]:
    """(settings, names of state, parameter, its rows) → blocks of about so many elements."""
    open_blocks: dict[Any, UpdateBlock] = {}
    filled: dict[Any, int] = {}
    for group, keys, parameter, rows in work:
        alike = id(group), keys, parameter.dtype
        for piece in pieces(parameter, rows):
            size = parameter.numel() if piece.rows is ... else parameter[piece.rows].numel()
            if alike in open_blocks and filled[alike] + size > elements:
                yield open_blocks.pop(alike)
            if alike not in open_blocks:
                open_blocks[alike], filled[alike] = UpdateBlock(group, keys, []), 0
            open_blocks[alike].pieces.append(piece)
            filled[alike] += size
    yield from open_blocks.values()
