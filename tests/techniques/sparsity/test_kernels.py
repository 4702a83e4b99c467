"""The Triton kernels in Triton's interpreter, against plain PyTorch."""

import math

import pytest
import torch

from interpreter import run_interpreted
from shoestring.techniques.sparsity import index as form

SHAPES = [(3, 5), (16, 16, 3, 3), (8, 512), (9, 1025), (1, 1), (5, 3, 3, 3), (17, 32, 3, 3)]


def compare(device: str, shapes: list[tuple[int, ...]] = SHAPES) -> None:
    """Scatter and gather of random patterns, on a device."""
    from shoestring.kernels import bitmask as kernels

    for shape in shapes:
        for density in (0.0, 0.3, 1.0):
            mask = torch.rand(math.prod(shape)) < density
            packed = torch.zeros(form.bitmask_bytes(shape), 8, dtype=torch.uint8)
            packed.view(-1)[: mask.numel()] = mask
            packed = (packed << torch.arange(8)).sum(1).to(torch.uint8).to(device)
            dense = torch.randn(shape)
            starts = kernels.block_starts(packed)
            values = kernels.gather(dense.to(device), packed, starts, int(mask.sum()))
            assert torch.equal(values.cpu(), dense.flatten()[mask]), (shape, density)
            made = kernels.scatter(values, packed, starts, shape)
            assert torch.equal(made.cpu(), dense * mask.view(shape)), (shape, density)
            if len(shape) == 4:
                other = dense.to(device).contiguous(memory_format=torch.channels_last)
                same = kernels.gather(other, packed, starts, int(mask.sum()), True)
                assert torch.equal(same, values)
                last = kernels.scatter(values, packed, starts, shape, True)
                assert last.is_contiguous(memory_format=torch.channels_last)
                assert torch.equal(last, made)


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_interpreted(__file__, "compare('cpu')")
