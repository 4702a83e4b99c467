"""By what a loss splits is found on real values; what does not split is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import shoestring as ss
from shoestring.errors import InputError, UnprovenWarning
from shoestring.step.apply import apply
from shoestring.techniques import Microbatching
from shoestring.techniques.plan import Plan
from shoestring.techniques.splitting.examples import ExampleRuns
from shoestring.techniques.splitting.find import find_units
from techniques.small_models import SMALL

torch.set_num_threads(1)


def net(out: int = 20) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, out))


def labels() -> torch.Tensor:
    return torch.arange(8) % 5


X = torch.rand(8, 20, generator=torch.Generator().manual_seed(0))


def words_batch(ignored: int = -100, *, full: bool = False) -> Any:
    tokens = torch.arange(8 * 7).reshape(8, 7) % 50
    aims = tokens.clone()
    if not full:
        for row, length in enumerate([7, 1, 3, 2, 7, 5, 4, 6]):
            aims[row, length:] = ignored
    return {"tokens": tokens, "labels": aims, "mask": (aims != ignored).float()}


def words(ignored: int = -100, *, shifted: bool = False) -> Any:
    def loss(m: nn.Module, b: Any) -> torch.Tensor:
        logits, aims = m(b["tokens"]), b["labels"]
        if shifted:
            logits, aims = logits[:, :-1], aims[:, 1:]
        return F.cross_entropy(logits.transpose(1, 2), aims, ignore_index=ignored)

    return loss


def masked(m: nn.Module, b: Any) -> torch.Tensor:
    lost = F.cross_entropy(m(b["tokens"]).transpose(1, 2), b["tokens"], reduction="none")
    return (lost * b["mask"]).sum() / b["mask"].sum()


def noisy(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    time = torch.randint(0, 1000, (len(x), 1))
    noise, share = torch.randn_like(x), time / 1000
    return F.mse_loss(m(x * (1 - share) + noise * share), noise)


def contrastive(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    made = F.normalize(m(x), dim=1)
    return F.cross_entropy(made @ made.T * 5, torch.arange(len(x)))


def mixed(m: nn.Module, b: Any) -> torch.Tensor:
    return F.cross_entropy(m(0.7 * b[0] + 0.3 * b[0][torch.randperm(len(b[0]))]), b[1])


def class_weights(m: nn.Module, b: Any) -> torch.Tensor:
    return F.cross_entropy(m(b[0]), b[1], weight=torch.arange(1.0, 21.0).to(b[0].dtype))


def balanced(m: nn.Module, b: Any) -> torch.Tensor:
    """Labels weigh by how rare they are in the batch; of a few examples each is the only one."""
    each = F.cross_entropy(m(b[0]), b[1], reduction="none")
    return (each / torch.bincount(b[1], minlength=20)[b[1]]).mean()


def items(m: nn.Module, b: Any) -> torch.Tensor:
    lost = F.cross_entropy(m(b["tokens"]).transpose(1, 2), b["labels"], reduction="sum")
    return lost / b["items"]


def measured(missing: float, *, full: bool = False) -> Any:
    aims = torch.rand(8, 20, generator=torch.Generator().manual_seed(1)) + 0.1
    if not full:
        for row, length in enumerate([7, 20, 3, 0, 7, 5, 4, 6]):
            aims[row, length:] = missing
    return X, aims


def of_those_there(m: nn.Module, b: Any) -> torch.Tensor:
    """As of sparse depth, of labels that few examples have."""
    known = b[1] > 0
    return F.l1_loss(m(b[0])[known], b[1][known])


SPLIT = {
    "mean": (net, lambda: X, lambda m, b: m(b).square().mean(), "examples"),
    "sum": (net, lambda: X, lambda m, b: m(b).square().sum(), "sum"),
    "classes": (net, lambda: (X, labels()), lambda m, b: F.cross_entropy(m(b[0]), b[1]),
                "1 != -100"),
    "noise": (net, lambda: X, noisy, "examples"),
    "padded": (SMALL["tied"].build, words_batch, words(), "labels != -100"),
    "another ignored": (SMALL["tied"].build, lambda: words_batch(3), words(3), "labels != 3"),
    "shifted": (SMALL["tied"].build, words_batch, words(shifted=True), "labels[:, 1:] != -100"),
    "nothing ignored yet": (SMALL["tied"].build, lambda: words_batch(full=True), words(),
                            "labels != -100"),
    "mask": (SMALL["tied"].build, words_batch, masked, "mask"),
    "mask of ones": (SMALL["tied"].build, lambda: words_batch(full=True), masked, "mask"),
    "measurements missing": (net, lambda: measured(torch.nan), of_those_there, "1 != nan"),
    "unknown as -1": (net, lambda: measured(-1), of_those_there, "1 != -1"),
    "unknown as 0": (net, lambda: measured(0), of_those_there, "1 != 0"),
    "items of the whole": (SMALL["tied"].build,
                           lambda: {**words_batch(), "items": torch.tensor(35)}, items, "sum"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLIT)
def test_units_are_found(name: str) -> None:
    build, batch, loss, units = SPLIT[name]
    model = build()
    before = copy.deepcopy(model.state_dict())
    stream = torch.get_rng_state()
    found = find_units(model, batch(), loss)
    assert (found.splits, found.units) == (True, units), found
    assert torch.equal(stream, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(),
                                                  strict=True))  # fmt: skip


@pytest.mark.parametrize("missing", [torch.nan, -1.0])
def test_measurements_that_are_missing_later_count_from_the_first_batch_on(missing: float) -> None:
    """Where the first batch misses none, the mean is over all the same."""

    def loss(m: nn.Module, b: Any) -> torch.Tensor:
        known = ~b[1].isnan() if missing != missing else b[1] != missing
        return F.mse_loss(m(b[0])[known], b[1][known])

    seen = []
    for chosen in ([], [Microbatching(2)]):
        model = copy.deepcopy(net())
        step = apply(Plan(chosen), model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
        step(measured(missing, full=True))
        step(measured(missing))
        seen.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(seen[1], seen[0])


@pytest.mark.parametrize("name", SPLIT)
def test_parts_by_these_units_have_the_gradient_of_the_whole(name: str) -> None:
    """With nothing but the default; noise differs, of course."""
    if name == "noise":
        return
    build, batch, loss, _ = SPLIT[name]
    data, seen = batch(), []
    for chosen in ([], [Microbatching(3)]):
        model = copy.deepcopy(build())
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p, std=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept: list[torch.Tensor] = []
        hook = lambda *_, m=model, k=kept: k.extend(  # noqa: E731
            p.grad.clone() for p in m.parameters()
        )
        optimizer.register_step_pre_hook(hook)
        value = apply(chosen, model, optimizer, loss=loss)(data)
        seen.append([value, *kept])
    for whole, parts in zip(*seen, strict=True):
        torch.testing.assert_close(whole, parts, rtol=2e-5, atol=1e-6)


def inner_step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """It takes gradients itself, so it does not run without them."""
    weights = dict(model.named_parameters())
    first = functional_call(model, weights, (batch,)).square().mean()
    slopes = torch.autograd.grad(first, list(weights.values()), create_graph=True)
    moved = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), slopes, strict=True)}
    return (functional_call(model, moved, (batch.flip(1),)) - 1).square().mean()


def truncated(m: nn.Module, b: torch.Tensor) -> torch.Tensor:
    """Backward through each stretch of a sequence, as soon as it is there."""
    m(b[:, :10].repeat(1, 2)).square().mean().backward()
    return m(b).square().mean()


REFUSED = {
    "backward inside": (lambda: X, truncated, "backward pass of the model itself"),
    "contrastive": (lambda: X, contrastive, "compares them with each"),
    "mixed up": (lambda: (X, labels()), mixed, "compares them with each"),
    "root of a mean": (lambda: X * torch.arange(1, 9)[:, None],
                       lambda m, b: m(b).square().mean().sqrt(), "neither a mean nor a sum"),
    "class weights": (lambda: (X, labels()), class_weights, "class weights"),
    "an inner step": (lambda: X, inner_step, "neither a mean nor a sum"),
    "balanced classes": (lambda: (X, torch.arange(8)), balanced, "neither a mean nor a sum"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_split_is_refused_by_name(name: str) -> None:
    batch, loss, why = REFUSED[name]
    model = net()
    found = find_units(model, batch(), loss)
    assert found.splits is False and why in found.why
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match="other gradients"):
        apply([Microbatching(2)], model, optimizer, loss=loss)(batch())
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(),
                                                  strict=True))  # fmt: skip


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), *(nn.Sequential(nn.Linear(64, 64), nn.GELU())
                                              for _ in range(4)))  # fmt: skip


def test_plans_have_microbatches_where_the_loss_splits() -> None:
    torch.manual_seed(0)
    model, x = deep(), torch.randn(512, 64)
    given: dict[str, Any] = {"optimizer": "sgd-plain", "allow": "lossless"}
    plan = ss.plan(model, x, loss=lambda m, b: m(b).square().sum(), budget="400 KB", **given)
    assert plan.microbatching.units == "sum" and plan.kind == "lossless"
    why = {choice.part: choice.why for choice in plan.choices}
    assert "tested on 512 examples" in why["microbatching"]
    assert Plan.from_dict(plan.to_dict()).microbatching == plan.microbatching
    with pytest.raises(ss.BudgetError) as raised:
        ss.plan(model, x, loss=contrastive, budget="400 KB", **given)
    assert "microbatches are left out" in str(raised.value.hint)
    with pytest.raises(ss.BudgetError):
        ss.plan(model, x, loss=lambda m, b: m(b).square().mean(), budget="400 KB",
                optimizer="sgd-plain", allow="exact")  # fmt: skip


def test_fit_tests_the_loss_it_is_given() -> None:
    torch.manual_seed(0)
    model, x = deep(), torch.randn(512, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = ss.fit(model, x, loss=lambda m, b: m(b).square().sum(), optimizer=optimizer,
                  budget="400 KB", allow="lossless")  # fmt: skip
    assert step.plan.microbatching.units == "sum"
    torch.testing.assert_close(step(x), model(x).square().sum())


def test_what_cannot_be_copied_is_assumed_with_a_warning() -> None:
    class Odd(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("never")

    model = Odd(20, 3)
    step = apply([Microbatching(4)], model, torch.optim.SGD(model.parameters(), lr=0.1),
                 loss=lambda m, b: m(b).mean())  # fmt: skip
    with pytest.warns(UnprovenWarning, match="untested"):
        step(X)
    step(X)  # once


def test_the_older_name_still_loads() -> None:
    plan = Plan.from_dict({"microbatching": {"size": 4, "weight": "examples"}})
    assert plan.microbatching == Microbatching(4, units="examples")
    assert plan.to_dict() == {"microbatching": {"size": 4, "units": "examples"}}


def test_a_tensor_that_is_not_there_is_named() -> None:
    model = net()
    step = apply([Microbatching(2, units="labels != -100")], model,
                 torch.optim.SGD(model.parameters(), lr=0.1),
                 loss=lambda m, b: m(b["x"]).mean())  # fmt: skip
    with pytest.raises(InputError, match="no tensor 'labels'") as raised:
        step({"x": X})
    assert "x" in str(raised.value.hint)


def test_nothing_is_tried_that_ends_a_process_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a token that no embedding has ends the process: -100 among tokens is not tried."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            assert int(tokens.min()) >= 0
            return self.head(self.embed(tokens))

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        scores = model(tokens)[:, :-1].flatten(0, 1)
        return F.cross_entropy(scores, tokens[:, 1:].flatten())

    torch.manual_seed(0)
    tokens = torch.randint(11, (4, 6))
    monkeypatch.setattr(
        "shoestring.techniques.splitting.examples.ends_the_process",
        lambda batch, candidate: not bool((batch == int(candidate.rpartition("!= ")[2])).any()),
    )
    found = ExampleRuns(Words(), tokens, loss, wide=True).found(gradients=True)
    assert found.splits and found.units == "batch[:, 1:] != -100", found


def with_term(m: nn.Module, b: Any) -> torch.Tensor:
    logits = m(b["tokens"])
    return words()(m, b) + 0.01 * torch.logsumexp(logits, -1).square().mean()


def speaker(scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    middle = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(50, 16), *middle, nn.Linear(16, 50))
    with torch.no_grad():
        model[-1].weight.mul_(scale)
    return model


@pytest.mark.parametrize("scale", [1.0, 1e-6], ids=["", "which only gradients tell"])
@pytest.mark.parametrize("full", [True, False], ids=["no label ignored", "some ignored"])
def test_two_means_are_named_with_the_way_out(scale: float, full: bool) -> None:
    batch = words_batch(full=full)
    batch["tokens"] = batch["tokens"].flip(1)
    found = find_units(speaker(scale), batch, with_term)
    assert found.splits is False
    assert "one term is a mean over labels != -100, another over examples" in found.why
    assert "units='examples'" in found.why and "counts of the whole batch" in found.why


def test_terms_divided_by_counts_of_the_whole_batch_split() -> None:
    """The way out that the refusal names."""

    def loss(m: nn.Module, b: Any) -> torch.Tensor:
        logits = m(b["tokens"])
        told = F.cross_entropy(logits.transpose(1, 2), b["labels"], reduction="sum")
        return told / b["words"] + torch.logsumexp(logits, -1).square().sum() / b["all"]

    batch = {**words_batch(), "words": torch.tensor(35.0), "all": torch.tensor(56.0)}
    found = find_units(speaker(), batch, loss)
    assert found.splits and found.units == "sum"


def test_a_plan_can_be_told_units() -> None:
    """Which are tested: where labels are ignored, these are not what the loss is averaged over."""
    model, batch = speaker(), words_batch(full=True)
    batch = {name: tensor.repeat(8, 1) for name, tensor in batch.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"loss": with_term, "optimizer": optimizer, "budget": "240 KB"}
    plan = ss.plan(model, batch, **given, allow="lossless", units="examples")
    assert plan.loss_units == "examples" and plan.kind == "lossless"
    assert ss.verify(plan, model, [batch], loss=with_term, optimizer=optimizer, steps=1).ok
    batch["labels"] = words_batch()["labels"].repeat(8, 1)
    for planned in (ss.plan, ss.fit):
        with pytest.raises(InputError, match="units='examples' is not what the loss is averaged"):
            planned(model, batch, **given, units="examples")
