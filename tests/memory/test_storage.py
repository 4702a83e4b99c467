import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.errors import InputError
from shoestring.memory.storage import (
    SparseBytes,
    bitmask_index_bytes,
    csr_index_bytes,
    dense_bytes,
    nonzero_count,
    sparse_bytes,
)

# The 24 convolutions inside the blocks of WRN-28-2, output × input × 3 × 3.
WRN_28_2 = [
    (width, before if i == 0 else width, 3, 3)
    for before, width in [(16, 32), (32, 64), (64, 128)]
    for i in range(8)
]
SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=4)
DENSITIES = st.floats(0, 1, exclude_min=True)


def wrn_nonzeros(density):
    return [nonzero_count(math.prod(shape), density) for shape in WRN_28_2]


@pytest.mark.parametrize(
    ("numel", "bits", "n_bytes"),
    [(0, 32, 0), (1, 1, 1), (8, 1, 1), (9, 1, 2), (3, 4, 2), (10, 16, 20), (475_136, 1, 59_392)],
)
def test_dense_tensors_by_hand(numel, bits, n_bytes):
    assert dense_bytes(numel, bits) == n_bytes


@pytest.mark.parametrize(
    ("numel", "density", "nonzeros"),
    # 0.1 · 5 and 0.1 · 25 lie half way and go up; 0.01 · 10 would leave nothing.
    [
        (10, 0.3, 3),
        (5, 0.1, 1),
        (25, 0.1, 3),
        (35, 0.1, 4),
        (10, 0.01, 1),
        (7, 1.0, 7),
        (0, 0.5, 0),
    ],
)
def test_nonzeros_by_hand(numel, density, nonzeros):
    assert nonzero_count(numel, density) == nonzeros


def test_a_small_csr_index_by_hand():
    # 2 rows of 3·2·2 = 12 columns: 4 bits for each of 5 nonzeros is 20 bits, so 3 bytes;
    # 3 row pointers are 12 bytes.
    assert csr_index_bytes((2, 3, 2, 2), 5) == 3 + 12


@pytest.mark.parametrize(
    ("columns", "bits"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (256, 8), (257, 9), (1152, 11)]
)
def test_bits_of_a_column_index(columns, bits):
    # Eight nonzeros take as many bytes as one takes bits.
    assert csr_index_bytes((1, columns), 8) == bits + 8


def test_vectors_and_scalars_are_one_column_wide():
    assert csr_index_bytes((10,), 9) == 2 + 44
    assert csr_index_bytes((), 1) == 1 + 8


def test_wide_resnet_at_density_30_percent():
    assert sum(math.prod(shape) for shape in WRN_28_2) == 1_451_520
    nonzeros = wrn_nonzeros(0.3)
    # 0.3 · 1,451,520 = 435,456; rounding tensor by tensor gives one more.
    by_hand = 1_382 + 7 * 2_765 + 5_530 + 7 * 11_059 + 22_118 + 7 * 44_237
    assert sum(nonzeros) == by_hand == 435_457

    # Rows of 144, 288, 576 and 1152 columns: 8, 9, 10 and 11 bits.
    column_bytes = 1_382 + 7 * 3_111 + 6_222 + 7 * 13_824 + 27_648 + 7 * 60_826
    pointer_bytes = 4 * (8 * (32 + 64 + 128) + 24)
    assert (column_bytes, pointer_bytes) == (579_579, 7_264)
    assert sum(map(csr_index_bytes, WRN_28_2, nonzeros)) == column_bytes + pointer_bytes

    # Without any rounding: 15,455,232 bits at density 1.
    column_bits = 4_608 * 8 + (7 * 9_216 + 18_432) * 9 + (7 * 36_864 + 73_728) * 10
    column_bits += 7 * 147_456 * 11
    assert column_bits == 15_455_232
    assert column_bytes == pytest.approx(0.3 * column_bits / 8, abs=24)


def test_wide_resnet_model_and_optimizer_in_fp16_at_density_30_percent():
    # The report's 6.7 MB row: 3.23 MB for three copies, the dense 5,338 parameters included.
    sparse = [
        sparse_bytes(shape, nonzeros, 16, copies=3)
        for shape, nonzeros in zip(WRN_28_2, wrn_nonzeros(0.3), strict=True)
    ]
    total_bytes = sum(tensor.total_bytes for tensor in sparse) + 3 * dense_bytes(5_338, 16)
    assert f"{total_bytes / 1e6:.2f}" == "3.23"


@pytest.mark.parametrize("density", [0.1, 0.2, 0.3, 0.5, 1.0])
def test_a_bitmask_beats_csr_in_wide_resnet_from_density_10_percent(density):
    for shape, nonzeros in zip(WRN_28_2, wrn_nonzeros(density), strict=True):
        assert bitmask_index_bytes(math.prod(shape)) < csr_index_bytes(shape, nonzeros)


def test_csr_beats_a_bitmask_in_wide_resnet_at_density_5_percent():
    csr = sum(map(csr_index_bytes, WRN_28_2, wrn_nonzeros(0.05)))
    assert csr < bitmask_index_bytes(1_451_520)


def test_copies_share_one_index():
    one = sparse_bytes((4, 9), 10, 16)
    three = sparse_bytes((4, 9), 10, 16, copies=3)
    assert one == SparseBytes(value_bytes=20, index_bytes=5 + 20)
    assert three == SparseBytes(value_bytes=60, index_bytes=5 + 20)
    assert three.total_bytes == 85


def test_each_copy_is_rounded_up_on_its_own():
    assert sparse_bytes((3, 3), 3, 4, copies=3).value_bytes == 3 * 2


@pytest.mark.parametrize(
    "call",
    [
        lambda: dense_bytes(-1, 8),
        lambda: dense_bytes(1, 0),
        lambda: nonzero_count(10, 0.0),
        lambda: nonzero_count(10, 1.1),
        lambda: nonzero_count(10, math.nan),
        lambda: sparse_bytes((2, 2), 5, 16),
        lambda: sparse_bytes((2, 2), -1, 16),
        lambda: sparse_bytes((2, 2), 1, 16, copies=-1),
        lambda: sparse_bytes((2, 2), 1, 16, format="coo"),
    ],
)
def test_what_cannot_be_is_refused(call):
    with pytest.raises(InputError):
        call()


@given(st.integers(0, 10**15), st.integers(1, 64))
def test_dense_bytes_are_the_fewest_that_hold_all_bits(numel, bits):
    n_bytes = dense_bytes(numel, bits)
    assert n_bytes == math.ceil(Fraction(numel * bits, 8))
    assert 8 * n_bytes >= numel * bits > 8 * (n_bytes - 1)


@given(st.integers(1, 10**9), DENSITIES)
def test_nonzeros_are_the_nearest_count_that_is_possible(numel, density):
    nonzeros = nonzero_count(numel, density)
    assert 1 <= nonzeros <= numel
    assert nonzeros == 1 or abs(nonzeros - density * numel) <= 0.5
    assert nonzero_count(numel, 1.0) == numel


@given(SHAPES, DENSITIES)
def test_a_csr_index_addresses_every_column_and_not_twice_as_many(shape, density):
    nonzeros = nonzero_count(math.prod(shape), density)
    columns = math.prod(shape[1:])
    bits = next(bits for bits in range(1, 64) if 2**bits >= columns)
    assert csr_index_bytes(shape, nonzeros) == math.ceil(nonzeros * bits / 8) + 4 * (shape[0] + 1)


@given(SHAPES, DENSITIES, st.integers(1, 64), st.integers(0, 4))
def test_formats_differ_in_the_index_only_and_smallest_is_the_least(shape, density, bits, copies):
    nonzeros = nonzero_count(math.prod(shape), density)
    csr, bitmask, smallest = (
        sparse_bytes(shape, nonzeros, bits, copies=copies, format=name)
        for name in ("csr", "bitmask", "smallest")
    )
    assert csr.value_bytes == bitmask.value_bytes == copies * dense_bytes(nonzeros, bits)
    assert csr.index_bytes == csr_index_bytes(shape, nonzeros)
    assert bitmask.index_bytes == bitmask_index_bytes(math.prod(shape))
    assert smallest in (csr, bitmask)
    assert smallest.total_bytes == min(csr.total_bytes, bitmask.total_bytes)


@given(SHAPES, DENSITIES, DENSITIES)
def test_more_nonzeros_never_take_fewer_bytes(shape, one, other):
    numel = math.prod(shape)
    few, many = sorted(nonzero_count(numel, density) for density in (one, other))
    assert sparse_bytes(shape, few, 16).total_bytes <= sparse_bytes(shape, many, 16).total_bytes
