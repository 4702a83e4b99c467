"""A step in somebody's own loop: accumulation, clipping, the norm, schedulers, saving."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.techniques.base import Setup
from shoestring.trace.batches import map_tensors
from shoestring.trace.split import cut
from techniques.small_models import SMALL

LOSSLESS: dict[str, list[ss.Technique]] = {
    "plain": [],
    "checkpointing": [ss.Checkpointing("residual-1")],
    "microbatching": [ss.Microbatching(2)],
    "compensated": [ss.Microbatching(2, accumulate="compensated")],
    "both": [ss.Checkpointing("residual-1"), ss.Microbatching(3)],
}
EXACT = ("plain", "checkpointing")


def built(name: str = "tied") -> tuple[nn.Module, torch.optim.Optimizer, Any, list[Any]]:
    torch.manual_seed(0)
    small = SMALL[name]
    model = small.build()
    for module in model.modules():  # each microbatch would draw masks of its own
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, small.loss, [small.batch() for _ in range(6)]


def plain_loop(clip: Any = None, name: str = "tied") -> tuple[nn.Module, list[float], list[float]]:
    """Two batches a step, as everybody writes it."""
    model, optimizer, loss, batches = built(name)
    losses, norms = [], []
    for number, batch in enumerate(batches):
        value = loss(model, batch)
        value.backward()
        losses.append(float(value.detach()))
        if number % 2:
            if clip is not None:
                norms.append(float(clip(model.parameters())))
            optimizer.step()
            optimizer.zero_grad()
    return model, losses, norms


def assert_same(a: nn.Module, b: nn.Module, exact: bool) -> None:
    for one, other in zip(a.parameters(), b.parameters(), strict=True):
        if exact:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chosen", LOSSLESS)
def test_accumulation_is_that_of_a_plain_loop(chosen: str) -> None:
    expected, losses, _ = plain_loop()
    model, optimizer, loss, batches = built()
    step = ss.apply(LOSSLESS[chosen], model, optimizer, loss=loss)
    found = [float(step(batch, update=bool(n % 2))) for n, batch in enumerate(batches)]
    assert found == losses if chosen in EXACT else found == pytest.approx(losses, rel=1e-5)
    assert_same(model, expected, chosen in EXACT)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("chosen", LOSSLESS)
def test_clipping_is_pytorchs_to_the_bit(chosen: str) -> None:
    def clip(parameters: Any) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(parameters, 0.1)

    expected, _, norms = plain_loop(clip)
    model, optimizer, loss, batches = built()
    step = ss.apply(LOSSLESS[chosen], model, optimizer, loss=loss, clip=0.1)
    found = []
    for number, batch in enumerate(batches):
        step(batch, update=bool(number % 2))
        if number % 2:
            assert step.grad_norm is not None
            found.append(float(step.grad_norm))
    assert min(found) > 0.1
    assert found == norms if chosen in EXACT else found == pytest.approx(norms, rel=1e-4)
    assert_same(model, expected, chosen in EXACT)


def test_values_are_clipped_as_pytorch_does() -> None:
    def clip(parameters: Any) -> float:
        nn.utils.clip_grad_value_(parameters, 0.01)
        return 0.0

    expected, _, _ = plain_loop(clip)
    model, optimizer, loss, batches = built()
    step = ss.apply([], model, optimizer, loss=loss, clip=ss.Clip(value=0.01))
    for number, batch in enumerate(batches):
        step(batch, update=bool(number % 2))
    assert step.grad_norm is None
    assert_same(model, expected, True)


@pytest.mark.parametrize("kind", [1.0, 2.0, math.inf])
def test_a_scaled_loss_has_the_norm_of_the_plain_one(kind: float) -> None:
    model, optimizer, loss, batches = built()
    plain = copy.deepcopy(model)
    loss(plain, batches[0]).backward()
    norm = float(nn.utils.get_total_norm([p.grad for p in plain.parameters()], kind))
    clip = ss.Clip(norm=norm / 3, norm_type=kind)
    step = ss.apply([ss.Precision("fp16")], model, optimizer, loss=loss, clip=clip)
    before = [p.detach().float() for p in model.parameters()]
    step(batches[0])
    assert step.loss_scale is not None and float(step.loss_scale) > 1000
    assert step.grad_norm is not None
    assert float(step.grad_norm) == pytest.approx(norm, rel=2e-2)
    moved = [(a - b) / 0.05 for a, b in zip(before, model.parameters(), strict=True)]
    assert float(nn.utils.get_total_norm(moved, kind)) == pytest.approx(norm / 3, rel=0.1)


@pytest.mark.parametrize("clip", [ss.Clip(norm=0.1), ss.Clip(value=0.1)])
def test_an_overflow_is_still_skipped_when_it_is_clipped(clip: ss.Clip) -> None:
    model, optimizer, loss, batches = built()
    chosen = [ss.Precision("fp16", initial_scale=2.0**24)]

    def large(model: nn.Module, batch: Any) -> torch.Tensor:
        return 2.0**12 * loss(model, batch)

    step = ss.apply(chosen, model, optimizer, loss=large, clip=clip)
    before = copy.deepcopy(model.state_dict())
    step(batches[0])
    assert all(torch.equal(before[name], held) for name, held in model.state_dict().items())
    assert step.loss_scale is not None and float(step.loss_scale) < 2.0**24


def test_update_and_zero_grad_by_hand() -> None:
    expected, _, _ = plain_loop()
    model, optimizer, loss, batches = built()
    step = ss.apply([], model, optimizer, loss=loss)
    with pytest.raises(ss.InputError, match="no gradients"):
        step.update()
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        step(first, update=False)
        step.zero_grad()
        assert step.accumulated == 0
        step(first, update=False)
        step(second, update=False)
        assert step.accumulated == 2
        assert step.why_not_captured == "gradients of several batches are accumulated"
        step.update()
    assert_same(model, expected, True)
    step(batches[0], update=False)
    optimizer.zero_grad()  # the user's own counts
    assert step.accumulated == 0
    assert step.why_not_captured == "the model is not on CUDA"


def test_gradients_of_a_backward_pass_before_it_are_added_to() -> None:
    """A penalty on the weights, say: as the plain loop adds them."""
    expected, _, _ = trained_with_penalty(None)
    model, _, step = trained_with_penalty([ss.Checkpointing("residual-1")])
    assert step is not None
    assert_same(model, expected, True)
    penalty(model).backward()
    with pytest.warns(RuntimeWarning, match=r"drops gradients .* update=False\) adds"):
        step(built()[3][0])


def penalty(model: nn.Module) -> torch.Tensor:
    return sum((p.square().sum() for p in model.parameters()), start=torch.zeros(()))


def trained_with_penalty(plan: Any) -> tuple[nn.Module, Any, ss.Step | None]:
    model, optimizer, loss, batches = built()
    step = None if plan is None else ss.apply(plan, model, optimizer, loss=loss)
    for batch in batches:
        penalty(model).backward()
        if step is not None:
            step(batch, update=False)
            step.update()
        else:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, step


def test_gradients_that_wait_are_not_saved() -> None:
    model, optimizer, loss, batches = built()
    step = ss.apply([], model, optimizer, loss=loss)
    step(batches[0], update=False)
    with pytest.raises(ss.InputError, match="no update was made"):
        step.state_dict()
    step(batches[1])
    step.load_state_dict(step.state_dict())


def test_a_failed_batch_says_what_is_lost_with_it() -> None:
    model, optimizer, loss, batches = built()
    step = ss.apply([], model, optimizer, loss=loss)
    step(batches[0], update=False)
    with pytest.raises(Exception) as caught:
        step(("no", "batch"))
    assert "gradients of 1 batch that were accumulated" in caught.value.__notes__[0]
    assert step.accumulated == 0


def test_out_of_memory_while_gradients_wait_is_no_silent_retry() -> None:
    model, optimizer, loss, batches = built()
    calls = 0

    def refusing(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("out of memory")
        return loss(model, batch)

    plan = ss.plan(model, batches[0], loss=loss, optimizer=optimizer, budget="1 GB")
    step = ss.apply(plan, model, optimizer, loss=refusing)
    step(batches[0], update=False)
    with pytest.raises(ss.BudgetError, match="gradients of 1 batch before it are lost"):
        step(batches[1])


def test_a_budget_is_watched_over_all_kinds_of_steps() -> None:
    """Also those without an update, once there is optimizer state."""
    model, optimizer, loss, batches = built()
    plan = ss.plan(model, batches[0], loss=loss, optimizer=optimizer, budget="1 GB")
    step = ss.apply(plan, model, optimizer, loss=loss)
    measured = []
    for number in range(8):
        step(batches[0], update=bool(number % 2))
        measured.append(step.measured)
    assert measured[1] is None and measured[2] is not None
    assert measured[3] is not measured[2]  # with an update, and gradients that waited
    assert measured[7] is measured[3]


def test_schedulers_go_on(recwarn: pytest.WarningsRecorder) -> None:
    model, optimizer, loss, batches = built()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.0)
    step = ss.apply([ss.Microbatching(2)], model, optimizer, loss=loss)
    step(batches[0], update=False)
    step(batches[1])
    scheduler.step()
    before = copy.deepcopy(model.state_dict())
    step(batches[2])
    assert all(torch.equal(before[name], held) for name, held in model.state_dict().items())
    assert not recwarn.list


@pytest.mark.parametrize(
    ("given", "told"),
    [(0.0, "norm of 0.0"), (-1, "norm of -1"), ("1", "norm of '1'"), (math.nan, "norm of nan")],
)
def test_what_cannot_be_clipped_to(given: Any, told: str) -> None:
    model, optimizer, loss, _ = built()
    with pytest.raises(ss.InputError, match=told):
        ss.apply([], model, optimizer, loss=loss, clip=given)
    with pytest.raises(ss.InputError, match="by norm or by value"):
        ss.Clip()


def test_gradients_that_do_not_wait_are_refused() -> None:
    class InBackward(ss.Technique):
        name = "in-backward"

        def apply(self, setup: Setup) -> None:
            setup.gradients_gone = "in-backward updates while the backward pass runs"

    model, optimizer, loss, batches = built()
    step = ss.apply([], model, optimizer, loss=loss)
    InBackward().apply(step._setup)
    with pytest.raises(ss.InputError, match=r"cannot be accumulated: in-backward updates"):
        step(batches[0], update=False)
    with pytest.raises(ss.InputError, match="cannot be clipped"):
        step.clip = 1.0
    step(batches[0])


def test_a_clip_may_change_between_steps() -> None:
    model, optimizer, loss, batches = built()
    step = ss.apply([], model, optimizer, loss=loss)
    step(batches[0])
    assert step.grad_norm is None
    step.clip = math.inf
    before = copy.deepcopy(model)
    step(batches[1])
    loss(before, batches[1]).backward()
    expected = nn.utils.get_total_norm([p.grad for p in before.parameters()])
    assert step.grad_norm is not None and torch.equal(step.grad_norm, expected)


def test_parts_of_a_batch_may_be_steps_of_their_own() -> None:
    """What the plan would cut, cut by hand: sums of means that are halved."""
    model, optimizer, loss, batches = built()
    twin, same, _, _ = built()

    def halved(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss(model, batch) / 2

    whole = ss.apply([ss.Microbatching(3)], model, optimizer, loss=loss)
    parts = ss.apply([], twin, same, loss=halved)
    for batch in batches[:2]:
        whole(batch)
        parts(cut(batch, 0, 3), update=False)
        parts(cut(batch, 3, 6))
    assert_same(model, twin, False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_step_clips_and_follows_a_schedule() -> None:
    """The norm of every replay is its own; accumulating steps between them run eagerly."""

    def trained(captured: bool) -> tuple[nn.Module, list[float], bool]:
        model, _, loss, batches = built()
        model.cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        step = ss.apply([], model, optimizer, loss=loss, clip=0.1)
        step.use_graph(captured)
        norms, was_captured = [], False
        for number in range(24):
            batch = map_tensors(lambda tensor: tensor.cuda(), batches[number % 6])
            step(batch, update=number not in (9, 10, 15))
            was_captured |= step.captured
            if step.grad_norm is not None:
                norms.append(float(step.grad_norm))
            scheduler.step()
        return model, norms, was_captured

    eager, expected, _ = trained(False)
    graph, found, was_captured = trained(True)
    assert was_captured
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(set(found)) > 12
    assert_same(graph, eager, False)
