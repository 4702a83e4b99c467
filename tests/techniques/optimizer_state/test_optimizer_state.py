"""Optimizer state in few bits: bytes, closeness, snapshots, refusals."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.errors import InputError, NoEffectWarning
from shoestring.kernels.codes import BLOCK, decode, encode, noise_of, random_bits
from shoestring.step.predict import predict_step
from shoestring.techniques import optimizer_state as technique

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(32, 64, generator=draw) for _ in range(2))
    return inputs, targets


def loss(model: nn.Module, given: Any) -> torch.Tensor:
    return (model(given[0]) - given[1]).square().mean()


def made(name: str, *plan: ss.Technique, device: str = "cpu") -> ss.Step:
    model = network().to(device)
    return ss.apply(plan, model, OPTIMIZERS[name](model.parameters()), loss=loss)


# -- codes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_within_a_step(bits: int, signed: bool) -> None:
    values = torch.randn(40, BLOCK[bits], generator=torch.Generator().manual_seed(0))
    values[0] = 0
    values = values if signed else values.abs()
    codes, scale = encode(values.clone(), 0.5, bits, signed=signed)
    assert codes.nbytes == values.numel() * bits // 8
    found = decode(codes, scale, bits, signed=signed)
    torch.testing.assert_close(found.abs().amax(1), values.abs().amax(1))  # the largest is kept
    share = (values.abs() / scale[:, None].clamp_min(1e-30)).sqrt()
    apart = ((found.abs() / scale[:, None].clamp_min(1e-30)).sqrt() - share).abs()[1:]
    assert float(apart.max()) <= (1.0 if signed else 0.75) / (127 if bits == 8 else 7) + 1e-6
    assert torch.equal(found[0], values[0])


def test_rounding_at_random_keeps_a_slow_average_moving() -> None:
    """To the nearest, v ← 0.999·v + 0.001·g² would never leave its code; and the mean is right."""
    counter = torch.zeros((), dtype=torch.int32)
    value = torch.full((1, 256), 0.1)
    value[0, 0] = 1.0
    held = encode(value.clone(), 0.5, 8, signed=False)
    for number in range(300):
        moments = decode(*held, 8, signed=False)
        squares = moments.square()
        squares[0, 1:] += 1e-3 * (0.5 - squares[0, 1:])
        moments = squares.sqrt()
        noise = noise_of(random_bits(counter, number, 0, 256), 16)
        held = encode(moments, noise[None], 8, signed=False)
    expected = 0.5 - 0.49 * (1 - 1e-3) ** 300
    found = decode(*held, 8, signed=False)[0, 1:].square().mean()
    assert float(found) == pytest.approx(expected, rel=0.02)


# -- bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bits", "most"), [("adamw", 8, 2.04), ("adamw", 4, 1.07), ("sgd", 8, 1.02)]
)
def test_bytes_a_parameter(name: str, bits: int, most: float) -> None:
    step = made(name, ss.OptimizerState(bits, smallest=1))
    step(data())
    state = step.optimizer.state.values()
    held = sum(t.nbytes for s in state for k, t in s.items() if k != "step")
    large = [p for p in step.model.parameters() if p.dim() > 1]
    coded = sum(t.nbytes for p in large for k, t in step.optimizer.state[p].items() if k != "step")
    assert coded <= most * sum(p.numel() for p in large)
    assert held < 1.1 * coded


@pytest.mark.parametrize(
    ("name", "bits", "others"),
    [
        ("sgd", 8, ()),
        ("nesterov", 4, (ss.Precision("bf16"),)),
        ("adam", 8, (ss.Precision("fp16"),)),
        ("adamw", 8, (ss.Microbatching(8),)),
        ("adamw", 4, ()),
    ],
    ids=str,
)
def test_the_predicted_peak_is_measured(
    name: str, bits: int, others: tuple[ss.Technique, ...]
) -> None:
    model, given = network(), data()
    own = OPTIMIZERS[name](model.parameters())
    plan = [ss.OptimizerState(bits), *others]
    predicted = predict_step(plan, model, given, loss=loss, optimizer=own).peak_bytes
    plain = predict_step(others, model, given, loss=loss, optimizer=own).peak_bytes
    assert predicted < plain
    step = ss.apply(plan, model, own, loss=loss)
    step(given)
    assert step.measure(given).peak_bytes == pytest.approx(predicted, rel=0.01)


def test_the_fundamental_accounting_counts_the_bits() -> None:
    model, given = network(), data()
    about: dict[str, Any] = {"loss": loss, "optimizer": "adamw"}
    plain = ss.profile(model, given, **about)
    narrow = ss.profile(model, given, **about, techniques=[ss.OptimizerState(4)])
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert plain.peak_bytes - narrow.peak_bytes == matrices * (8 - 1)


# -- training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_near(name: str) -> None:
    plain, step, coarse = (
        made(name, *plan) for plan in ((), (ss.OptimizerState(8),), (ss.OptimizerState(4),))
    )
    before = [p.detach().clone() for p in plain.model.parameters()]
    for _ in range(40):
        for one in (plain, step, coarse):
            last = one(data())
            assert torch.isfinite(last)
    moved = torch.cat(
        [(p - b).flatten() for p, b in zip(plain.model.parameters(), before, strict=True)]
    )

    def apart(other: ss.Step) -> float:
        pairs = zip(plain.model.parameters(), other.model.parameters(), strict=True)
        far = torch.cat([(a - b).detach().flatten() for a, b in pairs])
        return float(far.norm() / moved.detach().norm())

    assert apart(step) < 0.05 and apart(step) < apart(coarse) < 0.6


@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_it_is_certified(name: str) -> None:
    model = network()
    own = OPTIMIZERS[name](model.parameters())
    found = ss.verify([ss.OptimizerState(8)], model, [data()], loss=loss, optimizer=own, steps=4)
    assert found.ok, found
    assert found["gradients"].found is ss.Level.EQUAL
    assert found["optimizer state"].found is ss.Level.NEAR
    both = [ss.OptimizerState(8), ss.Precision("bf16"), ss.Microbatching(8)]
    assert ss.verify(both, model, [data()], loss=loss, optimizer=own).ok


def test_a_broken_decoding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoestring.techniques.optimizer_state import update

    def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        return decode(*args, **kwargs) * 1.3

    monkeypatch.setattr(update, "decode", wrong)
    model = network()
    own = OPTIMIZERS["nesterov"](model.parameters())
    found = ss.verify([ss.OptimizerState(8)], model, [data()], loss=loss, optimizer=own, steps=4)
    assert not found.ok


@pytest.mark.slow
def test_it_is_planned_when_the_state_must_shrink_and_keeps_its_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for host in (ss.Offload, ss.WeightOffload):
        monkeypatch.setattr(host, "offers", classmethod(lambda cls, context: ()))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).bfloat16()
    batch = torch.randn(4, 256, dtype=torch.bfloat16)
    own = torch.optim.AdamW(model.parameters())
    about: dict[str, Any] = {"loss": lambda m, b: m(b).square().mean(), "optimizer": own}
    plain = ss.profile(model, batch, **about, accounting="device").peak_bytes
    with pytest.raises(ss.BudgetError, match="no plan fits"):
        ss.plan(model, batch, **about, budget=int(0.8 * plain), allow="lossless")
    plan = ss.plan(model, batch, **about, budget=int(0.8 * plain))
    assert plan.optimizer_state == ss.OptimizerState(8) and plan.kind == "near-lossless"
    step = ss.apply(plan, model, own, loss=about["loss"])
    step(batch)
    measured = step.measure(batch).peak_bytes
    assert measured == pytest.approx(plan.predicted.peak_bytes, rel=0.01)
    assert measured <= plan.budget_bytes


def test_schedulers_and_hooks_go_on() -> None:
    step = made("sgd", ss.OptimizerState(8))
    called = []
    step.optimizer.register_step_pre_hook(lambda *a: called.append("before"))
    step.optimizer.register_step_post_hook(lambda *a: called.append("after"))
    schedule = torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda n: 1.0 if n < 1 else 0.0)
    step(data())
    schedule.step()
    held = [p.detach().clone() for p in step.model.parameters()]
    step(data())
    assert called == ["before", "after"] * 2
    assert all(torch.equal(a, b) for a, b in zip(held, step.model.parameters(), strict=True))


# -- snapshots ---------------------------------------------------------------------------------


def saved(state: Any) -> Any:
    """As it comes back from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(one: ss.Step, other: ss.Step) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    if not all(torch.equal(a, b) for a, b in pairs):
        return False
    mine, theirs = (list(s.optimizer.state.values()) for s in (one, other))
    return all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        for a, b in zip(mine, theirs, strict=True)
    )


@pytest.mark.parametrize("others", [(), (ss.Precision("bf16"),), (ss.Precision("fp16"),)], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_snapshot_goes_on_to_the_bit(
    name: str, bits: int, others: tuple[ss.Technique, ...]
) -> None:
    plan = (ss.OptimizerState(bits), *others)
    step, resumed = made(name, *plan), made(name, *plan)
    for _ in range(3):
        step(data())
    resumed.load_state_dict(saved(step.state_dict()))
    for _ in range(3):
        assert same(step, resumed)
        assert torch.equal(step(data()), resumed(data()))
    assert same(step, resumed)


def test_state_of_another_width_is_refused_and_nothing_changes() -> None:
    step, other, plain = (
        made("adamw", *p) for p in ((ss.OptimizerState(8),), (ss.OptimizerState(4),), ())
    )
    for one in (step, other, plain):
        one(data())
    before = copy.deepcopy(step.state_dict())
    with pytest.raises(InputError, match="saved in 4 bits, and this step keeps it in 8"):
        step.load_state_dict(saved(other.state_dict()))
    with pytest.raises(InputError, match="is in 4 bits, and this step keeps it in 8"):
        step.optimizer.load_state_dict(saved(other.optimizer.state_dict()))
    with pytest.raises(InputError, match="the state has optimizer_state"):
        plain.load_state_dict(saved(step.state_dict()))
    with pytest.raises(ValueError, match="parameter groups"):
        plain.optimizer.load_state_dict(saved(step.optimizer.state_dict()))
    fresh = made("adamw", ss.OptimizerState(8))
    fresh.load_state_dict(before)
    assert same(step, fresh)


def test_state_of_plain_training_is_taken_over() -> None:
    """What is there before, and what is loaded later."""
    plain = made("adamw")
    for _ in range(3):
        plain(data())
    model = copy.deepcopy(plain.model)
    own = OPTIMIZERS["adamw"](model.parameters())
    own.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    original = dict(own.state)
    step = ss.apply([ss.OptimizerState(8)], model, own, loss=loss)
    later = made("adamw", ss.OptimizerState(8))
    later.model.load_state_dict(plain.model.state_dict())
    later.optimizer.load_state_dict(saved(plain.optimizer.state_dict()))
    assert same(step, later)
    assert own.state.keys() == original.keys()
    for one in (plain, step):
        one(data())
    for a, b in zip(plain.model.parameters(), step.model.parameters(), strict=True):
        assert float((a - b).detach().abs().max()) < 2e-3


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (lambda p: torch.optim.RMSprop(p), "RMSprop cannot keep its state in 8 bits"),
        (lambda p: torch.optim.NAdam(p), "NAdam cannot keep"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "AdamW with amsgrad"),
        (lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.1), "SGD with dampening"),
    ],
)
def test_what_cannot_be_quantized_is_refused_by_name(optimizer: Any, says: str) -> None:
    model = network()
    own = optimizer(model.parameters())
    with pytest.raises(InputError, match=says):
        ss.apply([ss.OptimizerState(8)], model, own, loss=loss)
    plan = ss.plan(model, data(), loss=loss, optimizer=own, budget="10 MB")
    assert plan.optimizer_state is None


def test_sparse_weights_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="optimizer_state cannot follow elements that sparsity"):
        ss.Plan([ss.Sparsity(0.5), ss.OptimizerState(8)])
    ss.Plan([ss.Sparsity(1.0), ss.OptimizerState(8)])


@pytest.mark.parametrize(
    ("chosen", "optimizer"),
    [
        (ss.OptimizerState(8), lambda p: torch.optim.SGD(p, lr=0.1)),
        (ss.OptimizerState(8, smallest=10**6), lambda p: torch.optim.AdamW(p)),
    ],
)
def test_no_moments_to_quantize_says_so(chosen: ss.Technique, optimizer: Any) -> None:
    model = network()
    with pytest.warns(NoEffectWarning):
        ss.apply([chosen], model, optimizer(model.parameters()), loss=loss)


def test_settings_are_written_and_read(tmp_path: Path) -> None:
    plan = ss.Plan([ss.OptimizerState(4, smallest=100)])
    plan.save(tmp_path / "plan.toml")
    assert ss.Plan.load(tmp_path / "plan.toml") == plan and plan.short() == "4-bit state"
    for wrong in (3, True, 16):
        with pytest.raises(InputError, match="bits"):
            ss.OptimizerState(wrong)


def test_the_readme_runs() -> None:
    page = (Path(technique.__file__).parent / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_on_the_gpu_the_update_allocates_next_to_nothing_and_is_captured(name: str) -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda().bfloat16()
    own = OPTIMIZERS[name](model.parameters())
    given = torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16)
    step = ss.apply(
        [ss.OptimizerState(8)], model, own, loss=lambda m, b: (m(b).float() - 1).square().mean()
    )
    own.param_groups[0]["lr"] *= 1e-2 if name == "adamw" else 1
    first = [float(step(given)) for _ in range(4)]
    assert step.captured and first[-1] < first[0]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step._setup.update()
    assert torch.cuda.max_memory_allocated() - before < 64 * 1024


@pytest.mark.parametrize("bits", [8, 4])
def test_running_statistics_follow_the_weights(bits: int) -> None:
    """Those of later steps see weights that are near, and are claimed so."""
    torch.manual_seed(0)
    blocks = [(nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*(layer for block in blocks for layer in block))
    own = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) - x).square().mean()

    plan = [ss.OptimizerState(bits, smallest=1)]
    assert ss.verify(plan, model, [torch.randn(36, 48)], loss=loss, optimizer=own).ok
