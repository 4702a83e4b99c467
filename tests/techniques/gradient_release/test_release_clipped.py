"""Released gradients, clipped by the norm of all; and microbatches folded into Adam's moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.errors import InputError
from shoestring.planning.planner import Planner
from shoestring.step.predict import predict_step

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2),
}
RELEASE = ss.GradientRelease()
CLIPS = {
    "norm": ss.Clip(norm=0.05),
    "wide": ss.Clip(norm=1e6),
    "one": ss.Clip(norm=0.1, norm_type=1.0),
    "largest": ss.Clip(norm=0.01, norm_type=float("inf")),
    "value": ss.Clip(value=1e-3),
}


class Counting(nn.Module):
    """Counts its calls, and forgets some of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += x.detach().mean()
        return self.drop(x)


def network() -> nn.Module:
    """Statistics, draws, a weight used twice, and one that the optimizer does not hold."""
    torch.manual_seed(0)
    shared = nn.Linear(48, 48)
    return nn.Sequential(
        shared, nn.BatchNorm1d(48), nn.ReLU(), Counting(), shared, nn.Linear(48, 48), nn.Tanh(),
        nn.Linear(48, 48),
    )  # fmt: skip


def data(seed: int = 1) -> torch.Tensor:
    return torch.randn(16, 48, generator=torch.Generator().manual_seed(seed))


def loss(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    return (model(given) - given).square().mean()


def trained(
    name: str, *plan: ss.Technique, clip: ss.Clip | None, held: int | None = -2, steps: int = 3
) -> tuple[ss.Step, list[float]]:
    model = network()
    own = OPTIMIZERS[name](list(model.parameters())[:held])
    step = ss.apply(plan, model, own, loss=loss, clip=clip)
    torch.manual_seed(5)
    found = []
    for number in range(steps):
        value = step(data(number))
        found.append(float(value))
        found.append(float("nan") if step.grad_norm is None else float(step.grad_norm))
    return step, found


def equal(one: ss.Step, other: ss.Step) -> bool:
    """Parameters, buffers and state."""
    models = zip(one.model.state_dict().items(), other.model.state_dict().items(), strict=True)
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(a, b) for (_, a), (_, b) in models) and all(
        torch.equal(held, other.optimizer.state[b][key])
        for a, b in pairs
        for key, held in one.optimizer.state[a].items()
        if isinstance(held, torch.Tensor)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", CLIPS)
def test_clipped_and_released_is_equal_to_the_bit(name: str, clip: str) -> None:
    """Losses, norms, parameters, state, statistics, draws and counts."""
    plain, expected = trained(name, clip=CLIPS[clip])
    released, found = trained(name, RELEASE, clip=CLIPS[clip])
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert equal(plain, released)
    assert plain.model[3].calls == released.model[3].calls == 3


@pytest.mark.parametrize("clip", CLIPS)
def test_an_optimizer_that_holds_all_leaves_nothing_to_clip_at_the_end(clip: str) -> None:
    plain, expected = trained("sgd", clip=CLIPS[clip], held=None)
    released, found = trained("sgd", RELEASE, clip=CLIPS[clip], held=None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert equal(plain, released)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_microbatches_wait_for_the_norm(name: str, clip: str) -> None:
    parts = ss.Microbatching(4)
    plain, expected = trained(name, parts, clip=CLIPS[clip])
    released, found = trained(name, parts, RELEASE, clip=CLIPS[clip])
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert equal(plain, released)


@pytest.mark.parametrize(
    "other",
    [ss.Checkpointing("every-2"), ss.Precision("bf16"), ss.OptimizerState(8, smallest=1),
     ss.ActivationBits(4, smallest=1), ss.Offload(smallest=1)],
    ids=str,
)  # fmt: skip
def test_others_beside_it(other: ss.Technique) -> None:
    """The norm is that of the gradients that are clipped: draws of rounding are repeated."""
    step, found = trained("adamw", other, RELEASE, clip=CLIPS["norm"], held=None)
    plain, expected = trained("adamw", other, clip=CLIPS["norm"], held=None)
    assert found[:2] == expected[:2]
    lossless = isinstance(other, (ss.Checkpointing, ss.Offload))
    assert equal(step, plain) or not lossless


def test_gradients_do_not_exist_together_in_either_pass() -> None:
    model = network()
    held = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: held.append(sum(q.grad is not None for q in model.parameters()))
        )
    own = OPTIMIZERS["adamw"](model.parameters())
    step = ss.apply([RELEASE], model, own, loss=loss, clip=0.1)
    step(data())
    assert max(held) == 1 and len(held) == 2 * len(list(model.parameters()))


def test_clipping_takes_no_memory() -> None:
    def peak(*plan: ss.Technique, clip: float | None) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(12)))
        own = OPTIMIZERS["sgd"](model.parameters())
        step = ss.apply(plan, model, own, loss=loss, clip=clip)
        step(data())
        return step.measure(data()).peak_bytes

    assert peak(RELEASE, clip=0.1) == pytest.approx(peak(RELEASE, clip=None), rel=0.01)
    assert peak(RELEASE, clip=0.1) < 0.85 * peak(clip=0.1)


def test_a_pass_that_fails_for_the_norm_changes_nothing() -> None:
    step, _ = trained("adamw", RELEASE, clip=CLIPS["norm"])
    before = {name: t.clone() for name, t in step.model.state_dict().items()}
    stream = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        step(torch.randn(16, 47))
    torch.set_rng_state(stream)
    assert all(torch.equal(t, before[name]) for name, t in step.model.state_dict().items())
    step(data())  # and it goes on


def test_a_fit_with_clipping_knows_that_the_passes_run_twice() -> None:
    """On a model for which released gradients are the fastest way to less memory."""
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(12)))
    given: dict[str, Any] = {"loss": loss, "optimizer": OPTIMIZERS["sgd"](model.parameters())}
    plain = ss.plan(model, data(), budget="1 GB", **given)
    budget = int(0.9 * plain.predicted.peak_bytes)
    seconds = {}
    for by_norm in (False, True):
        planner = Planner(model, data(), allow="lossless", by_norm=by_norm, **given)
        one = next(s for s in planner._settings(planner.allowed) if s.techniques == (RELEASE,))
        found = planner.estimates.best(one, budget)
        assert found is not None
        seconds[by_norm] = found.seconds
    assert 1.2 * seconds[False] < seconds[True] < 2 * seconds[False]
    step = ss.fit(model, data(), budget=budget, clip=0.1, allow="lossless", **given)
    step(data())
    assert step.grad_norm is not None


# -- folded ------------------------------------------------------------------------------------

FOLDED = ss.GradientRelease(fold="all")


def smooth() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(48, 48) for _ in range(4)))


def by_hand(
    model: nn.Module, kind: str, parts: int, steps: int, rate: float = 1e-2
) -> list[torch.Tensor]:
    """AdamA, written down once more."""
    held = list(model.parameters())
    m, v = ([torch.zeros_like(p) for p in held] for _ in range(2))
    for count in range(1, steps + 1):
        batch = data(count - 1)
        for number, part in enumerate(batch.chunk(parts)):
            given = torch.autograd.grad(loss(model, part) / parts, held)
            for i, (p, g) in enumerate(zip(held, given, strict=True)):
                if kind == "adam" and number == 0:
                    g = g + 1e-2 * p.detach()
                m[i] = (0.9 * m[i] if number == 0 else m[i]) + 0.1 * g
                v[i] = (0.999 * v[i] if number == 0 else v[i]) + 0.001 * g * g
        with torch.no_grad():
            for p, first, second in zip(held, m, v, strict=True):
                if kind == "adamw":
                    p.mul_(1 - rate * 1e-2)
                root = (second / (1 - 0.999**count)).sqrt() + 1e-8
                p.sub_(rate * first / (1 - 0.9**count) / root)
    return [*m, *v, *(p.detach() for p in held)]


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_folded_adam_is_adama(name: str) -> None:
    model = smooth()
    own = OPTIMIZERS[name](model.parameters())
    step = ss.apply([ss.Microbatching(4), FOLDED], model, own, loss=loss)
    for number in range(3):
        step(data(number))
    state = [own.state[p] for p in model.parameters()]
    found = [s["exp_avg"] for s in state] + [s["exp_avg_sq"] for s in state]
    expected = by_hand(smooth(), name, 4, 3)
    for a, b in zip([*found, *model.parameters()], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=1e-6)
    assert {float(s["step"]) for s in state} == {3.0}


@pytest.mark.filterwarnings("ignore:microbatches. a hook:shoestring.errors.UnprovenWarning")
def test_folded_gradients_never_exist_together_and_the_peak_is_predicted() -> None:
    model = smooth()
    held = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: held.append(sum(q.grad is not None for q in model.parameters()))
        )
    own = OPTIMIZERS["adamw"](model.parameters())
    plan = [ss.Microbatching(4), FOLDED]
    predicted = predict_step(plan, smooth(), data(), loss=loss, optimizer="adamw").peak_bytes
    step = ss.apply(plan, model, own, loss=loss)
    step(data())
    assert max(held) == 1
    assert step.measure(data()).peak_bytes == pytest.approx(predicted, rel=0.01)


def test_folded_adam_is_certified_as_lossy_and_planned_by_name_only() -> None:
    model = smooth()
    given: dict[str, Any] = {"loss": loss, "optimizer": OPTIMIZERS["adamw"](model.parameters())}
    parts = [ss.Microbatching(4), FOLDED]
    found = ss.verify(parts, model, [data()], **given)
    assert found.ok and found["optimizer state"].claim is ss.Level.LOSSY
    assert found["gradients"].found <= ss.Level.ROUNDING
    assert 0 < found["optimizer state"].error < 2
    alone = ss.verify([FOLDED], model, [data()], **given)
    assert alone.ok and alone["parameters"].found is ss.Level.EQUAL


def test_other_optimizers_keep_the_sum() -> None:
    model = smooth()
    own = torch.optim.Adam(model.parameters(), amsgrad=True)
    kept = smooth()
    plain = torch.optim.Adam(kept.parameters(), amsgrad=True)
    for plan, one, by in (([FOLDED], model, own), ([], kept, plain)):
        step = ss.apply([ss.Microbatching(4), *plan], one, by, loss=loss)
        for number in range(2):
            step(data(number))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), kept.parameters(), strict=True)
    )
    with pytest.raises(InputError, match="cannot fold 'some'"):
        ss.GradientRelease(fold="some")
