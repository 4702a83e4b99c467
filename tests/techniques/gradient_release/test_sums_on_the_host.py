"""Released gradients whose sums lie on the host until the last microbatch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shoestring as ss
from shoestring.errors import InputError, NoEffectWarning
from shoestring.planning.cost import NOMINAL
from shoestring.planning.planner import Planner
from shoestring.step.predict import predict_step
from shoestring.step.trace_step import trace_plan
from shoestring.techniques import gradient_release as technique
from shoestring.techniques import host
from shoestring.techniques.gradient_release.sums import HostSums
from shoestring.trace.places import is_elsewhere

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}
THERE = ss.GradientRelease(fold=False, sum="host", smallest=8)
PARTS = ss.Microbatching(6)
CLIPS = {"none": None, "norm": ss.Clip(norm=0.05), "value": ss.Clip(value=1e-3)}


@pytest.fixture(params=["mapped", "streamed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As beside the CPU; and as beside a GPU, copies made at once, most tensors in pieces."""
    if request.param == "streamed":
        monkeypatch.setattr(technique, "on_cuda", lambda tensor: True)
        monkeypatch.setattr(technique.sums, "BUFFER_BYTES", 3072)
    return str(request.param)


class Routed(nn.Module):
    """The sign of an example's first number says which of two layers it goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.two = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(x)
        for number, layer in enumerate(self.two):
            rows = ((x[:, 0] > 0) == bool(number)).nonzero()[:, 0]
            if len(rows):
                made = made.index_add(0, rows, layer(x[rows]))
        return made


def network() -> nn.Module:
    """A weight used twice, a transposed one, experts, a tensor too small to leave."""
    torch.manual_seed(0)
    shared, turned, small = nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 1)
    turned.weight = nn.Parameter(turned.weight.detach().t().contiguous().t())
    return nn.Sequential(Routed(), shared, nn.Tanh(), shared, turned, nn.Linear(48, 48), small)


def data(seed: int = 1) -> torch.Tensor:
    """The last part has one example, and all of it goes one way."""
    x = torch.randn(16, 48, generator=torch.Generator().manual_seed(seed))
    x[:, 0] = torch.arange(16) - 7.5
    return x if seed % 2 else x.flip(0)


def loss(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    return (model(given) - given).square().mean()


def made(name: str, *plan: ss.Technique, clip: Any = None) -> ss.Step:
    model = network()
    return ss.apply(plan, model, OPTIMIZERS[name](model.parameters()), loss=loss, clip=clip)


def trained(name: str, *plan: ss.Technique, clip: Any = None, steps: int = 4) -> ss.Step:
    step = made(name, *plan, clip=clip)
    for number in range(steps):
        step(data(number))
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


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_bit_differs(name: str, clip: str, way: str) -> None:
    """Of what microbatches add up on the device; experts have no gradient in some parts."""
    plain = trained(name, PARTS, clip=CLIPS[clip])
    there = trained(name, PARTS, THERE, clip=CLIPS[clip])
    assert equal(plain, there)
    assert clip != "norm" or torch.equal(plain.grad_norm, there.grad_norm)
    assert equal(trained(name, clip=CLIPS[clip]), trained(name, THERE, clip=CLIPS[clip]))


@pytest.mark.parametrize(
    "others",
    [(ss.Checkpointing("every-2"),), (ss.Offload(smallest=1),), (ss.WeightOffload(smallest=1),),
     (ss.Precision("bf16"),), (ss.Offload(smallest=1), ss.Precision("bf16"))],
    ids=lambda others: "+".join(t.name for t in others),
)  # fmt: skip
def test_others_beside_it(others: tuple[ss.Technique, ...], way: str) -> None:
    """Rounding draws the same bits where all parts have all gradients."""
    ended = []
    for released in (ss.GradientRelease(fold=False), THERE):
        model = network()[1:]
        own = OPTIMIZERS["adamw"](model.parameters())
        step = ss.apply([PARTS, *others, released], model, own, loss=loss)
        for number in range(4):
            step(data(number))
        ended.append(step)
    assert equal(*ended)


def test_only_one_gradient_is_here_and_the_sums_are_there(way: str) -> None:
    """Counted where each is made, of those that leave."""
    model, seen = network(), []
    large = [p for p in model.parameters() if p.numel() >= 48]
    for parameter in large:
        parameter.register_post_accumulate_grad_hook(
            lambda p: seen.append(sum(q.grad is not None for q in large))
        )
    own = OPTIMIZERS["adamw"](model.parameters())
    plan = [PARTS, ss.GradientRelease(sum="host", smallest=48)]
    with pytest.warns(ss.UnprovenWarning, match="a hook on the gradient of"):
        step = ss.apply(plan, model, own, loss=loss)
        step(data())
    assert max(seen) == 1
    step(data(), update=False)
    assert all((p.grad is None) == (p.numel() >= 48) for p in model.parameters())
    sums = step._setup.sums
    assert isinstance(sums, HostSums)
    assert all(p in sums and is_elsewhere(sums._there[p]) for p in large)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("plan", [(), (PARTS,)], ids=["whole", "parts"])
def test_gradients_of_several_batches_wait_there(
    plan: tuple[ss.Technique, ...], clip: str, way: str
) -> None:
    ended = []
    for more in ((), (THERE,)):
        step = made("adamw", *plan, *more, clip=CLIPS[clip])
        for number in range(3):
            step(data(number), update=False)
            step(data(number + 1), update=False)
            assert step.accumulated == 2
            if number == 1:
                step.update()
            elif number == 2:
                step.zero_grad()  # those two are dropped
                assert not step.accumulated
            step(data(number + 2))
            assert not step.accumulated
        ended.append(step)
    assert equal(*ended)


def test_nothing_is_saved_while_gradients_wait_and_snapshots_go_on(way: str) -> None:
    plain, step = trained("adamw", PARTS), trained("adamw", PARTS, THERE)
    step(data(), update=False)
    with pytest.raises(InputError, match="gradients are accumulated"):
        step.state_dict()
    step.zero_grad()
    for plan in ((PARTS,), (PARTS, THERE)):
        on = trained("adamw", *plan, steps=1)
        on.load_state_dict(copy.deepcopy(step.state_dict()))
        on(data(7))
        plain.load_state_dict(copy.deepcopy(step.state_dict()))
        plain(data(7))
        assert equal(plain, on)


def test_a_batch_that_fails_takes_its_sums_along(way: str) -> None:
    plain, step = trained("adamw", PARTS), trained("adamw", PARTS, THERE)
    for one in (plain, step):
        calls: list[int] = []

        def fail(gradient: torch.Tensor, calls: list[int] = calls) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("no memory left")

        handle = one.model[5].weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="no memory left"):
            one(data())
        handle.remove()
        assert not one._setup.sums
        one(data())
    assert equal(plain, step)


@pytest.mark.parametrize("plan", [[PARTS], [ss.Microbatching(4)], []], ids=str)
@pytest.mark.parametrize("name", ["adamw", "nesterov"])
def test_the_predicted_peak_is_measured(name: str, plan: list[ss.Technique], way: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(240, 48)
    plan = [ss.Microbatching(t.size * 10) for t in plan if isinstance(t, ss.Microbatching)]

    def peak(*more: ss.Technique) -> tuple[int, int]:
        model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(6)))
        own = OPTIMIZERS[name](model.parameters())
        chosen = [*plan, *more]
        predicted = predict_step(chosen, model, x, loss=loss, optimizer=own).peak_bytes
        step = ss.apply(chosen, model, own, loss=loss)
        step(x)
        return predicted, step.measure(x).peak_bytes

    predicted, measured = peak(THERE)
    assert measured == pytest.approx(predicted, rel=0.01)
    kept = peak(ss.GradientRelease(fold=False))[1]
    buffers = 2 * 3072 if way == "streamed" else 0
    sums = 6 * (48 * 48 + 48) * 4 if plan else 0
    assert measured == kept + buffers - sums


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_it_is_certified(name: str, way: str) -> None:
    model = network()
    own = OPTIMIZERS[name](model.parameters())
    found = ss.verify([THERE], model, [data()], loss=loss, optimizer=own)
    assert found.ok and {found[w].found for w in ("gradients", "parameters")} == {ss.Level.EQUAL}
    assert ss.verify([PARTS, THERE], model, [data()], loss=loss, optimizer=own).ok


@pytest.mark.parametrize("clip", CLIPS)
def test_a_captured_step_copies_the_same(clip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step as while it is captured, and as if it was replayed before the last one."""
    monkeypatch.setattr(technique, "on_cuda", lambda tensor: True)
    plain, step = (made("adamw", *plan, clip=CLIPS[clip]) for plan in ((PARTS,), (PARTS, THERE)))
    setup = step._setup
    assert len(setup.before_graph) == len(setup.in_capture) == 1
    for number in range(5):
        plain(data(number))
        for call in setup.before_graph:
            call()
        with ExitStack() as stack:
            for around in setup.in_capture if number > 1 else ():
                stack.enter_context(around())
            step(data(number))
    assert equal(plain, step)


def test_a_step_for_a_gpu_is_predicted_as_a_graph_with_buffers_for_any_tensor() -> None:
    """Two of 4 MiB in place of eight sums of 4 MiB."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    own = torch.optim.AdamW(model.parameters())
    x, each = torch.randn(512, 1024), 4 * 1024**2
    peaks = {}
    for released in (ss.GradientRelease(), ss.GradientRelease(sum="host")):
        plan = ss.Plan([ss.FusedUpdate(), ss.Microbatching(64), released])
        trace = trace_plan(plan, model, x, loss=loss, optimizer=own, device="cuda")
        assert trace.capturable
        peaks[released.sum] = ss.profile(
            model, x, loss=loss, optimizer=own, techniques=plan, accounting="device", device="cuda"
        ).peak_bytes
    assert peaks["device"] - peaks["host"] == (8 - 2) * each


def test_it_is_planned_where_sums_are_at_the_peak_and_keeps_its_word() -> None:
    """Before weights leave; for SGD's momentum, which takes the parts itself, it is no offer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(10)))
    x = torch.randn(64, 128)
    own = torch.optim.AdamW(model.parameters())
    about: dict[str, Any] = {"loss": loss, "optimizer": own}
    plain = ss.profile(model, x, **about, accounting="device").peak_bytes
    plan = ss.plan(model, x, **about, budget=int(0.4 * plain), allow="lossless")
    chosen = plan.gradient_release
    assert chosen.sum == "host" and plan.kind == "lossless" and plan.microbatching.size < 64
    assert "those of microbatches add up in mapped files" in str(plan)
    parts = -(-64 // plan.microbatching.size)
    moved = 10 * 128 * 128 * 4
    assert plan.predicted.link_bytes == pytest.approx((2 + parts - 1) * moved, rel=0.02)
    step = ss.apply(plan, model, own, loss=loss)
    step(x)
    measured = step.measure(x).peak_bytes
    assert measured == pytest.approx(plan.predicted.peak_bytes, rel=0.01)
    assert measured <= plan.budget_bytes


NAMED = "lossless,gradient_release"


@pytest.mark.parametrize(
    ("device", "allow", "offered"),
    [("cpu", "lossless", True), ("cuda", "lossless", False), ("cuda", NAMED, True)],
)
def test_for_a_gpu_it_is_planned_where_it_is_named(device: str, allow: str, offered: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(10)))
        x = torch.randn(64, 1024)
    planner = Planner(
        model, x, loss=loss, optimizer="adamw", device=device, costs=NOMINAL[device], allow=allow
    )
    found = [t for s in planner._settings(planner.allowed) for t in s.techniques]
    assert offered == any(isinstance(t, ss.GradientRelease) and t.sum == "host" for t in found)


def test_settings_are_written_read_and_flags(tmp_path: Path) -> None:
    plan = ss.Plan([ss.GradientRelease(sum="host")])
    plan.save(tmp_path / "plan.toml")
    assert 'sum = "host"' in (tmp_path / "plan.toml").read_text()
    assert ss.Plan.load(tmp_path / "plan.toml") == plan
    assert plan.short() == "released gradients, summed on the host"
    flags = ss.GradientRelease.from_flags
    assert flags({"gradient_sum": "host"}) == ss.GradientRelease(sum="host")
    assert flags({"gradient_sum": "device"}) is None
    assert flags({"release": True, "gradient_sum": "device"}) == ss.GradientRelease()


@pytest.mark.parametrize(
    ("given", "said"),
    [({"sum": "disk"}, "gradients cannot add up on 'disk'"), ({"smallest": 0}, "not a whole")],
)
def test_bad_settings(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ss.GradientRelease(**given)


def test_what_it_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="before precision knows whether"):
        made("sgd", ss.Precision("fp16"), THERE)
    with pytest.raises(InputError, match="ranks add up gradients on the device"):
        THERE.check_ranks(made("adamw")._setup, "ddp")
    with pytest.raises(InputError, match="gradients cannot be accumulated"):
        trained("sgd", ss.GradientRelease(sum="host", smallest=8))(data(), update=False)
    with pytest.warns(NoEffectWarning, match="no gradient has 9999 elements"):
        made("adamw", ss.GradientRelease(sum="host", smallest=9999))
    usage = host.shutil.disk_usage
    monkeypatch.setattr(host.shutil, "disk_usage", lambda f: usage(f)._replace(free=20_000))
    with pytest.raises(InputError, match=r"the sum of gradients of .* has no room: the disk of"):
        made("adamw", THERE)


def test_where_the_host_has_no_room_sums_stay_here(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed, place_for = [], host.place_for

    def full(tensor: torch.Tensor, folder: str, *, pinned: bool) -> torch.Tensor:
        if len(placed) == 3:
            raise OSError("the disk is full")
        placed.append(tensor.shape)
        return place_for(tensor, folder, pinned=pinned)

    monkeypatch.setattr(technique.sums, "place_for", full)
    step = made("adamw", PARTS, THERE)
    with pytest.warns(RuntimeWarning, match="all that follow stay on the device: the disk") as said:
        for number in range(4):
            step(data(number))
    assert len(said) == 1 and len(placed) == 3
    assert equal(step, trained("adamw", PARTS))


def test_a_gradient_with_other_strides_of_single_elements_needs_no_other_room(way: str) -> None:
    """That of a convolution of 1 x 1 has those of its input, or of the algorithm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 1))
    own = torch.optim.AdamW(model.parameters())
    step = ss.apply([ss.Microbatching(32), THERE], model, own, loss=loss)
    seen, sums = [], step._setup.sums
    assert isinstance(sums, HostSums)
    for form in (torch.channels_last, torch.contiguous_format, torch.channels_last):
        step(torch.randn(96, 16, 9, 9).contiguous(memory_format=form))
        seen.append([there.data_ptr() for there in sums._there.values()])
    assert seen[0] == seen[1] == seen[2] and len(seen[0]) == 4


def test_a_step_that_is_revised_forgets_what_it_had(way: str) -> None:
    step, plain = trained("adamw", PARTS, THERE), trained("adamw", PARTS)
    for one in (step, plain):
        one.revise(ss.Plan([ss.Microbatching(8)]))
        one(data())
    assert equal(step, plain) and step._setup.sums is None
    assert not (step._setup.before_update or step._setup.before_graph or step._setup.in_capture)


class Now:
    """The stream that computes: all is done at once, and waiting is for what is late."""

    def record_event(self) -> Event:
        return Event(None, 0)

    def wait_event(self, event: Event) -> None:
        event.reach()

    def wait_stream(self, other: Late) -> None:
        other.record_event().reach()


class Late(Now):
    """A stream whose copies are made when somebody waits for them, and not before."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []
        self.done = 0

    def record_event(self) -> Event:
        return Event(self, len(self.waiting))

    def wait_event(self, event: Event) -> None:
        self.waiting.append(event.reach)

    def wait_stream(self, other: Now) -> None:
        self.wait_event(other.record_event())


@dataclass
class Event:
    """So much of a stream."""

    stream: Late | None
    count: int

    def reach(self) -> None:
        while self.stream is not None and self.stream.done < self.count:
            self.stream.done += 1
            self.stream.waiting[self.stream.done - 1]()


class Copies(TorchDispatchMode):
    """Puts copies on a stream that is late."""

    def __init__(self, stream: Late) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self._stream.waiting.append(lambda: func(*args))
        return args[0]


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize(("layers", "buffer_bytes"), [(7, 3072), (1, 3072), (1, 9216)])
def test_copies_that_are_as_late_as_they_may_be_are_waited_for(
    layers: int, buffer_bytes: int, clip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is read before it came, and no buffer is filled before it went."""
    monkeypatch.setattr(technique, "on_cuda", lambda tensor: True)
    monkeypatch.setattr(technique.sums, "BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: Now())
    monkeypatch.setattr(torch.cuda, "stream", Copies)
    ended = []
    for plan in ([PARTS], [PARTS, THERE]):
        torch.manual_seed(0)
        model = network() if layers > 1 else nn.Linear(48, 48, bias=False)
        own = OPTIMIZERS["adamw"](model.parameters())
        step = ss.apply(plan, model, own, loss=loss, clip=CLIPS[clip])
        sums = step._setup.sums
        if isinstance(sums, HostSums):
            way = sums._way
            assert way is not None
            way._real, way._in, way._out = True, Late(), Late()
        for number in range(4):
            step(data(number))
        ended.append(step)
    assert len(way._in.waiting) == way._in.done > 20
    assert equal(*ended)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("captured", [False, True])
def test_on_a_gpu_sums_are_streamed_to_the_bit(captured: bool, clip: float | None) -> None:
    """Tensors of one and of several pieces; eager steps of other shapes between replays."""

    def run(*plan: ss.Technique) -> tuple[ss.Step, int]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(2048, 12288), *(nn.Linear(12288, 12288) for _ in range(1)),
            nn.Linear(12288, 2048), *(nn.Linear(2048, 2048) for _ in range(8)),
        ).cuda()  # fmt: skip
        own = torch.optim.AdamW(model.parameters(), lr=1e-4)
        chosen = [ss.FusedUpdate(), ss.Microbatching(16), *plan]
        step = ss.apply(chosen, model, own, loss=loss, clip=clip)
        step.use_graph(captured)
        x = torch.randn(64, 2048, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        for size in (64, 64, 64, 64, 40, 64, 64):
            step(x[:size])
        step(x, update=False)
        step(x)
        return step, step.measure(x).peak_bytes

    (plain, here_bytes), (there, peak_bytes) = run(), run(ss.GradientRelease(sum="host"))
    for a, b in zip(plain.model.parameters(), there.model.parameters(), strict=True):
        assert torch.equal(a, b)
    whole = sum(p.nbytes for p in plain.model.parameters())
    largest = max(p.nbytes for p in plain.model.parameters())
    assert peak_bytes < here_bytes - 0.9 * (whole - largest - 2 * technique.sums.BUFFER_BYTES)
