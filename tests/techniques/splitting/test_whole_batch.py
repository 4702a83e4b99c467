"""Where a few examples do not tell how a loss splits, the whole batch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoestring as ss
from shoestring.errors import InputError
from shoestring.techniques.splitting.bounds import InBounds
from shoestring.techniques.splitting.find import find_units

ROWS = 32


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


class Sure(nn.Module):
    """Leaves early if the batch as a whole is sure."""

    def __init__(self, yes: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.yes = nn.Linear(6, 6), nn.Linear(6, 6), yes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x).tanh()
        sure = (x.mean() > 0) if not self.yes else x.abs().amax() > 0
        return made if bool(sure) else self.second(made)


def batch() -> Any:
    """The first four rows are on one side, all together on the other."""
    x = torch.rand(ROWS, 6, generator=torch.Generator().manual_seed(0))
    x[4:] -= 2
    return x, torch.arange(ROWS) % 3, torch.arange(ROWS).roll(5)


def classify(model: nn.Module, b: Any) -> torch.Tensor:
    return F.cross_entropy(model(b[0]), b[1])


def hardest(model: nn.Module, b: Any) -> torch.Tensor:
    return F.cross_entropy(model(b[0]), b[1], reduction="none").topk(6).values.mean()


def partners(model: nn.Module, b: Any) -> torch.Tensor:
    made = model(b[0])
    return (made - made[b[2]]).square().mean()


def fixed(model: nn.Module, b: Any) -> torch.Tensor:
    """Runs with whole batches and halves alone."""
    return model(b[0]).reshape(-1, ROWS // 2, 3).square().mean()


def easiest(model: nn.Module, b: Any) -> torch.Tensor:
    """Without the worst tenth, which is none of four."""
    each = F.cross_entropy(model(b[0]), b[1], reduction="none")
    return each.topk(len(each) - len(each) // 10, largest=False).values.mean()


def apart(model: nn.Module, b: Any) -> torch.Tensor:
    """Examples are compared where there are many."""
    made = model(b[0])
    return F.cross_entropy(made, b[1]) + (made.std(0).sum() if len(made) > 8 else 0)


def positives(model: nn.Module, b: Any) -> torch.Tensor:
    """Over the labels of one kind, as if the others were not labels."""
    return model(b[0]).square().sum() / (b[1] > 1).sum().clamp(min=1)


def few_kinds() -> Any:
    """The first four labels are 0 and 2, others are 1, too."""
    x, y, rows = batch()
    return x, torch.cat([torch.tensor([2, 0, 2, 2]), y[4:]]), rows


@pytest.mark.parametrize(
    ("loss", "given"),
    [(easiest, batch), (apart, batch), (positives, few_kinds)],
    ids=["without the worst", "compared where many", "counted by a kind"],
)  # fmt: skip
def test_what_four_examples_hide(loss: Any, given: Any) -> None:
    """Nothing is read by Python here: forwards of the whole batch tell."""
    found = find_units(net(), given(), loss)
    assert found.splits is False, found


def test_examples_without_a_label_tell_nothing() -> None:
    """The first four have none, so their loss is 0/0."""
    x, y, _ = batch()
    found = find_units(net(), (x, torch.where(torch.arange(ROWS) < 6, -100, y)), classify)
    assert found.splits and found.units == "1 != -100", found


@pytest.mark.parametrize(
    "counts",
    [torch.rand(ROWS, generator=torch.Generator().manual_seed(2)), torch.arange(ROWS) % 5 + 1],
    ids=["weights", "lengths"],
)  # fmt: skip
def test_a_mean_by_weights_of_examples(counts: torch.Tensor) -> None:
    def loss(model: nn.Module, b: Any) -> torch.Tensor:
        each = F.cross_entropy(model(b["x"]), b["y"], reduction="none")
        return (each * b["w"]).sum() / b["w"].sum()

    x, y, _ = batch()
    found = find_units(net(), {"x": x, "y": y, "w": counts}, loss)
    assert found.splits and found.units == "w", found


def test_a_mean_over_labels_beside_one_over_examples_is_told() -> None:
    def loss(model: nn.Module, b: Any) -> torch.Tensor:
        return classify(model, b) + 0.1 * model(b[0]).square().mean()

    found = find_units(net(), batch(), loss)
    assert found.splits is False and "say units='examples'" in found.why, found


@pytest.mark.parametrize(
    ("model", "loss"), [(Sure, classify), (net, hardest), (net, partners)],
    ids=["decided by the batch", "the six hardest", "positions of rows"],
)  # fmt: skip
def test_what_few_examples_do_not_show(model: Any, loss: Any) -> None:
    torch.manual_seed(0)
    found = find_units(model(), batch(), loss)
    assert found.splits is False, found


@pytest.mark.parametrize(
    ("model", "loss"), [(lambda: Sure(True), classify), (net, fixed)],
    ids=["decided alike", "of a size that few examples have not"],
)  # fmt: skip
def test_what_splits_all_the_same(model: Any, loss: Any) -> None:
    torch.manual_seed(0)
    found = find_units(model(), batch(), loss)
    assert found.splits and f"tested on {ROWS} examples" in found.why, found


def diverse(model: nn.Module, b: Any) -> torch.Tensor:
    """Classes of the whole batch shall be equally many: while all are, this has no gradient."""
    made = model(b[0])
    mean = made.softmax(-1).mean(0)
    return F.cross_entropy(made, b[1]) + 2 * (mean * mean.log()).sum()


def information(model: nn.Module, b: Any) -> torch.Tensor:
    """The mean of an exponential, and its logarithm: a plain mean, while all are equal."""
    made = model(b[0])[:, 0]
    return made[b[1] == 0].sum() / len(made) - made.exp().mean().log()


@pytest.mark.parametrize("bytes_in_wide", [2**28, 0])
@pytest.mark.parametrize("loss", [diverse, information])
def test_a_head_that_starts_at_zero_hides_nothing(
    loss: Any, bytes_in_wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoestring.techniques.splitting.find.WIDE_BYTES", bytes_in_wide)
    model = net()
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    before = [p.clone() for p in model.parameters()]
    assert find_units(model, batch(), loss).splits is False
    assert find_units(model, batch(), classify).splits
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def hard(model: nn.Module, b: Any) -> torch.Tensor:
    """A mean over those above a threshold (OHEM), which all are before training."""
    each = F.cross_entropy(model(b[0]), b[1], reduction="none")
    return each[each > 0.35].mean()


def unsure(model: nn.Module, b: Any) -> torch.Tensor:
    """The same by a count."""
    made = model(b[0])
    counts = made.detach().softmax(-1).amax(-1) < 0.95
    each = F.cross_entropy(made, b[1], reduction="none")
    return (each * counts).sum() / counts.sum().clamp(min=1)


def hinge(model: nn.Module, b: Any) -> torch.Tensor:
    """A threshold, and a mean over all."""
    each = F.cross_entropy(model(b[0]), b[1], reduction="none")
    return torch.where(each > 0.35, each, 0.0).mean()


@pytest.mark.parametrize("bytes_in_wide", [2**28, 0])
@pytest.mark.parametrize(("loss", "splits"), [(hard, False), (unsure, False), (hinge, True)])
def test_a_threshold_that_is_met_after_training(
    loss: Any, splits: bool, bytes_in_wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoestring.techniques.splitting.find.WIDE_BYTES", bytes_in_wide)
    model = net()
    with torch.no_grad():
        model[-1].weight.mul_(0.1)
    before = [p.clone() for p in model.parameters()]
    found = find_units(model, batch(), loss)
    assert found.splits is splits, found
    assert splits or "a threshold decides" in found.why
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def free(model: nn.Module, b: Any) -> torch.Tensor:
    """Free bits (Kingma et al., 2016): means under a bound have no gradient."""
    return classify(model, b) + model(b[0]).square().mean(0).clamp(min=9.0).sum()


def flooded(model: nn.Module, b: Any) -> torch.Tensor:
    """Goes up again below a level (Ishida et al., 2020)."""
    return (classify(model, b) - 0.1).abs() + 0.1


def worst(model: nn.Module, b: Any) -> torch.Tensor:
    return torch.stack([classify(model, b), model(b[0]).square().mean()]).max()


def counted(model: nn.Module, b: Any) -> torch.Tensor:
    """Clamps a count and weights, and errors one by one."""
    errors = (model(b[0]).mean(1) - 1).abs() + torch.relu(model(b[0])[:, 0])
    weights = sum(p.abs().sum() for p in model.parameters())
    return (errors * b[1]).sum() / b[1].float().sum().clamp(min=1) + 1e-3 * weights.clamp(max=1.0)


@pytest.mark.parametrize(
    ("loss", "splits"), [(free, False), (flooded, False), (worst, False), (counted, True)]
)
def test_a_mean_that_will_lie_on_the_other_side(loss: Any, splits: bool) -> None:
    found = find_units(net(), batch(), loss)
    assert found.splits is splits, found
    assert splits or "a mean over the batch is clamped" in found.why


def test_microbatches_by_hand_are_refused_before_anything_moves() -> None:
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ss.apply([ss.Microbatching(8)], model, optimizer, loss=partners)
    with pytest.raises(InputError, match="its parts do not run"):
        step(batch())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_positions_are_looked_at_before_a_kernel_is_started() -> None:
    """On CUDA the kernel would end the process."""
    rows, three = torch.randn(4, 2), torch.tensor([0, 3, -4])
    with InBounds():
        assert rows[three].shape == rows.index_select(0, three % 4).shape == (3, 2)
        for far in (torch.tensor([4]), torch.tensor([-5])):
            with pytest.raises(IndexError, match="out of bounds for 4 rows"):
                rows[far]
        with pytest.raises(IndexError, match="out of bounds for 4 rows"):
            rows.gather(0, torch.full((1, 2), 9))
        with pytest.raises(IndexError, match="out of bounds for 2 rows"):
            F.embedding(torch.tensor([3]), rows[:2])


class Carrying(nn.Module):
    """Goes on from what the pass before it left, if it had as many rows; and keeps a result."""

    def __init__(self, *, reads: bool, nested: bool) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.reads, self.nested, self.kept = reads, nested, None

    def forward(self, x: torch.Tensor) -> Any:
        h = self.enter(x)
        before = self.kept[0][0] if self.nested and self.kept is not None else self.kept
        if self.reads and before is not None and len(before) == len(h):
            h = h + before
        left = h.detach().tanh()
        self.kept = [(left,)] if self.nested else left
        return self.leave(torch.relu(h))


@pytest.mark.parametrize("nested", [False, True])
def test_a_state_in_an_attribute_is_of_the_whole_batch(nested: bool) -> None:
    def loss(model: nn.Module, b: Any) -> torch.Tensor:
        return F.cross_entropy(model(b[0]), b[1])

    given = torch.randn(8, 8), torch.arange(8) % 4
    assert find_units(Carrying(reads=False, nested=nested), given, loss).splits
    found = find_units(Carrying(reads=True, nested=nested), given, loss)
    assert found.splits is False and "left in kept" in found.why


@pytest.mark.parametrize(
    ("change", "splits"), [(lambda g: g * 3, True), (lambda g: g.clamp(-1e-3, 1e-3), False)],
    ids=["linear", "clamped"],
)  # fmt: skip
def test_hooks_on_gradients_belong_to_the_test(change: Any, splits: bool) -> None:
    model = net()
    model[0].weight.register_hook(change)
    found = find_units(model, batch(), classify)
    assert found.splits is splits, found
    assert splits or "their gradients do not" in found.why


def test_a_tensor_without_elements_counts_nothing() -> None:
    def loss(model: nn.Module, b: Any) -> torch.Tensor:
        return (model(b[0]).square().mean(1) * b[1]).sum() / b[1].sum()

    mask = torch.tensor([1, 0, 1, 1, 1, 0, 0, 1])
    found = find_units(nn.Linear(4, 3), (torch.randn(8, 4), mask, mask.new_zeros(8, 0)), loss)
    assert found.splits, found


@pytest.mark.parametrize("number_type", [torch.float32, torch.bfloat16])
def test_a_model_that_checkpoints_by_a_backward_pass_of_its_own(number_type: Any) -> None:
    """autograd.grad() cannot pass it; weights and hooks stay out of the backward pass that can."""
    model, given, called = net().to(number_type), batch(), []
    model[0].weight.register_post_accumulate_grad_hook(called.append)

    def loss(model: nn.Module, b: Any) -> torch.Tensor:
        x = b[0].to(number_type).requires_grad_()
        scores = checkpoint(model, x, use_reentrant=True)
        return F.cross_entropy(scores.float(), b[1])

    assert find_units(model, given, loss).splits
    assert all(p.grad is None for p in model.parameters()) and not called
