"""`fit`: within the budget from the first step on, and what happens where it is not."""

import copy
import os
import subprocess
import sys
import textwrap
import warnings
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.errors import InputError
from shoestring.memory.live.measure import training_step
from shoestring.planning.fit import fit, fitted
from shoestring.planning.result import BudgetPlan
from shoestring.step.holding import out_of_memory
from shoestring.step.step import apply_alone
from techniques.small_models import SMALL

SOURCE = Path(__file__).parents[2] / "src"


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def residual() -> tuple[nn.Module, Any, Any]:
    """BatchNorm, so that a step taken back must take buffers back; dropout, so streams too."""
    torch.manual_seed(0)
    model = nn.Sequential(SMALL["residual"].build(), nn.Dropout(0.2))
    images, labels = SMALL["residual"].batch()
    return model, (images.repeat(4, 1, 1, 1), labels.repeat(4)), SMALL["residual"].loss


class Refusing:
    """A loss that finds no memory left, at some of its calls, after all modules ran."""

    def __init__(self, loss: Any, calls: set[int]) -> None:
        self.loss, self.calls, self.count = loss, calls, 0

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        value = self.loss(model, batch)
        if isinstance(value, torch._subclasses.FakeTensor):
            return value  # a prediction
        self.count += 1
        if self.count in self.calls:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return value


def half(model: nn.Module, batch: Any, loss: Any) -> int:
    peak = ss.measure(copy.deepcopy(model), batch, loss=loss, optimizer="sgd").peak_bytes
    return int(0.9 * peak)


def test_fit_is_plan_and_apply() -> None:
    model, batch, loss = residual()
    budget = half(model, batch, loss)
    step = fit(model, batch, loss=loss, optimizer=sgd(model), budget=budget, allow="lossless")
    assert isinstance(step.plan, ss.BudgetPlan) and step.plan.budget_bytes == budget
    step(batch)
    assert step.measured is None
    step(batch)  # has all state, and is followed
    assert step.measured is not None and 0 < step.measured.peak_bytes <= budget


def test_a_step_whose_update_has_begun_is_not_taken_back() -> None:
    """Fused kernels do not count as writing: the versions of weights do not tell."""
    model, batch, loss = residual()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = fit(model, batch, loss=loss, optimizer=optimizer, budget="1 GB", allow="lossless")
    whole = step._setup.update

    def breaks_off() -> None:
        whole()
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    step._setup.update = breaks_off
    with pytest.raises(ss.BudgetError, match="within the update"):
        step(batch)


def test_no_step_is_lost() -> None:
    """Out of memory twice: tighter plans, and what plain training leaves, to the bit."""
    model, batch, loss = residual()
    plain = copy.deepcopy(model)
    refusing = Refusing(loss, {2, 3})
    step = fit(
        model, batch, loss=refusing, optimizer=sgd(model), allow="lossless",
        budget=int(1.4 * half(model, batch, loss)),
    )  # fmt: skip
    first = step.plan
    refusing.count = 0  # the loss was tested
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        losses = [step(batch) for _ in range(4)]
    told = [str(w.message) for w in said if w.category is ss.BudgetWarning]
    assert len(told) == 2 and all("out of memory by the plan" in text for text in told)
    assert all(w.filename == __file__ for w in said if w.category is ss.BudgetWarning)
    assert isinstance(step.plan, ss.BudgetPlan) and isinstance(first, ss.BudgetPlan)
    assert step.plan.predicted.peak_bytes < first.predicted.peak_bytes
    assert step.plan.budget_bytes == first.budget_bytes
    torch.manual_seed(1)
    optimizer = sgd(plain)
    expected = [training_step(plain, batch, loss, optimizer) for _ in range(4)]
    assert torch.equal(torch.stack(losses), torch.stack(expected).detach())
    pairs = zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    momentum = zip(step.optimizer.state.values(), optimizer.state.values(), strict=True)
    assert all(torch.equal(a["momentum_buffer"], b["momentum_buffer"]) for a, b in momentum)


def test_a_step_that_passes_its_budget_says_so_and_tightens() -> None:
    """What no prediction can know: the loss keeps more with every step."""
    model, batch, loss = residual()
    budget = half(model, batch, loss)
    real: list[int] = []

    def growing(model: nn.Module, batch: Any) -> torch.Tensor:
        value = loss(model, batch)
        if isinstance(value, torch._subclasses.FakeTensor):
            return value
        real.append(1)
        extra = torch.ones(budget // 32, requires_grad=True)
        return value + 0 * (extra * extra).sum()

    step = fit(model, batch, loss=growing, optimizer=sgd(model), budget=budget, allow="lossless")
    before = step.plan
    step(batch)
    with pytest.warns(ss.BudgetWarning, match="more than its budget of"):
        step(batch)
    assert isinstance(before, ss.BudgetPlan) and isinstance(step.plan, ss.BudgetPlan)
    assert step.plan.predicted.peak_bytes < before.predicted.peak_bytes
    step(batch)


@pytest.mark.slow
def test_longer_batches_get_a_plan_of_their_own() -> None:
    """For the same budget: what fits them need not be lossier."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(50, 32), body, nn.Linear(32, 50))
    long = torch.randint(0, 50, (16, 32))
    batches = {n: as_tokenized(long[:, :n]) for n in (4, 32)}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        words = batch["words"]
        scores = model(words).flatten(0, 1)
        return nn.functional.cross_entropy(scores, words.flatten())

    plain = ss.measure(copy.deepcopy(model), batches[32], loss=loss, optimizer="adam").peak_bytes
    budget = int(0.7 * plain)
    step = fit(
        model,
        batches[4],
        loss=loss,
        optimizer=torch.optim.Adam(model.parameters()),
        budget=budget,
    )
    with pytest.warns(ss.BudgetWarning, match="more than its budget"):
        for length in (4, 4, 32, 32):
            step(batches[length])
    assert step.measure(batches[32]).peak_bytes <= budget
    assert isinstance(step.plan, BudgetPlan) and step.plan.kind == "lossless"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (4, 32, 4, 32):
            step(batches[length])


def as_tokenized(words: torch.Tensor) -> Any:
    """As a tokenizer returns it: a mapping that pytree does not open."""
    return UserDict(words=words)


def test_a_planned_step_out_of_memory_did_not_happen() -> None:
    """Without fit there is nobody to tighten: an error with numbers, and all is as before."""
    model, batch, loss = residual()
    refusing, optimizer = Refusing(loss, {2}), sgd(model)
    plan = ss.plan(
        model, batch, loss=loss, optimizer=optimizer, budget=half(model, batch, loss),
        allow="lossless",
    )  # fmt: skip
    step = ss.apply(plan, model, optimizer, loss=refusing)
    step(batch)
    before = copy.deepcopy(model.state_dict())
    stream = torch.get_rng_state()
    with pytest.raises(ss.BudgetError, match=r"predicted .* for a budget of .* did not happen"):
        step(batch)
    pairs = zip(model.state_dict().values(), before.values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(p.grad is None for p in model.parameters())
    step(batch)


@pytest.mark.slow
def test_nothing_tighter_is_left() -> None:
    model, batch, loss = residual()
    refusing = Refusing(loss, set(range(2, 99)))
    optimizer = sgd(model)
    step = fit(
        model, batch, loss=refusing, optimizer=optimizer, budget=half(model, batch, loss),
        allow="lossless",
    )  # fmt: skip
    step(batch)
    with pytest.warns(ss.BudgetWarning), pytest.raises(ss.BudgetError, match="nothing tighter"):
        step(batch)


def test_a_precision_can_be_added_but_not_changed() -> None:
    model, batch, loss = residual()
    step = ss.apply([ss.Checkpointing("residual-1")], model, sgd(model), loss=loss)
    step(batch)
    plan = ss.Plan.of([ss.Precision("fp16"), ss.Microbatching(6)])
    step.revise(plan)
    step(batch)
    assert step.plan == plan
    assert next(model.parameters()).dtype is torch.float16
    with pytest.raises(InputError, match="cannot change"):
        step.revise(ss.Plan.of([ss.Precision("bf16")]))
    step.revise(ss.Plan.of([ss.Precision("fp16"), ss.Checkpointing("no-bn")]))
    assert torch.isfinite(step(batch))


@pytest.mark.parametrize(
    "error, expected",
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error: Exception, expected: bool) -> None:
    assert out_of_memory(error) is expected
    wrapped = InputError("the model failed")
    wrapped.__cause__ = error
    assert out_of_memory(wrapped) is expected


def test_only_cuda_enforces() -> None:
    model, batch, loss = residual()
    with pytest.raises(InputError, match="only CUDA"):
        fit(model, batch, loss=loss, optimizer=sgd(model), budget="1 GB", enforce=True)


LIMITED = """
    import resource, sys, warnings
    import torch
    import shoestring as ss
    from shoestring.memory.live.measure import training_step
    from shoestring.lab.models import builtin

    # Large blocks come from the kernel and go back to it, so the limit counts what is live.
    known = builtin("wrn-16-2")
    torch.manual_seed(0)
    model, batch = known.build(), known.batch(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given = dict(loss=known.loss, optimizer=optimizer)
    plain = ss.profile(model, batch, accounting="device", **given).peak_bytes
    small = known.batch(2)
    if sys.argv[1] == "plain":
        step = lambda batch: training_step(model, batch, **given)
    elif sys.argv[1] == "plan":
        plan = ss.plan(model, batch, budget=int(0.6 * plain), allow="lossless", **given)
        step = ss.apply(plan.plan, model, optimizer, loss=known.loss)
    else:
        step = ss.fit(model, batch, budget=int(0.9 * plain), allow="lossless", **given)
    for _ in range(2):
        step(small)
    used = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
    limit = used + int(0.72 * plain)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step(batch)
    print("done", len([w for w in said if w.category is ss.BudgetWarning]))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "plan", "fit"])
def test_under_a_limit_of_the_kernel(how: str) -> None:
    """RLIMIT_DATA at 0.72 of the plain peak: plain training fails, a plan for 0.6 runs, and fit,
    which planned for 0.9, tightens until it does."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED), how],
        env={
            **os.environ,
            "PYTHONPATH": str(SOURCE),
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_ARENA_MAX": "1",
        },
        capture_output=True,
        text=True,
    )
    if how == "plain":
        assert done.returncode != 0 and "allocate memory" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    word, warned = done.stdout.split()
    assert word == "done" and (int(warned) > 0) == (how == "fit")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_enforced_on_cuda() -> None:
    model, batch, loss = residual()
    model.cuda()
    # Large beside the allocator's segments of 20 MiB, of which it gives out whole ones.
    data = tuple(t.repeat(256, *[1] * (t.dim() - 1)).cuda() for t in batch)
    plain = ss.measure(copy.deepcopy(model), data, loss=loss, optimizer="sgd").peak_bytes
    torch.cuda.empty_cache()
    budget = int(0.9 * plain)
    try:
        step = fit(model, data, loss=loss, optimizer=sgd(model), budget=budget, enforce=True)
        torch.cuda.reset_peak_memory_stats()
        with warnings.catch_warnings():  # it may have no room for a graph, and says so
            warnings.filterwarnings("ignore", "the step is not captured", RuntimeWarning)
            losses = [float(step(data)) for _ in range(4)]
        assert torch.cuda.max_memory_reserved() <= budget < plain
        assert losses[-1] < losses[0]
        with pytest.raises(torch.cuda.OutOfMemoryError):  # the allocator gives out no more
            torch.empty(budget, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def waiting(budget_bytes: int) -> tuple[BudgetPlan, int]:
    """A plan for a loop that adds gradients of two batches, and what its second batch takes."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)]
    model = nn.Sequential(*layers)
    batch = torch.randn(128, 64), torch.randn(128, 64)
    optimizer, loss = sgd(model), lambda m, b: (m(b[0]) - b[1]).square().mean()
    step = fitted(
        model, batch, loss=loss, optimizer=optimizer, budget_bytes=budget_bytes, allow="lossless",
        made=lambda plan: apply_alone(plan, model, optimizer, loss=loss), waiting=True,
        among=lambda s: not any(t.updates_in_backward for t in s.techniques),
    )  # fmt: skip
    step._hold = None
    step(batch)
    step(batch, update=False)
    assert isinstance(step.plan, BudgetPlan)
    return step.plan, step.measure(batch).peak_bytes


@pytest.mark.parametrize("share", [1.2, 0.8, 0.6])
def test_gradients_that_wait_for_another_batch_are_predicted(share: float) -> None:
    """They are there through its passes; in the update, or beside microbatches, they are anyway."""
    plain, peak = waiting(10**9)
    assert plain.predicted.peak_bytes == plain.plain.peak_bytes == pytest.approx(peak, abs=64)
    plan, peak = waiting(int(share * peak))
    assert plan.predicted.peak_bytes == pytest.approx(peak, abs=64)
    assert peak <= share * plain.plain.peak_bytes
