"""Checkpointed training is plain training, bit for bit, and recomputes what was predicted."""

from __future__ import annotations

import copy
import dataclasses
import gc
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from shoestring.errors import InputError, NoEffectWarning
from shoestring.lab.models import builtin
from shoestring.memory.model import memory_profile
from shoestring.memory.nodes import forward_graph
from shoestring.memory.schedule import Kind, schedule
from shoestring.step.apply import apply
from shoestring.techniques import Checkpointing
from shoestring.trace.graph import Trace
from shoestring.trace.tracing import trace_model
from techniques.small_models import SMALL, Small

STRATEGIES = ["none", "no-bn", "every-1", "every-2", "every-5"]
BLOCK_STRATEGIES = ["residual-1", "residual-2", "residual-3", "residual-1*", "residual-2*"]


def strategies(small: Small) -> list[str]:
    return STRATEGIES + (BLOCK_STRATEGIES if small.has_blocks else [])


CASES = [(name, s) for name, small in SMALL.items() for s in strategies(small)]


def backward(model: nn.Module, run: object) -> tuple[list[object], torch.Tensor]:
    torch.manual_seed(5)
    loss = run()  # type: ignore[operator]
    loss.backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()], loss.detach()


@pytest.mark.filterwarnings("ignore::shoestring.errors.NoEffectWarning")
@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_gradients_buffers_and_random_stream_are_those_of_plain_training(
    name: str, strategy: str
) -> None:
    small = SMALL[name]
    torch.manual_seed(0)
    plain, batch = small.build(), small.batch()
    ours = copy.deepcopy(plain)
    expected, loss = backward(plain, lambda: small.loss(plain, batch))
    stream = torch.get_rng_state()

    step = apply(
        [Checkpointing(strategy)], ours, torch.optim.SGD(ours.parameters()), loss=small.loss
    )
    found, same_loss = backward(ours, lambda: step._setup.run(batch))
    assert torch.equal(loss, same_loss)
    assert torch.equal(stream, torch.get_rng_state())
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(plain.buffers(), ours.buffers(), strict=True):
        assert torch.equal(a, b)


def test_plain_checkpoint_updates_running_statistics_twice() -> None:
    """What the test above would say of torch.utils.checkpoint itself (pytorch#96136)."""
    small = SMALL["residual"]
    torch.manual_seed(0)
    plain, batch = small.build(), small.batch()
    theirs = copy.deepcopy(plain)
    small.loss(plain, batch).backward()
    for block in theirs[1]:
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    small.loss(theirs, batch).backward()
    assert any(
        not torch.equal(a, b) for a, b in zip(plain.buffers(), theirs.buffers(), strict=True)
    )


def flops(run: object) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        run().backward()  # type: ignore[operator]
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    "strategy",
    ["no-bn", "every-2", "every-6", "residual-1", "residual-2", "residual-1*", "residual-2*"],
)
def test_recomputed_products_are_exactly_those_predicted(strategy: str) -> None:
    """Products and convolutions, which the counter knows, on WRN-16-1."""
    known = builtin("wrn-16-1")
    model, batch = known.build(), known.batch(2)
    trace = trace_model(model, batch, loss=known.loss)
    cheap_left_out = dataclasses.replace(
        trace,
        checkpoint=strategy,
        ops=tuple(
            op
            if op.name in ("aten.convolution", "aten.addmm")
            else dataclasses.replace(op, flops=0)
            for op in trace.ops
        ),
    )
    predicted = memory_profile(cheap_left_out).recompute_flops
    plain = flops(lambda: known.loss(model, batch))
    step = apply(
        [Checkpointing(strategy)], model, torch.optim.SGD(model.parameters()), loss=known.loss
    )
    extra = flops(lambda: step._setup.run(batch)) - plain
    assert extra == predicted - sum(_left_out(cheap_left_out, strategy))


def _left_out(trace: Trace, strategy: str) -> list[int]:
    """Predicted, but not run or not counted: normalizations, which the counter does not know, and
    the layers around the blocks, whose outputs a module's region keeps."""
    graph = forward_graph(trace)
    return [
        graph.nodes[e.node].recompute_flops
        for e in schedule(graph, strategy)
        if e.kind is Kind.RECOMPUTE
        and (
            graph.nodes[e.node].statistics_bytes
            or (graph.nodes[e.node].block < 0 and strategy.startswith("residual"))
            or graph.nodes[e.node].name == "aten.addmm"
        )
    ]


def test_blocks_can_be_named() -> None:
    small = SMALL["cnn"]
    model, batch = small.build(), small.batch()
    step = apply([Checkpointing("residual-1", blocks=("3", "4"))], model,
                 torch.optim.SGD(model.parameters()), loss=small.loss)  # fmt: skip
    step(batch)


def test_an_unknown_block_or_none_at_all_changes_nothing() -> None:
    small = SMALL["mlp"]
    model = small.build()
    before = {name: m.forward for name, m in model.named_modules()}
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(InputError, match="no repeated blocks"):
        apply([Checkpointing("residual-1")], model, optimizer, loss=small.loss)
    with pytest.raises(InputError, match="no module 'nowhere'"):
        apply([Checkpointing("residual-1", blocks=("nowhere",))], model, optimizer, loss=small.loss)
    assert {name: m.forward for name, m in model.named_modules()} == before


class ByFunction(nn.Module):
    """Its activation is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.gelu(self.first(x)))


@pytest.mark.parametrize(("build", "warned"), [(lambda: nn.Linear(3, 1), 1), (ByFunction, 0)])
def test_nothing_cheap_to_drop_warns_once(build: Any, warned: int) -> None:
    model = build()
    step = apply([Checkpointing("no-bn")], model, torch.optim.SGD(model.parameters()),
                 loss=lambda m, b: m(b).sum())  # fmt: skip
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step(torch.randn(2, 3)), step(torch.randn(2, 3))
    assert [w.category for w in said] == [NoEffectWarning] * warned


def test_evaluation_runs_plainly() -> None:
    small = SMALL["residual"]
    torch.manual_seed(0)
    plain, batch = small.build(), small.batch()
    ours = copy.deepcopy(plain)
    apply([Checkpointing("residual-2*")], ours, torch.optim.SGD(ours.parameters()), loss=small.loss)
    plain.eval(), ours.eval()
    with torch.no_grad():
        assert torch.equal(plain(batch[0]), ours(batch[0]))


@pytest.mark.parametrize("strategy", ["residual-1", "residual-2*", "no-bn"])
def test_fine_tuning_in_evaluation_mode_is_checkpointed_too(strategy: str) -> None:
    """As models are that are trained on with dropout and statistics as they are."""
    small = SMALL["residual"]
    torch.manual_seed(0)
    plain, batch = small.build().eval(), small.batch()
    peaks, weights = [], []
    for chosen in ("none", strategy):
        ours = copy.deepcopy(plain)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        step = apply([Checkpointing(chosen)], ours, optimizer, loss=small.loss)
        step(batch)
        peaks.append(step.measure(batch).peak_bytes)
        weights.append([p.detach().clone() for p in ours.parameters()])
        assert not ours.training
    assert peaks[1] < peaks[0]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("position", [0, 1, 2])
def test_backward_hooks_of_blocks_are_called(position: int) -> None:
    """Wherever in a region their block stands, and whenever they came."""
    results = []
    for strategy in ("none", "residual-3*"):
        torch.manual_seed(0)
        stack = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, 0.0) for _ in range(3)))
        optimizer = torch.optim.SGD(stack.parameters(), lr=0.1)
        step = apply(
            [Checkpointing(strategy)], stack, optimizer, loss=lambda m, b: m(b).square().mean()
        )
        stack[position].register_full_backward_hook(lambda m, ins, outs: (2 * ins[0],))
        stack[position].register_full_backward_pre_hook(lambda m, outs: (3 * outs[0],))
        step(torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1), requires_grad=True))
        results.append([p.detach().clone() for p in stack.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_region_lets_go_without_the_garbage_collector() -> None:
    """A cycle through a region would hold its tensors, and the peak with them."""
    known = builtin("wrn-28-1")
    model, batch = known.build(), known.batch(4)
    activations = {}
    for strategy in ("none", "residual-2*"):
        ours = copy.deepcopy(model)
        step = apply(
            [Checkpointing(strategy)], ours, torch.optim.SGD(ours.parameters()), loss=known.loss
        )
        step(batch)
        gc.collect()
        gc.disable()
        try:
            roles = step.measure(batch).bytes_by_role
        finally:
            gc.enable()
        activations[strategy] = roles["forward_activation"] + roles["backward_activation"]
    assert activations["residual-2*"] < activations["none"] / 3.2
