"""What is live at the peak: hand-made histories, and a real step with one allocation a storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from shoestring.memory.live.history import AllocatedBlock, blocks_at_peak
from shoestring.memory.live.live import LiveBlock, LivePeak, describe, live_at_peak
from shoestring.memory.live.measure import training_step
from shoestring.memory.live.names import resident_names
from shoestring.memory.live.watch import OperationWatch
from shoestring.trace.graph import Phase

MIB = 2**20


def block(address: int, size: int, state: str, requested: int = 0) -> dict[str, Any]:
    return {"address": address, "size": size, "state": state, "requested_size": requested}


def segment(address: int, kind: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"address": address, "segment_type": kind, "blocks": list(blocks)}


def alloc(address: int, size: int) -> dict[str, Any]:
    return {"action": "alloc", "addr": address, "size": size, "frames": []}


def free(address: int) -> list[dict[str, Any]]:
    return [
        {"action": "free_requested", "addr": address, "size": 0},
        {"action": "free_completed", "addr": address, "size": 0},
    ]


def test_residents_and_the_blocks_of_the_highest_moment_are_found() -> None:
    held, rest = block(0, 512, "active_allocated", 100), block(512, 2 * MIB - 512, "inactive")
    segments = [segment(0, "small", held, rest)]
    history = [alloc(512, 1000), alloc(1536, 600), *free(512), alloc(512, 10), *free(1536)]
    peak_bytes, reached, blocks = blocks_at_peak(segments, history)
    assert (peak_bytes, reached) == (512 + 1024 + 1024, 1)
    assert [(b.address, b.requested_bytes, b.nbytes, b.born, b.died) for b in blocks] == [
        (0, 100, 512, -1, None), (512, 1000, 1024, 0, 2), (1536, 600, 1024, 1, 3),
    ]  # fmt: skip


def test_a_large_cached_block_is_handed_out_uncut_and_counts_whole() -> None:
    free_block = block(0, 3 * MIB, "inactive")
    segments = [segment(0, "large", free_block, block(3 * MIB, 17 * MIB, "active_allocated"))]
    peak_bytes, _, blocks = blocks_at_peak(segments, [alloc(0, 2 * MIB)])
    assert peak_bytes == 20 * MIB and blocks[-1].nbytes == 3 * MIB
    peak_bytes, _, blocks = blocks_at_peak(segments, [alloc(0, 2 * MIB - 512)])
    assert peak_bytes == 19 * MIB - 512 and blocks[-1].nbytes == 2 * MIB - 512


def test_freed_neighbors_are_one_block_again() -> None:
    segments = [segment(0, "large", block(0, 20 * MIB, "inactive"))]
    cut = [alloc(0, 2 * MIB), alloc(2 * MIB, 2 * MIB), alloc(4 * MIB, 2 * MIB)]
    joined = [*cut, *free(0), *free(4 * MIB), *free(2 * MIB), alloc(0, 20 * MIB)]
    assert blocks_at_peak(segments, joined)[0] == 20 * MIB
    # Between two that live, the middle is 2 MiB and is handed out whole for 1.5.
    alone = [*cut, *free(2 * MIB), alloc(2 * MIB, 3 * MIB // 2)]
    assert blocks_at_peak(segments, alone)[2][-1].nbytes == 2 * MIB


def test_segments_come_and_go() -> None:
    history = [
        {"action": "segment_alloc", "addr": 0, "size": 2 * MIB},
        alloc(0, 700),
        *free(0),
        {"action": "segment_free", "addr": 0, "size": 2 * MIB},
        {"action": "segment_alloc", "addr": 0, "size": 20 * MIB},
        alloc(0, MIB + 1),
    ]
    assert blocks_at_peak([], history)[0] == MIB + 512


class Allocator(TorchDispatchMode):
    """Every new storage of the CPU as an event of an allocator that never frees."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.born: dict[int, int] = {}
        self._held: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                address = leaf.untyped_storage().data_ptr()
                if address not in self.born:
                    self.born[address] = self.count
                    self._held.append(leaf)  # so that no address is used twice
                    self.count += 1
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(checkpoint(self._middle, self.first(x), use_reentrant=False))

    def _middle(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(x))


def test_operations_are_known_by_module_and_phase() -> None:
    model, x = Net(), torch.randn(3, 4)
    with Allocator() as allocator:
        watch = OperationWatch(lambda: allocator.count)
        with watch.following(model), watch:
            training_step(
                model, x, lambda m, b: m(b).square().mean(), None, entering=watch.entering
            )
    ran = {watch.of(born) for born in allocator.born.values()} - {None}
    places = {(r.phase, r.module, r.name) for r in ran if r is not None}
    assert (Phase.FORWARD, "first", "aten.addmm") in places
    assert (Phase.FORWARD, "norm", "aten.native_batch_norm") in places
    assert (Phase.RECOMPUTE, "norm", "aten.native_batch_norm") in places
    assert (Phase.BACKWARD, "norm", "aten.native_batch_norm_backward") in places
    assert (Phase.BACKWARD, "first", "aten.mm") in places
    assert (Phase.BACKWARD, "last", "aten.mm") in places


def test_blocks_are_described_by_name_life_and_operation() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)
    outputs: list[int] = []
    model[1].register_forward_hook(lambda m, i, o: outputs.append(o.data_ptr()))
    with Allocator() as allocator:
        watch = OperationWatch(lambda: allocator.count)
        with watch.following(model), watch:
            value = model(x).square().mean()
            watch.entering(Phase.BACKWARD)
            value.backward()
            watch.entering(Phase.OPTIMIZER)
    gradient = model[0].weight.grad
    assert gradient is not None
    gradients = {gradient.data_ptr(): ("gradients", "0.weight")}
    names = resident_names(model, x, None)

    def described(address: int, born: int, died: int | None) -> LiveBlock:
        frames = [{"filename": "/a/torch/nn/functional.py", "line": 1, "name": "relu"},
                  {"filename": "/home/net/model.py", "line": 7, "name": "forward"}]  # fmt: skip
        made = AllocatedBlock(address, 100, 512, born, frames, died)
        return describe(made, watch, names, gradients, allocator.count)

    relu = allocator.born[outputs[0]]
    backward = next(at for at, phase in watch.phases if phase is Phase.BACKWARD)
    kept = described(outputs[0], relu, backward + 3)
    assert (kept.category, kept.where) == ("activations kept", "1 aten.relu")
    assert kept.line == "net/model.py:7 forward"
    assert described(outputs[0], relu, relu + 1).category == "in forward"
    assert described(outputs[0] + 64, relu, relu + 1).category == "workspaces"
    found = described(gradient.data_ptr(), allocator.born[gradient.data_ptr()], None)
    assert (found.category, found.where) == ("gradients", "0.weight")
    weight = described(model[0].weight.data_ptr(), -1, None)
    assert (weight.category, weight.where) == ("weights", "0.weight")
    assert described(x.data_ptr(), -1, None).category == "minibatch"
    assert described(1, -1, None).category == "resident, without a name"
    assert described(1, 10**6, None).category == "outside of operations"


def test_the_categories_add_up_to_the_peak() -> None:
    blocks = (
        LiveBlock("weights", "a", "", 100, 512),
        LiveBlock("in backward", "b", "m.py:1 f", 2 * MIB, 3 * MIB),
        LiveBlock("in backward", "b", "m.py:1 f", 512, 512),
    )
    peak = LivePeak(3 * MIB + 1024, 3 * MIB + 1024, "backward of x", blocks)
    categories = peak.by_category()
    assert sum(nbytes for nbytes, _ in categories.values()) == peak.peak_bytes
    assert categories["rounding to 512 bytes"] == (412, 1)
    assert categories["cached blocks handed out uncut"] == (MIB, 1)
    assert "2x in backward: b  m.py:1 f" in peak.table()
    assert peak.as_json()["blocks"][0]["count"] == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_blocks_are_all_that_the_allocator_counts() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3))
    model, x = model.cuda(), torch.randn(64, 3, 32, 32, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = net(batch).square().mean()
        return value

    for _ in range(2):
        training_step(model, x, loss, optimizer)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    training_step(model, x, loss, optimizer)
    plain = torch.cuda.max_memory_allocated()
    peak = live_at_peak(
        lambda entering: training_step(model, x, loss, optimizer, entering), model, x, optimizer
    )
    assert peak.peak_bytes == peak.allocator_bytes, peak.table()
    assert abs(peak.peak_bytes - plain) < 0.01 * plain, peak.table()
    categories = peak.by_category()
    weights = [*model[0].parameters(), *model[3].parameters()]
    assert categories["weights"][0] == sum(p.nbytes for p in weights)
    assert categories["minibatch"][0] == x.nbytes
    assert categories["activations kept"][0] > x.nbytes
    assert "outside of operations" not in categories, peak.table(40)
