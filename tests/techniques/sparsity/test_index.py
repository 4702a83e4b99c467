"""The two forms of an index: what they hold, and how many bytes they are."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.memory.storage import bitmask_index_bytes, csr_index_bytes
from shoestring.techniques.sparsity import index as form

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@given(SHAPES, st.integers(0, 2**32), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_an_index_holds_its_mask(shape: tuple[int, ...], seed: int, density: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(math.prod(shape), generator=generator) < density
    dense = torch.randn(shape, generator=generator)
    nonzeros = int(mask.sum())
    index = form.encode(mask, shape)
    assert index.dtype is torch.uint8
    assert index.numel() == form.index_bytes(shape, nonzeros)
    assert torch.equal(form.decode(index, shape, nonzeros), mask)
    values = form.gather(dense, index, nonzeros)
    assert torch.equal(values, dense.flatten()[mask])
    assert torch.equal(form.scatter(values, index, shape), dense * mask.view(shape))


@pytest.mark.parametrize("shape", [(3, form.CHUNK), (1, form.CHUNK + 1), (40, 2000), (2, 70_000)])
@pytest.mark.parametrize("density", [0.004, 0.04, 0.2, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_tensors(shape: tuple[int, ...], density: float, dtype: torch.dtype) -> None:
    """More than one chunk; columns of 16 and of 32 bits."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(math.prod(shape), generator=generator) < density
    dense = torch.randn(shape, generator=generator).to(dtype)
    index = form.encode(mask, shape)
    assert form.is_bitmask(index, shape) == (density > 0.05 or (density > 0.01 and shape[0] == 2))
    values = form.gather(dense, index, int(mask.sum()))
    assert torch.equal(values, dense.flatten()[mask])
    assert torch.equal(form.scatter(values, index, shape), dense * mask.view(shape))


def test_a_strided_gradient_is_read_in_logical_order() -> None:
    mask = torch.rand(4 * 6 * 3 * 3) < 0.3
    dense = torch.randn(4, 6, 3, 3).to(memory_format=torch.channels_last)
    index = form.encode(mask, dense.shape)
    values = form.gather(dense, index, int(mask.sum()))
    assert torch.equal(values, dense.contiguous().flatten()[mask])


def test_bytes_by_hand() -> None:
    # 128 × 64 × 3 × 3: 576 columns need 10 bits in the report, 16 here.
    shape, numel = (128, 64, 3, 3), 73_728
    assert form.bitmask_bytes(shape) == numel // 8 == bitmask_index_bytes(numel)
    assert form.column_bytes(shape, 1000) == 2000 + 4 * 129
    assert csr_index_bytes(shape, 1000) == 1250 + 4 * 129
    assert form.index_bytes(shape, 1000) == 2516
    assert form.index_bytes(shape, 7373) == 9216
    assert form.column_bytes((10, 256), 30) == 30 + 44
    assert form.column_bytes((2, 65_536), 30) == 60 + 12
    assert form.column_bytes((2, 65_537), 30) == 120 + 12
