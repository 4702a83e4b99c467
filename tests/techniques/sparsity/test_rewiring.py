"""When and what is rewired, by hand and for any numbers."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoestring.step.apply import apply
from shoestring.techniques import Sparsity
from shoestring.techniques.sparsity import REPORT_SCHEDULE, sparse_tensors
from shoestring.techniques.sparsity import rewiring as rewirings
from shoestring.techniques.sparsity.rewiring import is_due, shares
from shoestring.techniques.sparsity.tensor import random_positions


def test_the_report_s_schedule() -> None:
    """Epochs of 500 updates: every 100 to epoch 25, 200 to 80, 400 to 140, 800 to 190."""
    due = [step for step in range(1, 100_001) if is_due(step, REPORT_SCHEDULE, 1.0)]
    assert due[:2] == [100, 200]
    assert len([s for s in due if s <= 12_500]) == 125
    assert len([s for s in due if 12_500 < s <= 40_000]) == 138  # 12,600 to 40,000
    assert due[-1] == 94_400
    assert len([s for s in range(1, 12_501) if is_due(s, REPORT_SCHEDULE, 0.5)]) == 62
    assert is_due(50, REPORT_SCHEDULE, 2.0)
    assert not is_due(100_000, REPORT_SCHEDULE, 4.0)


def test_shares_by_hand() -> None:
    assert shares(10, [1, 1, 2], [100, 100, 100]) == [3, 2, 5]
    assert shares(10, [1, 1, 8], [100, 100, 3]) == [4, 3, 3]  # 5 that do not fit go on
    assert shares(4, [0, 0], [1, 9]) == [0, 4]
    assert shares(0, [1], [0]) == [0]
    with pytest.raises(ValueError, match="find no place"):
        shares(5, [1], [4])


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60)), min_size=1), st.floats(0, 1))
def test_shares_add_up_and_fit(parts: list[tuple[int, int]], load: float) -> None:
    weights, capacity = [w for w, _ in parts], [c for _, c in parts]
    total = int(load * sum(capacity))
    given_out = shares(total, weights, capacity)
    assert sum(given_out) == total
    assert all(0 <= g <= c for g, c in zip(given_out, capacity, strict=True))


@given(st.integers(1, 400), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**32))
@settings(deadline=None)
def test_positions_are_free_and_different(size: int, open_: float, part: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    free = torch.rand(size, generator=generator) < open_
    count = int(part * int(free.sum()))
    found = random_positions(free, count, generator)
    assert found.numel() == found.unique().numel() == count
    assert bool(free[found].all())


@pytest.mark.parametrize("count", [2, 5])
def test_positions_are_uniform(count: int) -> None:
    """Both ways of drawing: every free position equally often, within 5 standard deviations."""
    generator = torch.Generator().manual_seed(0)
    free = torch.tensor([True] * 5 + [False, True, True, False])
    hits = torch.zeros(9)
    for _ in range(2000):
        hits[random_positions(free, count, generator)] += 1
    mean = 2000 * count / 7
    deviation = (mean * (1 - count / 7)) ** 0.5
    assert (hits[free] - mean).abs().max() < 5 * deviation
    assert hits[~free].sum() == 0


@given(
    density=st.floats(0.01, 0.99),
    method=st.sampled_from(["dsr", "set"]),
    threshold=st.sampled_from([1e-6, 0.01, 0.2, 10.0]),
    multiplier=st.sampled_from([0.25, 4.0, 60.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_the_number_of_nonzeros_never_changes(
    density: float, method: str, threshold: float, multiplier: float, seed: int
) -> None:
    """Not by one, even if everything is dropped at once; and no tensor is left empty."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(11, 9), nn.Linear(9, 3), nn.Linear(3, 1), nn.Linear(1, 13))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    chosen = Sparsity(
        density, method=method, seed=seed, threshold=threshold,
        fraction_multiplier=multiplier, schedule=((9, 1),),
    )  # fmt: skip

    def loss(m: nn.Module, batch: Any) -> torch.Tensor:
        return m(batch).square().mean()

    step = apply([chosen], model, optimizer, loss=loss)
    tensors = sparse_tensors(model).values()
    total = sum(t.nonzeros for t in tensors)
    for _ in range(4):
        step(torch.randn(5, 11))
        assert sum(t.nonzeros for t in tensors) == total
        for t in tensors:
            assert 1 <= t.nonzeros == int(t.mask().sum()) <= t.numel
            assert optimizer.state[t.values]["momentum_buffer"].eq(0).all()
            assert optimizer.state[t.values]["momentum_buffer"].shape == t.values.shape


def test_the_threshold_doubles_and_halves() -> None:
    layer = nn.Linear(100, 10, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    chosen = Sparsity(0.5, rewire_fraction=0.1, threshold=0.001)
    step = apply([chosen], layer, optimizer, loss=lambda m, b: m(b).sum())
    rewiring: Any = step._setup.state["sparsity"]
    (tensor,) = sparse_tensors(layer).values()
    for small, after in ((89, 0.002), (90, 0.001), (100, 0.001), (110, 0.001), (111, 0.0005)):
        rewiring.threshold = 0.001
        with torch.no_grad():
            tensor.values.fill_(1.0)
            tensor.values[:small] = 0.0009
        rewiring.rewire()
        assert rewiring.threshold == after
        assert tensor.nonzeros == 500
        assert int((tensor.values == 0).sum()) == small
    assert rewiring.rewirings == 5


def test_a_rewiring_runs_in_one_thread_and_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    technique = Sparsity(0.5, schedule=((10, 1),))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = apply([technique], model, optimizer, loss=lambda model, x: model(x).square().mean())
    seen: list[int] = []
    move = rewirings._move

    def watched(*arguments: Any) -> None:
        seen.append(torch.get_num_threads())
        move(*arguments)

    monkeypatch.setattr(rewirings, "_move", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        step(torch.randn(4, 20))
        assert seen == [1, 1] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
