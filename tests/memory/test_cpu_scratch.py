"""The bounds on what CPU kernels take inside, against the allocator's own events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from shoestring.memory.cpu_scratch import scratch_above, scratch_bytes
from shoestring.memory.device import device_timeline
from shoestring.memory.live.measure import training_step
from shoestring.trace.capture import capture
from shoestring.trace.recorder import Recorder


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def allocator_peak(step: Callable[[], Any]) -> int:
    """Above its level before; no dispatch mode runs here."""
    for _ in range(2):
        step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, profile_memory=True, acc_events=True
    ) as found:
        step()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


class ChannelsLast(nn.Module):
    """ConvNeXt's: a depthwise convolution, then layers over the last dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.narrow(F.gelu(self.wide(y))).permute(0, 3, 1, 2)


class Resized(nn.Module):
    """SegFormer's decoder: maps of several sizes brought to one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, 2, 1), nn.Conv2d(32, 64, 3, 2, 1)
        self.out = nn.Conv2d(96, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = F.relu(self.first(x))
        two = F.interpolate(self.second(one), size=one.shape[2:], mode="bilinear")
        return F.interpolate(self.out(torch.cat([one, two], 1)), scale_factor=2, mode="bilinear")


def convolutions(inside: int, *sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in zip((inside, *sizes), sizes, strict=False):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "plain": (lambda: convolutions(3, 32, 64, 64), (8, 3, 32, 32)),
    "odd channels": (lambda: convolutions(3, 33, 47, 21), (8, 3, 32, 32)),
    "one pixel": (lambda: nn.Sequential(nn.Conv2d(32, 64, 1), nn.ReLU()), (8, 32, 32, 32)),
    "depthwise": (lambda: nn.Sequential(*(ChannelsLast(32) for _ in range(3))), (4, 32, 28, 28)),
    "resized": (Resized, (4, 3, 64, 64)),
    "linear": (lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), (256, 64)),
}  # fmt: skip


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def resident_bytes(model: nn.Module, batch: torch.Tensor, optimizer: Any) -> int:
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *state, batch))


@pytest.mark.parametrize("name", CASES)
def test_the_bound_holds_and_is_not_far(name: str) -> None:
    torch.manual_seed(0)
    build, shape = CASES[name]
    model, batch = build(), torch.randn(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    real = allocator_peak(lambda: training_step(model, batch, loss, optimizer))
    real += resident_bytes(model, batch, optimizer)
    trace = capture(model, batch, loss=loss, optimizer=optimizer)
    totals = device_timeline(trace).totals
    bound = int(totals.max()) + scratch_above(trace, totals)
    assert real <= 1.01 * bound
    assert bound <= 1.35 * real


@pytest.mark.parametrize("rows", [40, 300, 2048])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_in_16_bits(rows: int, transposed: bool) -> None:
    one = torch.randn(rows, 77 if transposed else 100).bfloat16()
    one = one.t() if transposed else one
    two = torch.randn(one.shape[1], 64).bfloat16()
    real = allocator_peak(lambda: one @ two) - 2 * one.shape[0] * 64
    recorder = Recorder()
    with recorder:
        one @ two
    bound = scratch_bytes(recorder.ops[-1])
    assert real <= bound <= 2 * real + 48 * 1024


def test_the_channels_of_an_image_are_not_padded() -> None:
    x, weight = torch.randn(6, 3, 64, 64), torch.randn(8, 3, 7, 7)
    gradient = torch.randn(6, 8, 32, 32)

    def run() -> Any:
        return torch.ops.aten.convolution_backward(
            gradient, x, weight, [0], [2, 2], [3, 3], [1, 1], False, [0, 0], 1, [False, True, False]
        )

    recorder = Recorder()
    with recorder:
        run()
    real = allocator_peak(run) - weight.nbytes
    assert real <= scratch_bytes(recorder.ops[-1]) <= 1.3 * real


def test_sums_by_index_in_16_bits() -> None:
    total = torch.zeros(64, 40).bfloat16()
    index, given = torch.randint(0, 40, (64, 40)), torch.randn(64, 40).bfloat16()
    real = allocator_peak(lambda: total.scatter_add_(1, index, given))
    recorder = Recorder()
    with recorder:
        total.scatter_add_(1, index, given)
    assert 0 < real <= scratch_bytes(recorder.ops[-1])


@pytest.mark.parametrize("share", [0.8, 0.55])
@pytest.mark.parametrize("name", ["plain", "depthwise"])
def test_budgets_hold_at_the_allocator(name: str, share: float) -> None:
    torch.manual_seed(0)
    build, shape = CASES[name]
    model, batch = build(), torch.randn(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    given: dict[str, Any] = {"loss": loss, "optimizer": optimizer}
    budget = int(ss.profile(model, batch, accounting="device", **given).peak_bytes * share)
    try:
        plan = ss.plan(model, batch, budget=budget, allow="lossless", **given)
    except ss.BudgetError:
        pytest.skip("nothing fits so little")
    step = ss.apply(plan, model, optimizer, loss=loss)
    step._hold = None
    real = allocator_peak(lambda: step(batch)) + resident_bytes(model, batch, optimizer)
    assert real <= budget
    if plan.predicted.scratch_bytes:
        assert "scratch of kernels" in str(plan)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.slow
def test_budgets_hold_the_random_states_that_regions_keep() -> None:
    """5 KB a region: in a small model that is more than the margin."""
    model = nn.Sequential(nn.Linear(48, 16), *(Residual(16) for _ in range(8)))
    batch, optimizer = torch.randn(64, 48), torch.optim.SGD(model.parameters(), lr=0.0)
    given: dict[str, Any] = {"loss": loss, "optimizer": optimizer}
    budget = int(ss.profile(model, batch, accounting="device", **given).peak_bytes * 0.5)
    plan = ss.plan(model, batch, budget=budget, allow="lossless", **given)
    step = ss.apply(plan, model, optimizer, loss=loss)
    step._hold = None
    real = allocator_peak(lambda: step(batch)) + resident_bytes(model, batch, optimizer)
    assert real <= budget, plan.short()
