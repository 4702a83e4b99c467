"""Gradients that go as soon as their parameter is updated."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoestring as ss
from shoestring.errors import InputError
from shoestring.step.predict import predict_step
from shoestring.techniques import gradient_release as technique

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}
RELEASE = ss.GradientRelease()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(48, 48) for _ in range(6)))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(16, 48, generator=draw) for _ in range(2))
    return inputs, targets


def loss(model: nn.Module, given: Any) -> torch.Tensor:
    return (model(given[0]) - given[1]).square().mean()


def trained(name: str, *plan: ss.Technique, steps: int = 3) -> ss.Step:
    model = network()
    step = ss.apply(plan, model, OPTIMIZERS[name](model.parameters()), loss=loss)
    for _ in range(steps):
        step(data())
    return step


def equal(one: ss.Step, other: ss.Step) -> bool:
    """Parameters and state."""
    return all(
        torch.equal(a, b)
        and all(
            torch.equal(held, other.optimizer.state[b][key])
            for key, held in one.optimizer.state[a].items()
            if isinstance(held, torch.Tensor)
        )
        for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    "others", [(), (ss.Microbatching(4),), (ss.Sparsity(0.5),)], ids=["alone", "parts", "sparse"]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_bit_differs(name: str, others: tuple[ss.Technique, ...]) -> None:
    """With microbatches too, but for the momentum that they are added to."""
    plain, released = trained(name, *others), trained(name, *others, RELEASE)
    folded = name == "sgd" and isinstance((*others, None)[0], ss.Microbatching)
    assert equal(plain, released) != folded
    for a, b in zip(plain.model.parameters(), released.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    kept = trained(name, *others, ss.GradientRelease(fold=False))
    assert equal(plain, kept)


@pytest.mark.parametrize(
    ("name", "others", "most"),
    [
        ("adamw", (), 1),
        ("sgd", (ss.Microbatching(4),), 1),
        ("nesterov", (ss.Microbatching(4),), 12),
    ],
)
@pytest.mark.filterwarnings("ignore:microbatches. a hook:shoestring.errors.UnprovenWarning")
def test_gradients_do_not_exist_together(
    name: str, others: tuple[ss.Technique, ...], most: int
) -> None:
    """As many as the exact form of the optimizer needs; counted where each is made."""
    model = network()
    held = []
    for parameter in model.parameters():  # before ours: hooks run in order
        parameter.register_post_accumulate_grad_hook(
            lambda p: held.append(sum(q.grad is not None for q in model.parameters()))
        )
    own = OPTIMIZERS[name](model.parameters())
    ss.apply([*others, RELEASE], model, own, loss=loss)(data())
    assert max(held) == most


@pytest.mark.parametrize(
    ("name", "others", "share"),
    [
        ("adamw", (), 0.9),
        ("sgd", (ss.Microbatching(4),), 0.75),
        ("adamw", (ss.Microbatching(4),), 1.1),
        ("sgd", (ss.Checkpointing("every-2"),), 0.8),
        ("adamw", (ss.Precision("bf16"), ss.OptimizerState(8, smallest=1)), 0.95),
        ("adam", (ss.OptimizerState(4, smallest=1), ss.Microbatching(4)), 1.1),
    ],
    ids=str,
)
def test_the_predicted_peak_is_measured(
    name: str, others: tuple[ss.Technique, ...], share: float
) -> None:
    kept = trained(name, *others).measure(data()).peak_bytes
    model = network()
    own = OPTIMIZERS[name](model.parameters())
    plan = [*others, RELEASE]
    predicted = predict_step(plan, model, data(), loss=loss, optimizer=own).peak_bytes
    measured = trained(name, *plan).measure(data()).peak_bytes
    assert measured == pytest.approx(predicted, rel=0.01)
    assert measured < share * kept


@pytest.mark.parametrize("sum", ["device", "host"])
@pytest.mark.parametrize("size", [5, 10, 23])
def test_a_last_part_that_is_smaller_is_predicted_as_it_is(size: int, sum: Any) -> None:
    """Updates run beside its activations, not beside those of a whole part."""
    model = network()
    own = OPTIMIZERS["adamw"](model.parameters())
    x = tuple(tensor.repeat(3, 1) for tensor in data())
    plan = [ss.Microbatching(size), ss.GradientRelease(sum=sum, smallest=1)]
    predicted = predict_step(plan, model, x, loss=loss, optimizer=own).peak_bytes
    step = ss.apply(plan, model, own, loss=loss)
    step(x)
    assert step.measure(x).peak_bytes == pytest.approx(predicted, rel=1e-3)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_it_is_certified(name: str) -> None:
    model = network()
    own = OPTIMIZERS[name](model.parameters())
    found = ss.verify([RELEASE], model, [data()], loss=loss, optimizer=own)
    assert found.ok, found
    compared = ("loss", "gradients", "optimizer state", "parameters")
    assert {found[what].found for what in compared} == {ss.Level.EQUAL}
    parts = [RELEASE, ss.Microbatching(4)]
    assert ss.verify(parts, model, [data()], loss=loss, optimizer=own).ok
    coded = [RELEASE, ss.OptimizerState(8, smallest=1)]
    assert ss.verify(coded, model, [data()], loss=loss, optimizer=own).ok


def test_it_is_planned_when_gradients_must_go_and_keeps_its_word() -> None:
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(10)))
    given = torch.randn(4, 128), torch.randn(4, 128)
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    about: dict[str, Any] = {"loss": loss, "optimizer": own}
    plain = ss.profile(model, given, **about, accounting="device").peak_bytes
    plan = ss.plan(model, given, **about, budget=int(0.8 * plain), allow="lossless")
    assert plan.gradient_release == RELEASE and plan.kind == "lossless"
    step = ss.apply(plan, model, own, loss=loss)
    step(given)
    measured = step.measure(given).peak_bytes
    assert measured == pytest.approx(plan.predicted.peak_bytes, rel=0.01)
    assert measured <= plan.budget_bytes


def test_the_fundamental_accounting_counts_one_gradient() -> None:
    model = network()
    about: dict[str, Any] = {"loss": loss, "optimizer": "sgd"}
    plain = ss.profile(model, data(), **about)
    released = ss.profile(model, data(), **about, techniques=[RELEASE])
    every = [p.nbytes for p in model.parameters()]
    assert plain.peak_bytes - released.peak_bytes == sum(every) - max(every)


def test_a_learning_rate_schedule_goes_on() -> None:
    step = trained("adamw", RELEASE, steps=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda n: 1.0 if n < 1 else 0.0)
    step(data())
    schedule.step()
    held = [p.detach().clone() for p in step.model.parameters()]
    step(data())
    torch.testing.assert_close(list(step.model.parameters()), held)
    assert len(step.optimizer.param_groups[0]["params"]) == 12


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_it_follows_the_groups_of_a_loaded_state(name: str) -> None:
    """Loading replaces the optimizer's groups: another rate than the step was made with holds."""
    plain, released = trained(name), trained(name, RELEASE)
    for step in (plain, released):
        state = step.state_dict()
        state["optimizer"]["param_groups"][0]["lr"] = 0.5
        step.load_state_dict(state)
        step.optimizer.param_groups[0]["weight_decay"] = 0.3
        step(data())
    assert equal(plain, released)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_parameters_that_come_later_are_updated(clip: float | None) -> None:
    """Added to the optimizer, or trained from now on."""
    steps = []
    for plan in ((), (RELEASE,)):
        model = network()
        first, last = list(model[0].parameters()), list(model[-1].parameters())
        for parameter in first:
            parameter.requires_grad_(False)
        held = [p for p in model.parameters() if all(p is not other for other in last)]
        step = ss.apply(plan, model, OPTIMIZERS["adamw"](held), loss=loss, clip=clip)
        step(data())
        step.optimizer.add_param_group({"params": last, "lr": 0.1})
        for parameter in first:
            parameter.requires_grad_(True)
        step(data())
        step(data())
        steps.append(step)
    assert equal(*steps)


# -- refusals ----------------------------------------------------------------------------------


def test_hooks_that_look_at_all_gradients_are_refused() -> None:
    step = trained("sgd", RELEASE)

    def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(step.model.parameters(), 1.0)

    before = [p.detach().clone() for p in step.model.parameters()]
    handle = step.optimizer.register_step_pre_hook(clip)
    with pytest.raises(InputError, match="cannot be clipped by their common norm"):
        step(data())
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    handle.remove()
    step(data())


@pytest.mark.parametrize(
    ("plan", "optimizer", "says"),
    [
        ([ss.Precision("fp16")], "sgd", "before precision knows whether"),
        ([ss.Microbatching(4, accumulate="compensated")], "sgd", "compensated accumulation"),
        ([], "rmsprop", "the updates of RMSprop are not known"),
    ],
)
def test_what_does_not_go_together_is_refused(plan: Any, optimizer: str, says: str) -> None:
    model = network()
    made = OPTIMIZERS.get(optimizer, torch.optim.RMSprop)(model.parameters())
    with pytest.raises(InputError, match=says):
        ss.apply([*plan, RELEASE], model, made, loss=loss)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


class Reentrant(nn.Module):
    """One layer in two backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def test_a_second_gradient_after_the_update_is_refused() -> None:
    model = nn.Sequential(nn.Linear(48, 48), Reentrant())
    own = OPTIMIZERS["sgd"](model.parameters())
    step = ss.apply([RELEASE], model, own, loss=loss)
    with pytest.raises(InputError, match="a second gradient after its update"):
        step(data())


def test_a_step_that_failed_half_way_is_not_gone_on_from() -> None:
    step = trained("sgd", RELEASE)
    first = next(step.model.parameters())

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("no memory left")

    handle = first.register_hook(fail)
    with pytest.raises(RuntimeError, match="no memory left"):
        step(data())
    handle.remove()
    with pytest.raises(InputError, match="failed after 11 of 12 parameters were updated"):
        step(data())


def test_a_failed_apply_takes_the_hooks_away(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    own = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(InputError):
        ss.apply([ss.Checkpointing("residual-1"), RELEASE], model, own, loss=loss)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_settings_are_written_and_read(tmp_path: Path) -> None:
    plan = ss.Plan([ss.GradientRelease(fold=False)])
    plan.save(tmp_path / "plan.toml")
    assert ss.Plan.load(tmp_path / "plan.toml") == plan and plan.short() == "released gradients"


def test_the_readme_runs() -> None:
    page = (Path(technique.__file__).parent / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu_it_is_captured_and_needs_less() -> None:
    peaks = {}
    for plan in ((), (RELEASE,)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(16))).cuda().bfloat16()
        given = tuple(torch.randn(64, 2048, device="cuda").bfloat16() for _ in range(2))
        own = torch.optim.AdamW(model.parameters(), lr=3e-5)
        step = ss.apply([ss.OptimizerState(8), *plan], model, own, loss=loss)
        losses = [float(step(given)) for _ in range(4)]
        assert step.captured and losses[-1] < losses[0]
        peaks[bool(plan)] = step.measure(given).peak_bytes
    assert peaks[True] < peaks[False] - 12 * 2048**2 * 2


def test_accumulating_by_the_step_is_refused() -> None:
    step = trained("sgd", RELEASE)
    with pytest.raises(InputError, match="gradients cannot be accumulated"):
        step(data(), update=False)


def test_a_revised_step_goes_on_releasing_or_stops() -> None:
    step, plain = trained("adamw", RELEASE), trained("adamw")
    step.revise(ss.Plan([ss.Microbatching(8), RELEASE]))
    plain.revise(ss.Plan([ss.Microbatching(8)]))
    for one in (step, plain):
        one(data())
    assert equal(step, plain)
    assert all(len(p._post_accumulate_grad_hooks) == 1 for p in step.model.parameters())
    step.revise(ss.Plan([ss.Microbatching(8)]))
    assert not any(p._post_accumulate_grad_hooks for p in step.model.parameters())
    step.clip = 1.0  # gradients are there again
    plain.clip = 1.0
    for one in (step, plain):
        one(data())
    assert equal(step, plain)


class Routed(nn.Module):
    """The sign of a row says which of two layers it goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.two = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(x)
        for number, layer in enumerate(self.two):
            rows = ((x[:, 0] > 0) == bool(number)).nonzero()[:, 0]
            if len(rows):
                made = made.index_add(0, rows, layer(x[rows]))
        return made


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_parts_without_a_gradient_are_folded_as_nothing(decay: float) -> None:
    """The first part has none of one layer, the last none of the other."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    x[:, 0] = torch.arange(8) - 3.5
    seen = []
    for plan in ([], [ss.Microbatching(2), ss.GradientRelease()]):
        torch.manual_seed(0)
        model = Routed()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=decay)
        step = ss.apply(plan, model, optimizer, loss=lambda m, b: m(b).square().mean())
        for _ in range(3):
            step(x)
        seen.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(seen[1], seen[0])
