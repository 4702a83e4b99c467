"""Inputs and outputs of a rule for the memory inside an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ...trace.graph import Op, TensorSpec
from .cudnn import ConvolutionTable
from .reductions import reduction_bytes

_ALL = 1 << 30


@dataclass(frozen=True, slots=True)
class Temporary:
    """Allocations inside one operator, made when so many of its results exist and freed by its end.

    Temporaries of one operator follow each other; those of one entry are there together.
    """

    nbytes: tuple[int, ...]
    reason: str
    results: int = _ALL
    """How many of the operator's results have been allocated by then."""


class Operands:
    """An operation's arguments by name."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.inputs = dict(op.inputs)
        self.settings = dict(op.settings)
        self.orders = dict(op.strided)

    def nbytes(self, name: str) -> int:
        """Of an argument, none if it is not there."""
        spec = self.inputs.get(name)
        return 0 if spec is None else nbytes_of(spec)

    def order(self, name: str) -> tuple[int, ...]:
        """The argument's dimensions as they lie in memory; empty where it has gaps."""
        return self.orders.get(name, tuple(range(len(self.inputs[name].shape))))

    def copied(self, *names: str, wanted: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Copies of those arguments that do not lie in memory as a kernel wants them."""
        there = [name for name in names if name in self.inputs]
        return tuple(self.nbytes(name) for name in there if not self.lies(name, wanted))

    def lies(self, name: str, wanted: tuple[int, ...] | None = None) -> bool:
        """Whether the argument has this order, or that of its shape; an extent of one has none."""
        shape, order = self.inputs[name].shape, self.order(name)
        if len(order) != len(shape):
            return False
        wanted = wanted or tuple(range(len(shape)))
        return [d for d in order if shape[d] != 1] == [d for d in wanted if shape[d] != 1]

    def reduced(self, name: str, dims: Iterable[int] | None, width: int = 4) -> tuple[int, ...]:
        """Scratch of a reduction of an argument as it lies in memory."""
        shape = self.inputs[name].shape
        every = range(len(shape))
        chosen = {d % len(shape) for d in dims} if dims is not None and shape else set(every)
        order = self.order(name) or tuple(range(len(shape)))
        moved = [place for place, dim in enumerate(order) if dim in chosen]
        return reduction_bytes([shape[dim] for dim in order], moved, width)


def nbytes_of(spec: TensorSpec) -> int:
    """Of a dense tensor."""
    return spec.numel * spec.dtype.itemsize


Rule = Callable[[Operands, ConvolutionTable], Iterator[Temporary]]
"""Operands, and what is known of cuDNN → allocations, in the order they are made."""
