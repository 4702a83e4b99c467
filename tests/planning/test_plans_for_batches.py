"""One plan for a data set: the batches that decide, and what does not fit by name."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shoestring as ss
from shoestring.planning.batches import covers, largest, sizes_of


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList(
            [layer, *(type(layer)(32, 2, 64, 0.0, batch_first=True) for _ in range(2))]
        )
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model, batch):
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def batch(rows, length):
    return {"x": torch.randint(40, (rows, length)), "y": torch.randint(5, (rows, length))}


def test_only_batches_that_none_covers_count():
    some = [batch(4, 8), batch(8, 16), batch(8, 4), batch(2, 32), batch(3, 32), batch(8, 16)]
    assert [sizes_of(b)[0] for b in largest(some)] == [(8, 16), (3, 32)]


SIZES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=12)


@given(SIZES)
def test_every_batch_is_covered_by_one_that_is_kept(pairs):
    some = [torch.empty(pair, device="meta") for pair in pairs]
    kept = [sizes_of(b) for b in largest(some)]
    assert all(any(covers(one, sizes_of(b)) for one in kept) for b in some)
    assert not any(covers(a, b) for a in kept for b in kept if a is not b)


def test_a_plan_for_a_data_set_holds_for_every_batch():
    torch.manual_seed(0)
    model = Tagger()
    loader = [batch(8, 24), batch(8, 48), batch(2, 96), batch(3, 24)]

    def measured(techniques, one):
        twin = Tagger()
        optimizer = torch.optim.AdamW(twin.parameters())
        step = ss.apply(techniques, twin, optimizer, loss=loss)
        step(one)
        return step.measure(one).peak_bytes

    budget = int(0.7 * max(measured([], one) for one in loader))
    given = {"loss": loss, "optimizer": torch.optim.AdamW(model.parameters()), "budget": budget}
    plan = ss.plan(model, loader[0], batches=loader, **given)
    for one in loader:
        assert measured(plan.techniques, one) <= budget


def test_a_batch_that_fits_no_plan_is_named():
    model = Tagger()
    with pytest.raises(ss.BudgetError) as raised:
        ss.plan(
            model, batch(4, 8), batches=[batch(4, 16), batch(1, 4096)], loss=loss,
            optimizer="adamw", budget="2 MB", allow="lossless",
        )  # fmt: skip
    assert "MB" in str(raised.value)
    assert all(p.grad is None for p in model.parameters())


def test_one_absurd_batch_is_named_beside_the_others():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    some = [torch.randn(64, 8), torch.randn(32, 8), torch.empty(10**7, 8, device="meta")]
    with pytest.raises(ss.BudgetError, match=r"\(10000000, 8\), 156,250 times") as raised:
        ss.plan(
            model, some[0], batches=some, loss=lambda m, b: m(b).square().mean(),
            optimizer=optimizer, budget="1 MB", allow="lossless",
        )  # fmt: skip
    assert "leave out" in str(raised.value.hint) and raised.value.smallest_bytes > 10**8
    assert not optimizer.state and all(p.grad is None for p in model.parameters())
