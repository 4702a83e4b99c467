"""Workspaces of cuDNN's convolutions and recurrent layers, calibrated on one device.

cuDNN chooses its kernels by heuristics, not by a formula. What a workspace holds is mostly a
copy of the operands in another layout, so its size is explained by the bytes of input, weight and
output; whether there is one at all is not. The device's table (`devices/`) holds the measured
workspaces of about a thousand convolutions, most of them in both layouts, with the device and the
versions they belong to in its header: a shape found there is exact for that device and those
versions, and another is guessed from the nearest shapes. On another GPU or another cuDNN all of it
is a guess, unless `memory.cuda.calibrate` has measured it there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import log2, prod

import torch

from ...devices import gpu, rows

KINDS = ("forward", "input", "weight")
"""The three operators of a convolution: itself, and the gradients of its input and its weight."""

_NEIGHBOURS = 5


@dataclass(frozen=True, slots=True)
class ConvolutionShape:
    """All that a convolution's workspace may depend on, beside its dtype."""

    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    groups: int = 1
    channels_last: bool = False

    @property
    def output(self) -> tuple[int, ...]:
        """Shape of the result."""
        channels = self.weight[1] * self.groups if self.transposed else self.weight[0]
        extents = []
        for i, extent in enumerate(self.input[2:]):
            reach = self.dilation[i] * (self.weight[2 + i] - 1)
            if self.transposed:
                extra = self.output_padding[i] if self.output_padding else 0
                extents.append(
                    (extent - 1) * self.stride[i] - 2 * self.padding[i] + reach + extra + 1
                )
            else:
                extents.append((extent + 2 * self.padding[i] - reach - 1) // self.stride[i] + 1)
        return (self.input[0], channels, *extents)

    @property
    def family(self) -> tuple[object, ...]:
        """The family kernels are specialized for: only its members resemble each other."""
        return (*self.clan, self.weight[2:], self.stride)

    @property
    def clan(self) -> tuple[object, ...]:
        """Several families: kernels of any extent and stride."""
        depthwise = self.groups > 1 and self.groups == self.input[1]
        grouping = "depthwise" if depthwise else "grouped" if self.groups > 1 else "dense"
        return (self.transposed, grouping, self.channels_last)

    @property
    def position(self) -> tuple[float, ...]:
        """Place in log-shape space, where channels count most, and whether they fill vectors."""
        channels, filters = self.input[1] // self.groups, self.output[1] // self.groups
        return (
            0.5 * log2(self.input[0]),
            log2(channels),
            log2(filters),
            0.5 * log2(prod(self.input[2:])),
            3.0 * (channels % 4 == 0),
            3.0 * (filters % 4 == 0),
        )

    def operand_bytes(self, itemsize: int) -> tuple[int, int, int]:
        """Bytes of input, weight and output."""
        return (
            prod(self.input) * itemsize,
            prod(self.weight) * itemsize,
            prod(self.output) * itemsize,
        )


def _ints(text: str, dimensions: int = 0) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split("x"))
    return numbers * dimensions if dimensions and len(numbers) == 1 else numbers


class ConvolutionTable:
    """Measured workspaces, and a guess from the nearest of them for other shapes."""

    def __init__(self, measured: dict[ConvolutionShape, dict[tuple[str, int], int]]) -> None:
        self._measured = measured
        self._learned: dict[tuple[ConvolutionShape, str, torch.dtype], int] = {}
        """Measured in this process, on the GPU that is there."""

    @classmethod
    def shipped(cls) -> ConvolutionTable:
        """The table of the GPU that is there, or of the reference."""
        return _shipped_table(gpu().convolution_table)

    @property
    def shapes(self) -> Collection[ConvolutionShape]:
        """The shapes that were measured."""
        return self._measured.keys()

    def without(self, shapes: Iterable[ConvolutionShape]) -> ConvolutionTable:
        """The table with these shapes held out, to see how well others stand in for them."""
        held = set(shapes)
        return ConvolutionTable({s: row for s, row in self._measured.items() if s not in held})

    def learn(self, shape: ConvolutionShape, kind: str, dtype: torch.dtype, nbytes: int) -> None:
        """Use these measurements from now on."""
        self._learned[shape, kind, dtype] = nbytes

    def has_learned(self, shape: ConvolutionShape, kind: str, dtype: torch.dtype) -> bool:
        """Whether it was measured here."""
        return (shape, kind, dtype) in self._learned

    @cached_property
    def _families(self) -> dict[tuple[object, ...], list[ConvolutionShape]]:
        families: dict[tuple[object, ...], list[ConvolutionShape]] = {}
        for shape in self._measured:
            families.setdefault(shape.family, []).append(shape)
            families.setdefault(shape.clan, []).append(shape)
        return families

    @cached_property
    def _batches(self) -> dict[ConvolutionShape, list[ConvolutionShape]]:
        batches: dict[ConvolutionShape, list[ConvolutionShape]] = {}
        for shape in self._measured:
            batches.setdefault(replace(shape, input=(0, *shape.input[1:])), []).append(shape)
        return batches

    def nbytes(self, shape: ConvolutionShape, kind: str, dtype: torch.dtype) -> int:
        """Workspace of one operator of a convolution."""
        learned = self._learned.get((shape, kind, dtype))
        if learned is not None:
            return learned
        itemsize = 2 if dtype.itemsize == 2 else 4
        exact = self._measured.get(shape)
        if exact is not None:
            return exact[kind, itemsize]
        return self._guess(shape, kind, itemsize)

    def _guess(self, shape: ConvolutionShape, kind: str, itemsize: int) -> int:
        """From the same convolution at the nearest batch size, where one was measured.

        Otherwise the middle one of the five nearest shapes' guesses: odd neighbors are outvoted.
        """
        batches = self._batches.get(replace(shape, input=(0, *shape.input[1:])))
        if batches:
            same = min(batches, key=lambda other: abs(log2(other.input[0] / shape.input[0])))
            return _transferred(self._measured[same][kind, itemsize], same, shape, itemsize)
        near = self._families.get(shape.family) or self._families.get(shape.clan) or []
        here = shape.position
        nearest = sorted(
            near,
            key=lambda other: sum((a - b) ** 2 for a, b in zip(here, other.position, strict=True)),
        )[:_NEIGHBOURS]
        guesses = sorted(
            _transferred(self._measured[other][kind, itemsize], other, shape, itemsize)
            for other in nearest
        )
        return guesses[len(guesses) // 2] if guesses else 0


def _transferred(
    nbytes: int, measured: ConvolutionShape, wanted: ConvolutionShape, itemsize: int
) -> int:
    """A measured workspace in terms of its operands, put in those of another shape.

    It is copies of some operands, or the weight's gradient once for each sample, or nothing;
    where none of these explains it, it keeps its proportion to all operands together.
    """
    there, here = _explanations(measured, itemsize), _explanations(wanted, itemsize)
    whole = there["all operands"]
    name = min(there, key=lambda explanation: abs(there[explanation] - nbytes))
    if abs(there[name] - nbytes) <= 0.02 * max(whole, there[name]):
        return here[name]
    return round(nbytes / whole * here["all operands"])


def _explanations(shape: ConvolutionShape, itemsize: int) -> dict[str, int]:
    x, w, y = shape.operand_bytes(itemsize)
    return {
        "nothing": 0,
        "all operands": x + w + y,
        "input and weight": x + w,
        "input and output": x + y,
        "weight and output": w + y,
        "weight": w,
        "weight for each sample": w * shape.input[0],
    }


@cache
def _shipped_table(name: str) -> ConvolutionTable:
    measured = {}
    for row in rows(name):
        extents = _ints(row["input"])
        spatial = len(extents) - 2
        shape = ConvolutionShape(
            input=extents,
            weight=_ints(row["weight"]),
            stride=_ints(row["stride"], spatial),
            padding=_ints(row["padding"], spatial),
            dilation=_ints(row["dilation"], spatial),
            transposed=row["transposed"] == "1",
            output_padding=_ints(row["output_padding"], spatial),
            groups=int(row["groups"]),
            channels_last=row["channels_last"] == "1",
        )
        measured[shape] = {
            (kind, itemsize): int(row[f"float{8 * itemsize}_{kind}"])
            for kind in KINDS
            for itemsize in (4, 2)
        }
    return ConvolutionTable(measured)


# -- recurrent layers ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """All that a fused recurrent layer's workspace may depend on."""

    mode: int
    steps: int
    batch: int
    input: int
    hidden: int
    layers: int
    directions: int
    dropout: bool
    itemsize: int


@cache
def _measured_recurrent(name: str) -> dict[RecurrentShape, tuple[int, int]]:
    table = {}
    for row in rows(name):
        mode, steps, batch, width, hidden, layers, directions, dropout, itemsize, *measured = (
            int(value) for value in row.values()
        )
        shape = RecurrentShape(
            mode, steps, batch, width, hidden, layers, directions, bool(dropout), itemsize
        )
        table[shape] = (measured[0], measured[1])
    return table


def recurrent_bytes(shape: RecurrentShape, backward: bool, exact: bool = True) -> int:
    """Workspace of a fused recurrent layer: measured, or fitted to what was measured."""
    measured = _measured_recurrent(gpu().recurrent_table).get(shape) if exact else None
    if measured is not None:
        return measured[backward]
    mode = max(shape.mode, 1)
    fit = gpu().recurrent_fits[mode]
    small = shape.hidden <= fit.widest_small
    fixed, own, both, dropped, given, states = fit.small if small else fit.large
    outputs = shape.steps * shape.batch * shape.hidden * shape.directions * shape.itemsize
    inputs = shape.steps * shape.batch * shape.input * shape.itemsize
    total = fixed * shape.layers * shape.directions + own * outputs + given * inputs
    total += both * outputs * (shape.directions == 2)
    total += dropped * outputs * (shape.dropout and shape.layers > 1 and shape.directions == 1)
    total += states * outputs / shape.steps * shape.layers
    if backward:
        gates = {1: 1, 2: 4, 3: 3}[mode]
        weights = gates * shape.hidden * (shape.input + shape.hidden) * shape.directions
        total += outputs + weights * shape.layers * shape.itemsize
    return round(total)
