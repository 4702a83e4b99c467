"""The workspaces that cuDNN takes for a trace's convolutions, measured on the GPU that is there.

`memory.cudnn` guesses those of shapes it does not know, and of other GPUs altogether. Where there
is a GPU each convolution runs once, alone: milliseconds, and the memory of one layer.
"""

from __future__ import annotations

from typing import Any

import torch

from ...trace.graph import Trace
from .convolutions import convolutions
from .cudnn import KINDS, ConvolutionShape, ConvolutionTable


def learn_convolutions(trace: Trace) -> int:
    """Measure what the shipped table has not been told of this GPU; how many that were."""
    table, count = ConvolutionTable.shipped(), 0
    for shape, kind, dtype in convolutions(trace):
        if not table.has_learned(shape, kind, dtype):
            try:
                nbytes = _measured(shape, kind, dtype)
            except RuntimeError:  # too large, or no such kernel: the table's guess stays
                continue
            table.learn(shape, kind, dtype, nbytes)
            count += 1
    return count


def _measured(shape: ConvolutionShape, kind: str, dtype: torch.dtype) -> int:
    """Bytes beyond operands and result at the peak of one operator."""
    x, weight, grad = (
        torch.zeros(size, dtype=dtype, device="cuda")
        for size in (shape.input, shape.weight, shape.output)
    )
    if shape.channels_last:
        form = torch.channels_last if len(shape.input) == 4 else torch.channels_last_3d
        x, weight, grad = (t.to(memory_format=form) for t in (x, weight, grad))
    spatial = len(shape.input) - 2
    settings = (
        shape.stride, shape.padding, shape.dilation, shape.transposed,
        shape.output_padding or (0,) * spatial, shape.groups,
    )  # fmt: skip

    def run() -> Any:
        if kind == KINDS[0]:
            return torch.ops.aten.convolution(x, weight, None, *settings)
        mask = (kind == KINDS[1], kind == KINDS[2], False)
        return torch.ops.aten.convolution_backward(grad, x, weight, None, *settings, mask)

    run()  # the first call chooses a kernel
    torch.cuda.reset_peak_memory_stats()
    made = run()
    stats = torch.cuda.memory_stats()  # with the result, which is not the workspace's
    del made
    return int(stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"])
