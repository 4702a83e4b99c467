"""Optimizer state on the host: in files beside the CPU, streamed beside a GPU."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.errors import InputError, NoEffectWarning
from shoestring.step.predict import predict_step
from shoestring.step.trace_step import trace_plan
from shoestring.techniques import host
from shoestring.techniques import offload as technique
from shoestring.techniques.base import Setup
from shoestring.techniques.host import _pinned, folder_for, in_memory
from shoestring.techniques.offload.link import buffer_sizes, chunk_bytes
from shoestring.techniques.offload.state import OffloadedEntries, OffloadedState
from shoestring.trace.places import is_elsewhere

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "dampened": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}
OFFLOAD = ss.Offload(smallest=1)


@pytest.fixture(params=["mapped", "streamed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As beside the CPU; and as beside a GPU, copies made at once."""
    if request.param == "streamed":
        monkeypatch.setattr(technique, "on_cuda", lambda tensor: True)
        monkeypatch.setattr(technique.update, "chunk_bytes", lambda parameters: 40_000)
    return str(request.param)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(48, 48) for _ in range(6)))


def data(seed: int = 1) -> torch.Tensor:
    return torch.randn(16, 48, generator=torch.Generator().manual_seed(seed))


def loss(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    return (model(given) - given).square().mean()


def made(name: str, *plan: ss.Technique) -> ss.Step:
    model = network()
    groups = [
        {"params": list(model.parameters())[:5]},
        {"params": list(model.parameters())[5:], "lr": 2e-3},
    ]
    return ss.apply(plan, model, OPTIMIZERS[name](groups), loss=loss)


def trained(name: str, *plan: ss.Technique, steps: int = 3) -> ss.Step:
    step = made(name, *plan)
    for number in range(steps):
        step(data(number))
    return step


def everything(step: ss.Step) -> list[torch.Tensor]:
    tensors = [p.detach() for p in step.model.parameters()]
    for parameter in step.model.parameters():
        held = step.optimizer.state[parameter]
        tensors += [held[key] for key in sorted(held) if isinstance(held[key], torch.Tensor)]
    return tensors


def equal(one: ss.Step, other: ss.Step) -> bool:
    pairs = list(zip(everything(one), everything(other), strict=True))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "others",
    [(), (ss.Microbatching(4),), (ss.GradientRelease(),), (ss.Checkpointing("every-2"),)],
    ids=["alone", "parts", "released", "recomputed"],
)
def test_no_bit_differs(name: str, others: tuple[ss.Technique, ...], way: str) -> None:
    if name in ("rmsprop", "adagrad") and isinstance((*others, None)[0], ss.GradientRelease):
        pytest.skip("its gradients are not released")
    plain, there = trained(name, *others), trained(name, *others, OFFLOAD)
    assert equal(plain, there)
    state = there.optimizer.state
    assert isinstance(state, OffloadedState)
    assert all(is_elsewhere(t) for s in state.values() for t in s.values() if t.dim())


@pytest.mark.parametrize("other", [ss.OptimizerState(8, smallest=1), ss.Precision("bf16")], ids=str)
def test_few_bits_in_files_are_equal(other: ss.Technique) -> None:
    """The update is the whole one, so the same random bits are drawn."""
    assert equal(trained("adamw", other), trained("adamw", other, OFFLOAD))


def test_fp16_skips_as_one_in_files_and_is_refused_where_state_is_streamed(way: str) -> None:
    fp16 = ss.Precision("fp16")
    if way == "mapped":
        assert equal(trained("sgd", fp16), trained("sgd", fp16, OFFLOAD))
        return
    with pytest.raises(InputError, match="before a loss scale has seen all"):
        trained("sgd", fp16, OFFLOAD)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize(
    "others",
    [(), (ss.GradientRelease(),), (ss.OptimizerState(8, smallest=1),)],
    ids=["alone", "released", "8 bits"],
)
def test_the_predicted_peak_is_measured(
    name: str, others: tuple[ss.Technique, ...], way: str
) -> None:
    model, plan = network(), [*others, OFFLOAD]
    own = OPTIMIZERS[name](model.parameters())
    predicted = predict_step(plan, model, data(), loss=loss, optimizer=own).peak_bytes
    step = trained(name, *plan)
    measured = step.measure(data()).peak_bytes
    assert measured == pytest.approx(predicted, rel=0.01)
    if way == "mapped":
        assert measured < 0.95 * trained(name, *others).measure(data()).peak_bytes


def test_it_is_certified_as_equal(way: str) -> None:
    model = network()
    own = OPTIMIZERS["adamw"](model.parameters())
    found = ss.verify([OFFLOAD], model, [data()], loss=loss, optimizer=own)
    assert found.ok, found
    compared = ("loss", "gradients", "optimizer state", "parameters")
    assert {found[what].found for what in compared} == {ss.Level.EQUAL}


def test_hooks_of_the_step_see_all_gradients_once(way: str) -> None:
    """A user's clipping by the norm of all, in a hook of the optimizer's step."""

    def clipped(*plan: ss.Technique) -> tuple[ss.Step, list[int]]:
        step, seen = made("sgd", *plan), []

        def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(held, 0.01)
            seen.append(len(held))

        step.optimizer.register_step_pre_hook(clip)
        step.optimizer.register_step_post_hook(lambda *_: seen.append(0))
        for number in range(3):
            step(data(number))
        return step, seen

    (plain, expected), (there, found) = clipped(), clipped(OFFLOAD)
    assert found == expected == [12, 0] * 3
    assert equal(plain, there)


PART = ss.Offload(smallest=1, share=0.4)


@pytest.mark.parametrize("others", [(), (ss.GradientRelease(),)], ids=["alone", "released"])
@pytest.mark.parametrize("bits", [None, 8])
def test_a_part_of_the_state_leaves(
    others: tuple[ss.Technique, ...], bits: int | None, way: str
) -> None:
    """No bit differs, and a snapshot is loaded to where each tensor belongs."""
    few = () if bits is None or way == "streamed" else (ss.OptimizerState(bits, smallest=1),)
    plain, there = trained("adamw", *others, *few), trained("adamw", *others, *few, PART)
    assert equal(plain, there)
    for step in (there, trained("adamw", *others, *few, PART, steps=1)):
        step.load_state_dict(copy.deepcopy(plain.state_dict()))
        held = [step.optimizer.state[p]["exp_avg"] for p in step.model.parameters()]
        moved = [t.numel() for t in held if is_elsewhere(t)]
        assert 0.4 <= sum(moved) / sum(t.numel() for t in held) < 0.6
        step(data(9))
    plain(data(9))
    assert equal(plain, step)


def test_what_leaves_is_small_beside_the_buffers_and_evenly_apart() -> None:
    which = technique.link.which_move
    assert which([4, 4, 4, 4], 1.0) == {0, 1, 2, 3}
    assert which([], 0.5) == frozenset()
    blocks = [1000, *[1, 10, 10] * 100]
    chosen = which(blocks, 0.25)
    assert {blocks[n] for n in chosen} == {10}
    assert sum(blocks[n] for n in chosen) == pytest.approx(0.25 * sum(blocks), abs=10)
    apart = [b - a for a, b in itertools.pairwise(sorted(chosen))]
    assert max(apart) <= 6
    assert which([1000, 10], 0.9) == {0, 1}  # nothing small is enough


def test_rows_of_a_rank_count_as_their_whole_tensor() -> None:
    """So that all ranks let the same tensors go, and small rows do not stay."""
    rows = nn.Linear(8, 8).weight
    assert ss.Offload(smallest=100)._leaving([rows]) == []
    rows.whole_elements = 128  # type: ignore[attr-defined]
    assert ss.Offload(smallest=100)._leaving([rows])[0] is rows


def test_snapshots_resume_to_the_bit(tmp_path: Path, way: str) -> None:
    """By the same plan and by a plain step; what was saved does not follow the training."""
    whole = trained("adamw", OFFLOAD, steps=4)
    half = trained("adamw", OFFLOAD, steps=2)
    torch.save(half.state_dict(), tmp_path / "snapshot.pt")
    for plan in ((OFFLOAD,), ()):
        on = trained("adamw", *plan, steps=1)
        on.load_state_dict(torch.load(tmp_path / "snapshot.pt"))
        for number in (2, 3):
            on(data(number))
        assert equal(whole, on)
        if plan:
            assert all(is_elsewhere(s["exp_avg"]) for s in on.optimizer.state.values())


def test_nothing_of_the_state_of_before_is_kept_once_another_was_loaded() -> None:
    step = trained("adamw", OFFLOAD, steps=2)
    old = weakref.ref(step.optimizer.state)
    step.load_state_dict(copy.deepcopy(step.state_dict()))
    gc.collect()
    assert old() is None


def test_a_loaded_state_is_a_copy(way: str) -> None:
    one, other = trained("adamw", OFFLOAD, steps=2), trained("adamw", OFFLOAD, steps=1)
    other.load_state_dict(one.state_dict())
    before = [t.clone() for t in everything(one)]
    other(data(2))
    assert all(torch.equal(a, b) for a, b in zip(before, everything(one), strict=True))


def test_what_was_fetched_ahead_is_not_used_once_the_state_was_changed(way: str) -> None:
    """Released gradients let the first chunk of a step come in while nobody looks."""
    plans = [(ss.GradientRelease(),), (ss.GradientRelease(), OFFLOAD)]
    ended = []
    for plan in plans:
        step = trained("adamw", *plan)
        saved = copy.deepcopy(step.state_dict())
        step(data(7))
        step.load_state_dict(saved)
        step(data(8))
        for parameter in step.model.parameters():
            step.optimizer.state[parameter]["exp_avg"].zero_()
        step(data(9))
        ended.append(step)
    assert equal(*ended)


def test_a_chunk_that_was_fetched_with_more_parameters_than_are_updated(way: str) -> None:
    """An update of all gradients has other chunks than those that the backward pass asks for."""
    ended = []
    for plan in [(ss.GradientRelease(),), (ss.GradientRelease(), OFFLOAD)]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(48, 48, bias=False) for _ in range(9)))
        backward = list(model.parameters())[::-1]  # as the backward pass comes by
        step = ss.apply(plan, model, OPTIMIZERS["adamw"](backward), loss=loss)
        for number in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1)
            step._setup.update()
            step._drop_gradients()
            step(data(number))
        ended.append(step)
    assert equal(*ended)


@pytest.mark.parametrize("biased", [True, False])
def test_released_updates_may_begin_with_the_only_state_there_is(
    biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No buffer was made for it: it came with the last update of the first step."""
    monkeypatch.setattr(technique, "on_cuda", lambda tensor: True)
    found = []
    for plan in ([ss.GradientRelease()], [ss.GradientRelease(), ss.Offload(smallest=2000)]):
        torch.manual_seed(0)
        model = nn.Linear(48, 48, bias=biased)
        own = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        step = ss.apply(plan, model, own, loss=loss)
        for number in range(3):
            step(data(number))
        found.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_is_packed_stays_packed() -> None:
    """A step count that stays on the device is no reason to pack all state again."""
    there = torch.zeros(8)
    entries = OffloadedEntries(lambda value: value, {"exp_avg": there, "step": torch.zeros(())})
    entries.flat = packed = torch.zeros(32, dtype=torch.uint8)
    here = torch.ones(8)
    entries.enter({"exp_avg": (here, there)})
    entries["step"].add_(1)
    [(copied, place)] = entries.leave()
    assert entries.flat is packed and copied is here and place is there
    assert entries["exp_avg"] is there and entries["step"] == 1
    entries.enter({"exp_avg": (here, there)})
    entries["exp_avg"] = torch.ones(8)  # another tensor, which must be packed anew
    assert entries.leave() == [] and entries.flat is None


def test_state_there_is_already_is_moved(way: str) -> None:
    model = network()
    own = OPTIMIZERS["adamw"](model.parameters())
    ss.apply([], model, own, loss=loss)(data(0))
    step = ss.apply([OFFLOAD], model, own, loss=loss)
    assert all(is_elsewhere(s["exp_avg"]) for s in own.state.values())
    for number in (1, 2):
        step(data(number))
    expected = network()
    plain = ss.apply([], expected, OPTIMIZERS["adamw"](expected.parameters()), loss=loss)
    for number in range(3):
        plain(data(number))
    assert equal(plain, step)


def test_copies_and_pickles_are_plain() -> None:
    step = trained("adamw", OFFLOAD)
    for copied in (
        copy.deepcopy(step.optimizer).state,
        pickle.loads(pickle.dumps(step.optimizer.state_dict()))["state"],
    ):
        assert not isinstance(copied, OffloadedState)
        assert all(type(entries) is dict for entries in copied.values())
        assert not any(is_elsewhere(s["exp_avg"]) for s in copied.values())


def test_buffers_hold_any_tensor_and_most_of_them() -> None:
    """As of a model with a large embedding: its state must not be there twice."""
    mib = 2**20
    sizes = technique.update.buffer_sizes
    assert sizes([], mib) == () == sizes([0, 0], mib)
    assert sizes([mib, 2 * mib], 64 * mib) == (3 * mib, 3 * mib)
    assert sizes([1000 * mib, 1000 * mib, *[120 * mib] * 90, *[4 * mib] * 90], 64 * mib) == (
        1000 * mib, 120 * mib
    )  # fmt: skip


def test_buffers_are_small_beside_the_state_of_a_small_model() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(20)))
    optimizer = torch.optim.AdamW(model.parameters())
    plan = [ss.GradientRelease(), ss.FusedUpdate()]

    def peak(*more: ss.Technique) -> int:
        about: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "device": "cuda"}
        return predict_step([*plan, *more], model, torch.randn(8, 512), **about).peak_bytes

    state = 8 * sum(p.numel() for p in model.parameters())
    assert peak() - peak(ss.Offload()) > 0.8 * state


@pytest.mark.parametrize("released", [False, True])
def test_tensors_of_very_different_sizes_are_streamed(
    released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones ahead of a large one, a large one after a large one."""
    monkeypatch.setattr(technique, "on_cuda", lambda tensor: True)
    monkeypatch.setattr(technique.update, "chunk_bytes", lambda parameters: 2000)
    others = [ss.GradientRelease()] * released

    def run(*plan: ss.Technique) -> ss.Step:
        torch.manual_seed(0)
        widths = [48, 16, 8, 200, 200, 8, 48]
        model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
        own = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = ss.apply([*others, *plan], model, own, loss=loss)
        for number in range(4):
            step(data(number))
        return step

    assert equal(run(), run(OFFLOAD))


@pytest.mark.parametrize("released", [False, True])
def test_a_captured_step_copies_the_same(way: str, released: bool) -> None:
    """Each step as while it is captured, and as if it was replayed before the last one."""
    if way == "mapped":
        pytest.skip("no graph beside the CPU")

    def run(*plan: ss.Technique) -> ss.Step:
        model = network()
        own = torch.optim.AdamW(model.parameters(), lr=1e-2)
        given = [ss.GradientRelease()] * released
        step = ss.apply([*given, *plan], model, own, loss=loss)
        for number in range(5):
            setup = step._setup
            for call in setup.before_graph:
                call()
            with ExitStack() as stack:
                for around in setup.in_capture if number > 1 else ():
                    stack.enter_context(around())
                step(data(number))
        assert len(step._setup.in_capture) == bool(plan)
        return step

    assert equal(run(), run(OFFLOAD))


def test_buffers_that_a_graph_copies_into_stay_when_more_state_comes(way: str) -> None:
    """An expert that the captured step did not use, and that an eager one trains."""
    if way == "mapped":
        pytest.skip("no graph beside the CPU")
    model = nn.ModuleList([nn.Linear(48, 48), nn.Linear(480, 480)])
    own = torch.optim.AdamW(model.parameters())
    step = ss.apply(
        [ss.GradientRelease(), OFFLOAD], model, own,
        loss=lambda model, given: model[given.shape[1] > 48](given).square().mean(),
    )  # fmt: skip
    step(data())
    with step._setup.in_capture[0]():
        step(data())
    update = step._setup.before_graph[0].__self__  # type: ignore[attr-defined]
    link = update._link
    buffers = [buffer.data_ptr() for buffer in link._buffers]
    step(torch.randn(4, 480))
    assert buffers and update._link is not link
    assert [buffer.data_ptr() for buffer in link._buffers] == buffers


@pytest.mark.parametrize(("plan", "captured"), [
    ([ss.Offload()], False), ([ss.Offload(), ss.FusedUpdate()], True),
    ([ss.Offload(), ss.OptimizerState(8), ss.GradientRelease()], True),
])  # fmt: skip
def test_a_step_with_state_on_the_host_is_predicted_as_a_graph(
    plan: list[ss.Technique], captured: bool
) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    given: dict[str, Any] = {"loss": loss, "optimizer": torch.optim.AdamW(model.parameters())}
    trace = trace_plan(ss.Plan(plan), model, torch.randn(8, 512), device="cuda", **given)
    assert trace.capturable == captured


# -- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("released", [False, True])
def test_on_a_gpu_state_is_streamed_to_the_bit(released: bool, captured: bool) -> None:
    """Chunks of one and of several tensors; read right after a step, before anything waited.

    As a graph, with eager steps of another shape between its replays.
    """
    others = [ss.GradientRelease()] * released

    def run(*plan: ss.Technique) -> tuple[ss.Step, int]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12))).cuda()
        own = torch.optim.AdamW(model.parameters(), lr=1e-4)
        step = ss.apply([ss.FusedUpdate(), *others, *plan], model, own, loss=loss)
        step.use_graph(captured)
        x = torch.randn(64, 2048, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        for size in (64, 64, 64, 64, 32, 64, 64):
            step(x[:size])
            assert step.captured or not captured or size == 32 or step._updates < 2
        return step, step.measure(x).peak_bytes

    (plain, resident_bytes), (there, peak_bytes) = run(), run(ss.Offload())
    assert there.captured == captured, there.why_not_captured
    for a, b in zip(plain.model.parameters(), there.model.parameters(), strict=True):
        held = there.optimizer.state[b]
        assert torch.equal(a, b)
        for key in ("exp_avg", "exp_avg_sq"):
            assert held[key].is_pinned() == (b.numel() >= 4096)
            assert torch.equal(plain.optimizer.state[a][key].cpu(), held[key].cpu())
    assert peak_bytes < resident_bytes - 0.4 * 12 * 8 * 2048**2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_on_a_gpu_a_part_of_the_state_is_captured_loaded_and_left(kind: str) -> None:
    """Sizes of the first step are guesses; copies are on their way when a state goes, or all."""
    ended = []
    for plan in ([ss.GradientRelease()], [ss.GradientRelease(), ss.Offload(share=0.5)]):
        for _ in range(2):  # what the first one leaves must not be written over the second
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()
            own = OPTIMIZERS[kind](model.parameters())
            step = ss.apply([ss.FusedUpdate(), *plan], model, own, loss=loss)
            x = torch.randn(64, 2048, device="cuda", generator=torch.Generator("cuda"))
            for _ in range(5):
                step(x)
            assert step.captured, step.why_not_captured
            saved = copy.deepcopy(step.state_dict())
            for _ in range(3):
                step(x)
            step.load_state_dict(saved)
            for _ in range(3):
                step(x)
            weights = [p.detach().clone() for p in model.parameters()]
            del step, own, model
        ended.append(weights)
    assert all(torch.equal(a, b) for a, b in zip(*ended, strict=True))


# -- limits ------------------------------------------------------------------------------------


LIMITED = """
import hashlib, resource, sys, torch, shoestring as ss
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(32)))
plan = [ss.GradientRelease(), *([ss.Offload()] if "offload" in sys.argv else [])]
plan += [ss.WeightOffload()] if "weights" in sys.argv else []
own = torch.optim.AdamW(model.parameters())
step = ss.apply(plan, model, own, loss=lambda model, x: (model(x) - x).square().mean())
if "limit" in sys.argv:
    data = next(line for line in open("/proc/self/status") if line.startswith("VmData"))
    limit = int(data.split()[1]) * 1024 + 40_000_000
    bytes_each = 12 if "weights" in sys.argv else 16
    assert limit < bytes_each * sum(p.numel() for p in model.parameters())
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
x = torch.randn(4, 1024)
try:
    for _ in range(2):
        step(x)
except RuntimeError as error:
    print("can't allocate memory" in str(error) and "no memory")
    sys.exit()
found = hashlib.sha256()
for p in model.parameters():
    for tensor in (p.detach(), *own.state[p].values()):
        found.update(tensor.numpy().tobytes())
print(found.hexdigest())
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are Linux's")
def test_state_larger_than_the_memory_of_the_process(tmp_path: Path) -> None:
    """537 MB of weights, gradients and moments in a process that may have 445 MB of all; 403 MB of
    weights and moments in one that may have less."""

    def run(*words: str) -> str:
        # A fixed threshold: glibc's own grows, and leaves gaps in the heap that count as used.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, *words], capture_output=True, text=True,
            env={**environment, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert run("limit") == "no memory"
    expected = run()
    assert run("limit", "offload") == expected
    assert run("limit", "offload", "weights") == expected


FULL = """
import resource, sys, warnings, torch, shoestring as ss
from torch import nn
from shoestring.trace.places import is_elsewhere
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 500))
own = torch.optim.AdamW(model.parameters(), lr=1e-2)
loss = lambda model, x: model(x).square().mean()
step = ss.apply([ss.Offload(smallest=1)], model, own, loss=loss)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
x = torch.ones(4, 48)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(3):
        step(x)
torch.manual_seed(0)
other = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 500))
plain = ss.apply([], other, torch.optim.AdamW(other.parameters(), lr=1e-2), loss=loss)
for _ in range(3):
    plain(x)
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
there = [is_elsewhere(own.state[p]["exp_avg"]) for p in model.parameters()]
print(len(said), there, said[0].message)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are Linux's")
def test_a_disk_that_fills_loses_nothing(tmp_path: Path) -> None:
    """A file may have 50 kB, as if the disk had no more: the rest stays in memory and trains."""
    done = subprocess.run(
        [sys.executable, "-c", FULL], capture_output=True, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.stdout.startswith("1 [True, True, False, False] offload: "), done.stderr
    assert done.stdout.count("\n") == 1 and "stay where they are" in done.stdout


def test_no_room_is_said_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 kB, where Adam needs more."""
    usage = host.shutil.disk_usage
    model = network()
    own = OPTIMIZERS["adamw"](model.parameters())
    monkeypatch.setattr(host.shutil, "disk_usage", lambda f: usage(f)._replace(free=20_000))
    with pytest.raises(InputError, match=r"112\.9 KB has no room: the disk of .* has 20\.0 KB"):
        ss.apply([OFFLOAD], model, own, loss=loss)
    assert not own.state and not isinstance(own.state, OffloadedState)


def test_a_model_that_is_planned_elsewhere_asks_nothing_of_this_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = host.shutil.disk_usage
    monkeypatch.setattr(host.shutil, "disk_usage", lambda f: usage(f)._replace(free=1000))
    model = network().to("meta")
    setup = Setup(
        model, _adamw(model), lambda b: b, lambda b: (), lambda v: None, lambda: None
    )  # fmt: skip
    OFFLOAD.check(setup)


def _host(folder: Path, monkeypatch: pytest.MonkeyPatch, free_kb: int, limit: str = "max") -> None:
    """A host with so much memory, and a limit of the process's group, of which 1 GiB is used."""
    (folder / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {free_kb} kB\n")
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{2**30}\n")
    (folder / "memory.stat").write_text("anon 5\ninactive_file 4096\n")
    monkeypatch.setattr(host, "_MEMORY", folder / "meminfo")
    monkeypatch.setattr(host, "_GROUP", folder)


def test_memory_that_is_left_is_that_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _host(tmp_path, monkeypatch, 8 * 2**20)
    assert host.available_bytes() == 8 * 2**30
    _host(tmp_path, monkeypatch, 8 * 2**20, limit=str(3 * 2**30))
    assert host.available_bytes() == 2 * 2**30 + 4096


def test_pinned_memory_is_refused_before_the_host_has_none_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch takes powers of two; what it keeps of an earlier plan is given back first."""
    assert [host.pinned_size(n) for n in (0, 1, 512, 513)] == [0, 1, 512, 1024]
    _host(tmp_path, monkeypatch, 3 * 2**20)
    host.check_pinned(2**31)
    with pytest.raises(OSError, match=r"the host has 3\.2 GB of memory left"):
        host.check_pinned(2**31 + 1)
    more = lambda: _host(tmp_path, monkeypatch, 6 * 2**20)  # noqa: E731
    monkeypatch.setattr(host, "free_idle_pinned_memory", more)
    host.check_pinned(2**31 + 1)


def test_state_for_which_the_host_has_no_memory_stays_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a disk that fills: nothing is lost, and it is said."""
    _host(tmp_path, monkeypatch, 2**20)
    state = OffloadedState(str(tmp_path), 1)
    value = torch.ones(8)
    assert state.place(value, pinned=True) is value
    with pytest.warns(RuntimeWarning, match="stay where they are: the host has 1.1 GB"):
        state.warn()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is pinned memory")
def test_a_pinned_allocation_that_fails_is_no_room() -> None:
    """Without a GPU every one does."""
    with pytest.raises(OSError, match="no pinned memory: "):
        _pinned(torch.zeros(3))


def test_folders(tmp_path: Path) -> None:
    assert folder_for(str(tmp_path)) == str(tmp_path)
    with pytest.raises(InputError, match="cannot write into the folder"):
        ss.apply([ss.Offload(folder="/nowhere")], m := network(), _adamw(m), loss=loss)
    if os.path.isdir("/dev/shm") and in_memory("/dev/shm"):
        with pytest.raises(InputError, match="lies in memory"):
            ss.apply([ss.Offload(folder="/dev/shm")], m := network(), _adamw(m), loss=loss)


def test_no_disk_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where temporary files lie in memory, and nothing else was given."""
    monkeypatch.setattr(host, "in_memory", lambda folder: True)
    with pytest.raises(InputError, match="lies in memory: nothing would be saved"):
        ss.apply([OFFLOAD], m := network(), _adamw(m), loss=loss)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"what": "weights"}, "cannot offload 'weights'"),
        ({"smallest": 0}, "not a whole number"),
        ({"share": 0}, "cannot offload a share of 0"),
    ],
)
def test_bad_settings(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ss.Offload(**given)


def test_what_it_cannot_do_is_refused() -> None:
    model = network()
    with pytest.raises(InputError, match="the updates of Adafactor"):
        ss.apply([OFFLOAD], model, torch.optim.Adafactor(model.parameters()), loss=loss)
    with pytest.raises(InputError, match="sparsity moves"):
        ss.apply([OFFLOAD, ss.Sparsity(0.5)], model, _adamw(model), loss=loss)
    with pytest.warns(NoEffectWarning, match="keeps no state"):
        ss.apply([OFFLOAD], model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)


# -- plans -------------------------------------------------------------------------------------


def test_a_plan_offloads_before_it_rounds_and_says_what_is_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ss.WeightOffload, "offers", classmethod(lambda cls, context: ()))
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    given: dict[str, Any] = {"loss": loss, "optimizer": "adamw"}
    x = torch.randn(4, 256)
    plan = ss.plan(model, x, budget="4.9 MB", allow="exact", **given)
    assert "offload" in [t.name for t in plan.techniques]
    assert plan.predicted.link_bytes == pytest.approx(8 * 2 * 4 * 256**2, rel=1e-3)
    assert plan.predicted.hidden_seconds == 0
    assert "4.2 MB copied from the host and back, 4.19 ms, 0% of it hidden" in str(plan)
    step = ss.apply(plan, model, torch.optim.AdamW(model.parameters()), loss=loss)
    step(x)
    assert step.measure(x).peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.01)


def test_a_plan_for_a_gpu_hides_the_link_under_the_backward_pass() -> None:
    """Of a part of 268 MB of moments, what the passes and the update leave; 35 GB/s where both ways
    are in use at once."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)))
    x = torch.randn(512, 2048)
    plan = ss.plan(
        model, x, loss=loss, optimizer="adamw", budget="500 MB", allow="lossless", device="cuda"
    )
    named: dict[str, Any] = {t.name: t for t in plan.techniques}
    assert "gradient_release" in named
    found, share = plan.predicted, named["offload"].share
    assert found.link_seconds == pytest.approx(share * 8 * 8 * 2048**2 / 3.5e10, rel=0.01)
    assert 0 < found.hidden_seconds < found.link_seconds and found.captured


def test_its_readme_runs(tmp_path: Path) -> None:
    text = Path(technique.__file__).with_name("README.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    exec(compile(code, "README.md", "exec"), {})


def test_buffers_can_be_looked_at_in_any_type() -> None:
    """A model of an odd number of weights has no chunk of an odd number of bytes."""
    for elements in (1, 999, 1_429_354):
        size = chunk_bytes([torch.empty(elements, 4, device="meta")])
        for each in buffer_sizes([64, 128, size], size):
            assert each % 8 == 0, (elements, each)
