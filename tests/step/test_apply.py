"""A step that was saved goes on to the bit; schedulers, groups and plain loops go on working."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch
from torch import nn

from shoestring.errors import InputError
from shoestring.planning.fit import fit
from shoestring.step.apply import apply
from shoestring.step.step import Step
from shoestring.techniques import (
    Checkpointing,
    GradientRelease,
    Microbatching,
    Offload,
    OptimizerState,
    Precision,
    Sparsity,
    Technique,
)
from shoestring.techniques.plan import Plan
from shoestring.verification.verify import verify
from techniques.small_models import SMALL

CHOSEN: dict[str, list[Technique]] = {
    "plain": [],
    "sparsity": [Sparsity(0.3, schedule=((100, 2),))],
    "fp16": [Precision("fp16", growth_interval=2)],
    "bf16": [Precision("bf16")],
    "microbatching": [Microbatching(4, accumulate="compensated")],
    "checkpointing": [Checkpointing("residual-2*")],
    "all": [
        Sparsity(0.3, schedule=((100, 2),)),
        Precision("fp16"),
        Checkpointing("residual-1"),
        Microbatching(4),
    ],
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
}


def make(name: str, chosen: list[Technique], optimizer: str, seed: int = 0) -> Step:
    torch.manual_seed(seed)
    model = SMALL[name].build()
    return apply(chosen, model, OPTIMIZERS[optimizer](model), loss=SMALL[name].loss)


def batches(name: str, count: int) -> list[Any]:
    torch.manual_seed(7)
    return [SMALL[name].batch() for _ in range(count)]


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """Through a file, as a snapshot is."""
    held = io.BytesIO()
    torch.save(state, held)
    held.seek(0)
    return torch.load(held, weights_only=False)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", CHOSEN)
@pytest.mark.parametrize("name", ["residual", "tied"])
def test_a_saved_step_goes_on_to_the_bit(name: str, kind: str, optimizer: str) -> None:
    data = batches(name, 6)
    step = make(name, CHOSEN[kind], optimizer)
    for batch in data[:3]:
        step(batch)
    state = saved(step.state_dict())
    other = make(name, CHOSEN[kind], optimizer, seed=1)
    other.load_state_dict(state)
    for batch in data[3:]:
        assert torch.equal(step(batch), other(batch))
    for key, expected in step.model.state_dict().items():
        assert torch.equal(expected, other.model.state_dict()[key]), key


@pytest.mark.parametrize("kind", CHOSEN)
def test_groups_and_schedulers_are_obeyed(kind: str) -> None:
    """A group whose rate is zero stays as it is; a scheduler made before or after moves it."""
    small = SMALL["residual"]
    torch.manual_seed(0)
    model, batch = small.build(), small.batch()
    still = [p for n, p in model.named_parameters() if n.startswith("1.0.")]
    moving = [p for n, p in model.named_parameters() if not n.startswith("1.0.")]
    groups = [{"params": moving}, {"params": still, "lr": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    before = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    step = apply(CHOSEN[kind], model, optimizer, loss=small.loss)
    held = [p.detach().clone() for p in still]
    moved = [p.detach().clone() for p in moving]
    step(batch)  # one update: the sparse pattern is as it was
    before.step()
    assert all(torch.equal(a, b) for a, b in zip(held, still, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(moved, moving, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.05
    after = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.0)
    assert step.optimizer is optimizer and after.get_last_lr() == [0.0, 0.0]
    held = [p.detach().clone() for p in model.parameters()]
    for group in optimizer.param_groups:
        group["momentum"] = 0.0
    if kind in ("sparsity", "all"):
        return  # the second update rewires
    step(batch)
    assert all(torch.equal(a, b) for a, b in zip(held, model.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["plain", "sparsity", "checkpointing"])
@pytest.mark.parametrize("name", ["residual", "tied"])
def test_a_plain_loop_trains_the_same(name: str, kind: str) -> None:
    """`zero_grad`, `backward`, `step` on the transformed model, where the model is what changed."""
    small, (batch,) = SMALL[name], batches(name, 1)
    chosen: list[Technique] = [Sparsity(0.3, method="static")]
    chosen = chosen if kind == "sparsity" else CHOSEN[kind]
    step, other = make(name, chosen, "sgd"), make(name, chosen, "sgd")
    for _ in range(3):
        other.optimizer.zero_grad()
        loss = small.loss(other.model, batch)
        loss.backward()
        other.optimizer.step()
        assert torch.equal(loss.detach(), step(batch))
    for key, expected in step.model.state_dict().items():
        assert torch.equal(expected, other.model.state_dict()[key]), key


@pytest.mark.parametrize("kind", CHOSEN)
def test_the_loss_falls(kind: str) -> None:
    (batch,) = batches("tied", 1)
    step = make("tied", CHOSEN[kind], "adam")
    first = float(step(batch))
    for _ in range(20):
        last = float(step(batch))
    assert last < first


def test_a_plan_or_techniques() -> None:
    (batch,) = batches("mlp", 1)
    one = make("mlp", [Microbatching(2)], "sgd")
    small = SMALL["mlp"]
    torch.manual_seed(0)
    model = small.build()
    plan = Plan(microbatching=Microbatching(2))
    other = apply(plan, model, OPTIMIZERS["sgd"](model), loss=small.loss)
    assert one.plan == other.plan == plan
    assert torch.equal(one(batch), other(batch))
    assert other.measured is None
    assert other.measure(batch) is other.measured


def test_gradients_are_freed_between_steps() -> None:
    (batch,) = batches("mlp", 1)
    step = make("mlp", [], "sgd")
    loss = step(batch)
    assert not loss.requires_grad
    assert all(p.grad is None for p in step.model.parameters())


def test_what_cannot_be_trained() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(InputError, match="none of the model's 2 parameters"):
        apply([], frozen, optimizer, loss=lambda m, b: m(b).sum())
    model = nn.Linear(2, 2)
    step = apply([], model, torch.optim.SGD(model.parameters()), loss=lambda m, b: m(b))
    held = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(InputError, match="scalar"):
        step(torch.ones(3, 2))
    assert all(torch.equal(held[key], value) for key, value in model.state_dict().items())
    with pytest.raises(InputError, match="runs the loss by itself"):
        apply([], model, torch.optim.LBFGS(model.parameters()), loss=lambda m, b: m(b).sum())


COPIED: dict[str, list[Technique]] = {
    "blocks": [Checkpointing("residual-1")],
    "regions": [Checkpointing("residual-2*")],
    "leaves": [Checkpointing("per-block", schedule=("cheap*2", "lean*2"))],
    "groups": [Microbatching(4, simulated=True)],
    "sparse": [Sparsity(0.3)],
}


@pytest.mark.parametrize("kind", COPIED)
def test_a_copy_of_the_model_is_a_model_of_its_own(kind: str) -> None:
    """As averages of weights are made; the copied blocks must not run with the original's."""
    step, (batch, *_) = make("residual", COPIED[kind], "sgd"), batches("residual", 1)
    step(batch)
    twin = copy.deepcopy(step.model).eval()
    before = twin(batch[0])
    step(batch)
    assert torch.equal(twin(batch[0]), before)
    assert not torch.equal(step.model.eval()(batch[0]), before)
    SMALL["residual"].loss(twin.train(), batch).backward()
    assert all(p.grad is None for p in step.model.parameters())
    assert all(p.grad is not None for p in twin.parameters())


def test_a_step_is_not_copied() -> None:
    with pytest.raises(InputError, match="cannot be copied") as raised:
        copy.deepcopy(make("mlp", [], "sgd"))
    assert "copy the model" in (raised.value.hint or "")


def test_a_step_that_fails_leaves_no_gradients() -> None:
    failing, calm = (make("mlp", [Microbatching(4)], "sgd") for _ in range(2))
    (batch,), plain = batches("mlp", 1), failing._setup.run
    parts = iter((True, False))

    def breaks(part: Any) -> torch.Tensor:
        if not next(parts, True):
            raise ValueError("half way")
        return plain(part)

    failing._setup.run = breaks
    with pytest.raises(ValueError, match="half way"):
        failing(batch)
    assert failing(batch) == calm(batch)
    for one, other in zip(failing.model.parameters(), calm.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_state_of_another_plan_is_refused_whole() -> None:
    wide, narrow = make("mlp", [], "sgd"), make("mlp", [Precision("fp16")], "sgd", seed=1)
    before = copy.deepcopy(narrow.model.state_dict())
    with pytest.raises(InputError, match="has no precision"):
        narrow.load_state_dict(wide.state_dict())
    assert all(torch.equal(v, before[k]) for k, v in narrow.model.state_dict().items())


@pytest.mark.parametrize("through", ["step", "optimizer"])
def test_a_plain_adam_refuses_the_state_of_16_bits(through: str) -> None:
    """Moments that were stored scaled would be taken for moments as they are."""
    narrow, wide = make("mlp", [Precision("fp16")], "adam"), make("mlp", [], "adam")
    for step in (narrow, wide):
        step(batches("mlp", 1)[0])
    before = copy.deepcopy(wide.state_dict())
    with pytest.raises(ValueError, match=r"."):
        if through == "step":
            wide.load_state_dict(narrow.state_dict())
        else:
            wide.optimizer.load_state_dict(narrow.optimizer.state_dict())
    after = wide.state_dict()
    for name, held in before["model"].items():
        assert torch.equal(after["model"][name], held)
    for number, entries in before["optimizer"]["state"].items():
        for key, held in entries.items():
            assert torch.equal(torch.as_tensor(after["optimizer"]["state"][number][key]), held)


def test_a_sparse_state_of_another_density_is_refused_whole() -> None:
    dense, sparse = (make("mlp", [Sparsity(density)], "sgd") for density in (0.5, 0.25))
    for step in (dense, sparse):
        step(batches("mlp", 1)[0])
    before = copy.deepcopy(sparse.model.state_dict())
    with pytest.raises(InputError, match=r"nonzeros.*another density"):
        sparse.load_state_dict(dense.state_dict())
    assert all(torch.equal(v, before[k]) for k, v in sparse.model.state_dict().items())


def test_a_revision_that_fails_leaves_the_plan_that_was() -> None:
    step, (batch,) = make("mlp", [Microbatching(4)], "sgd"), batches("mlp", 1)
    with pytest.raises(InputError):
        step.revise(Plan.of([Checkpointing("per-block", blocks=("nowhere",), schedule=("keep",))]))
    assert step.plan.microbatching is not None
    assert len(list(step._setup.split(batch))) == 2


def test_gradients_that_nobody_reads_are_dropped_too() -> None:
    """As of a backbone that needs gradients while the optimizer holds the head alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.1)
    step = apply([], model, optimizer, loss=lambda m, b: m(b).square().mean())
    step(torch.randn(4, 8))
    assert all(p.grad is None for p in model.parameters())


def test_gradients_of_a_backward_pass_before_are_not_added() -> None:
    (batch,) = batches("residual", 1)
    steps = [make("residual", [], "sgd") for _ in range(2)]
    model = steps[0].model
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.warns(RuntimeWarning, match="drops gradients that were there before it"):
        steps[0](batch)
    steps[1](batch)
    for one, other in zip(model.parameters(), steps[1].model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_optimizer_of_another_model() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(InputError, match="none of the model's parameters"):
        apply([], model, OPTIMIZERS["sgd"](other), loss=lambda model, batch: model(batch).sum())


@pytest.mark.parametrize("given", ["sgd", torch.optim.SGD])
def test_what_is_no_optimizer(given: Any) -> None:
    model, batch = nn.Linear(2, 2), torch.ones(2, 2)
    step: dict[str, Any] = {"loss": lambda model, batch: model(batch).sum()}
    with pytest.raises(InputError, match="is not an optimizer"):
        apply([], model, given, **step)
    with pytest.raises(InputError, match="is not an optimizer"):
        verify([], model, [batch], optimizer=given, **step)
    with pytest.raises(InputError, match="is not an optimizer"):
        fit(model, batch, optimizer=given, budget="1 MB", **step)


def test_one_technique_is_no_list() -> None:
    with pytest.raises(InputError, match="one technique, not several"):
        Plan.of(Microbatching(4))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda s: 3, "not the state of a step"),
        (lambda s: {}, "not the state of a step"),
        (lambda s: {**s, "model": {}}, "has no "),
        (lambda s: {**s, "model": {**s["model"], "odd": torch.ones(1)}}, "has odd"),
        (lambda s: {**s, "model": {k: v[:1] for k, v in s["model"].items()}}, "has the shape"),
        (lambda s: {**s, "optimizer": {"state": {}, "param_groups": [{"params": [0]}]}}, "groups"),
    ],
    ids=["number", "empty", "no weights", "more weights", "other shapes", "other optimizer"],
)  # fmt: skip
def test_a_state_that_does_not_fit_is_refused_whole(spoil: Any, says: str) -> None:
    """Weights of another state are not loaded before its optimizer is looked at."""
    step, other = make("mlp", [], "adam"), make("mlp", [], "adam", seed=1)
    other(batches("mlp", 1)[0])
    before = copy.deepcopy(step.model.state_dict())
    with pytest.raises(InputError, match=says):
        step.load_state_dict(spoil(other.state_dict()))
    assert all(torch.equal(v, before[k]) for k, v in step.model.state_dict().items())
    assert not step.optimizer.state


def test_a_second_optimizer_may_update_by_hand() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(RuntimeWarning, match="another optimizer holds 1.weight and others"):
        step = apply([], model, optimizers[0], loss=lambda m, b: m(b).square().mean())
    step(torch.ones(2, 3), update=False)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert step.accumulated == 0
    assert all(not torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("plan", [None, 3, Microbatching])
def test_what_is_no_plan_is_said(plan: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="is not a plan"):
        apply(plan, model, optimizer, loss=lambda m, b: m(b).mean())
    with pytest.raises(InputError, match="is not a plan"):
        apply([], model, optimizer, loss=lambda m, b: m(b).mean()).revise(plan)
    with pytest.raises(InputError, match="is not a loss"):
        apply([], model, optimizer, loss=None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown parallel 3"):
        apply([], model, optimizer, loss=lambda m, b: m(b).mean(), parallel=3)  # type: ignore[arg-type]


def step_set_on(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose step someone exchanged, to clip all gradients by their common norm."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    before = optimizer.step

    @functools.wraps(before)
    def step(*args: Any) -> Any:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return before(*args)

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize(
    "technique", [GradientRelease(), OptimizerState(bits=8), Offload(), Precision("bf16")]
)
def test_a_step_that_was_set_on_the_optimizer_is_not_left_out(technique: Technique) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with pytest.raises(InputError, match="would leave out the step that was set on this SGD"):
        apply([technique], model, step_set_on(model), loss=lambda m, b: m(b).square().mean())


def test_a_step_that_a_scheduler_set_is_the_optimizers_own() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        torch.optim.lr_scheduler.StepLR(optimizer, 10)
    assert "step" in vars(optimizer)
    apply([GradientRelease()], model, optimizer, loss=lambda m, b: m(b).square().mean())
