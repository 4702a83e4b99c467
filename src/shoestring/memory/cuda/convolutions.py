"""Workspaces of cuDNN in convolutions and recurrent layers, operator by operator."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...trace.graph import TensorSpec, Trace, channels_last_order
from .cudnn import ConvolutionShape, ConvolutionTable, RecurrentShape, recurrent_bytes
from .operands import Operands, Temporary, nbytes_of


def _shape_of_convolution(
    view: Operands, weight: TensorSpec, input: TensorSpec
) -> ConvolutionShape:
    settings, spatial = view.settings, len(input.shape) - 2

    def extents(name: str, default: int) -> tuple[int, ...]:
        given = tuple(settings.get(name, ())) or (default,)
        return given * spatial if len(given) == 1 else given

    return ConvolutionShape(
        input=input.shape,
        weight=weight.shape,
        stride=extents("stride", 1),
        padding=extents("padding", 0),
        dilation=extents("dilation", 1),
        transposed=bool(settings.get("transposed", False)),
        output_padding=extents("output_padding", 0),
        groups=int(settings.get("groups", 1)),
        channels_last=_channels_last(view),
    )


def _channels_last(view: Operands) -> bool:
    """One of the two is enough, the other is copied; not in one dimension, nor in FP64."""
    input = view.inputs["input"]
    dims = len(input.shape)
    if dims < 4 or input.dtype is torch.float64:
        return False
    return channels_last_order(dims) in (view.order("input"), view.order("weight"))


def _order(shape: ConvolutionShape) -> tuple[int, ...] | None:
    """Of the dimensions in memory, where it is not theirs."""
    return channels_last_order(len(shape.input)) if shape.channels_last else None


def convolution(view: Operands, table: ConvolutionTable) -> Iterator[Temporary]:
    """Forward."""
    weight, input = view.inputs["weight"], view.inputs["input"]
    shape = _shape_of_convolution(view, weight, input)
    copies = view.copied("input", "weight", wanted=_order(shape))
    nbytes = table.nbytes(shape, "forward", input.dtype)
    yield Temporary((*copies, nbytes), "cuDNN workspace")


def convolution_backward(view: Operands, table: ConvolutionTable) -> Iterator[Temporary]:
    """The gradients that were asked for, one after the other."""
    weight, input = view.inputs["weight"], view.inputs["input"]
    shape = _shape_of_convolution(view, weight, input)
    mask = view.settings.get("output_mask", (True, True, True))
    copies = view.copied("grad_output", "input", "weight", wanted=_order(shape))
    for results, kind in enumerate(_asked(view), start=1):
        nbytes = table.nbytes(shape, kind, input.dtype)
        yield Temporary((*copies, nbytes), f"cuDNN workspace, gradient of {kind}", results)
    if mask[2]:
        dims = [d for d in range(len(view.inputs["grad_output"].shape)) if d != 1]
        yield Temporary(view.reduced("grad_output", dims), "sum over all but the channels")


def convolutions(trace: Trace) -> Iterator[tuple[ConvolutionShape, str, torch.dtype]]:
    """Those whose workspace is cuDNN's to choose: shape, kind and dtype, each once."""
    found = dict.fromkeys(
        (_shape_of_convolution(view, view.inputs["weight"], view.inputs["input"]), kind, dtype)
        for op in trace.ops
        if op.name in ("aten.convolution", "aten.convolution_backward")
        for view in (Operands(op),)
        for dtype in (view.inputs["input"].dtype,)
        for kind in _asked(view)
    )
    yield from found


def _asked(view: Operands) -> tuple[str, ...]:
    if view.op.name == "aten.convolution":
        return ("forward",)
    mask = view.settings.get("output_mask", (True, True, True))
    return tuple(kind for kind, asked in zip(("input", "weight"), mask, strict=False) if asked)


def recurrent(view: Operands, _: ConvolutionTable) -> Iterator[Temporary]:
    """Forward or backward."""
    settings, input = view.settings, view.inputs["input"]
    batch_first = bool(settings["batch_first"])
    sizes = settings.get("batch_sizes", ())
    if sizes:
        steps, batch = max(input.shape[0] // sizes[0], 1), sizes[0]
    else:
        steps, batch = input.shape[batch_first], input.shape[1 - batch_first]
    shape = RecurrentShape(
        mode=int(settings["mode"]),
        steps=steps,
        batch=batch,
        input=input.shape[-1],
        hidden=int(settings["hidden_size"]),
        layers=int(settings["num_layers"]),
        directions=2 if settings["bidirectional"] else 1,
        dropout=settings["dropout"] > 0,
        itemsize=input.dtype.itemsize,
    )
    backward = view.op.name.endswith("backward")
    copies: tuple[int, ...] = ()
    if batch_first:
        copies = (nbytes_of(input),)
    if backward and "grad_output" not in view.inputs:  # only the last state was used
        copies += (view.nbytes("output"),)
    elif backward and not view.order("grad_output"):
        copies += (view.nbytes("grad_output"),)
    nbytes = recurrent_bytes(shape, backward)
    yield Temporary((*copies, nbytes), "cuDNN workspace, and the input by time steps")
