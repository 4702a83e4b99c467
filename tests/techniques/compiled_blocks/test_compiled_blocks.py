"""Compiled blocks: what they save, that they train as plain ones do, and what they refuse."""

from __future__ import annotations

import copy
import gc
import shutil
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.profiler import ProfilerActivity, profile

import shoestring as ss
from shoestring.errors import InputError, NoEffectWarning
from shoestring.memory.work import Work
from shoestring.planning.allow import Allowed
from shoestring.step.apply import apply
from shoestring.step.predict import predict_step
from shoestring.step.trace_step import trace_plan
from shoestring.techniques.checkpointing.scheduler import _without_refused
from shoestring.techniques.checkpointing.stages import Chain as Blocks
from shoestring.techniques.checkpointing.stages import Option, Stage
from shoestring.techniques.compiled_blocks import blocks
from shoestring.torch_private.compiling import as_inductor, compiled_whole

WIDE, ROWS, COUNT = 16, 32, 3
EACH = WIDE * ROWS * 4
"""Bytes of a block's input in FP32."""


class Chain(nn.Module):
    """Four element-wise functions of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDE))
        self.inside = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x * self.scale).sin().cos().tanh()


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x).relu())


class Drops(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


def model_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(COUNT)))


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDE, generator=torch.Generator().manual_seed(1))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def step_of(model: nn.Module, *techniques: Any) -> ss.Step:
    return apply([ss.CompiledBlocks(), *techniques], model, sgd(model), loss=loss)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Blocks are captured as ever, and their graphs run as they are: no C++ compiler is needed.

    Gives the graphs of forward passes.
    """
    made: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Callable[..., Any]:
        made.append(graph)
        return make_boxed_func(graph.forward)  # type: ignore[no-any-return]

    def run(graph: Any, inputs: Any) -> Callable[..., Any]:
        return make_boxed_func(graph.forward)  # type: ignore[no-any-return]

    backend = aot_autograd(fw_compiler=keep, bw_compiler=run, **as_inductor())
    monkeypatch.setattr(blocks, "compiled_whole", partial(compiled_whole, backend=backend))
    return made


def test_blocks_save_what_the_partitioner_keeps() -> None:
    """Plain: the block's input, for the product; product and sine, for the functions of them; and
    tanh's output, the next block's input. Compiled: the inputs, and all else is computed again.
    """
    model = model_of(Chain)
    plain = predict_step([], model, batch(), loss=loss, optimizer="sgd-plain")
    ours = predict_step([ss.CompiledBlocks()], model, batch(), loss=loss, optimizer="sgd-plain")
    assert plain.peak_bytes - ours.peak_bytes == 2 * COUNT * EACH


def test_a_prediction_is_what_its_graphs_take(graphs: list[Any]) -> None:
    model = model_of(Chain)
    predicted = predict_step(
        [ss.CompiledBlocks()], model, batch(), loss=loss, optimizer="sgd-plain"
    )
    step = step_of(model)
    step(batch())
    assert step.measure(batch()).peak_bytes == predicted.peak_bytes


@pytest.mark.parametrize("recomputed", [False, True])
def test_training_is_plain_training(graphs: list[Any], recomputed: bool) -> None:
    """Statistics of a recomputed BatchNorm move once. Blocks share code; that of the first gives no
    gradient to its input."""
    ours, plain = model_of(Norm), model_of(Norm)
    step = step_of(ours, *[ss.Checkpointing("residual-1")] * recomputed)
    reference = apply([], plain, sgd(plain), loss=loss)
    for _ in range(2):
        assert torch.allclose(step(batch()), reference(batch()))
    assert len(graphs) == 2
    held = ours.state_dict()
    assert held.keys() == plain.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(held[name], tensor)


def test_without_gradients_blocks_run_as_they_are(graphs: list[Any]) -> None:
    model = model_of(Norm)
    step_of(model)
    with torch.no_grad():
        model.eval()(batch())
    assert not graphs


def test_a_step_that_is_dropped_leaves_nothing(graphs: list[Any]) -> None:
    model = model_of(Chain)
    step = step_of(model)
    step(batch())
    left = [weakref.ref(held) for held in (model, step, next(model.parameters()))]
    del model, step
    graphs.clear()
    gc.collect()
    assert [held() for held in left] == [None] * 3


def test_a_step_that_fails_to_apply_puts_the_forward_back() -> None:
    model = model_of(Chain)
    with pytest.raises(InputError, match="the schedule is for 9 blocks"):
        step_of(model, ss.Checkpointing("per-block", schedule=("recompute*9",)))
    assert not any("forward" in block.__dict__ for block in model)


def test_a_block_that_draws_is_refused(graphs: list[Any]) -> None:
    model = model_of(Drops)
    with pytest.raises(InputError, match="0 draws random numbers"):
        predict_step([ss.CompiledBlocks()], model, batch(), loss=loss, optimizer="sgd-plain")
    with pytest.raises(InputError, match="0 draws random numbers"):
        step_of(model)(batch())
    assert not graphs


@pytest.mark.parametrize(
    "other",
    [
        ss.Checkpointing("residual-1*"),
        ss.Checkpointing("every-2"),
        ss.Checkpointing("per-block", schedule=("keep", "[[lean], keep]")),
        ss.Sparsity(0.3),
        ss.WeightOffload(),
        ss.ActivationBits(8),
        ss.TiledMLP(),
    ],
)
def test_what_works_inside_of_blocks_is_refused(other: ss.Technique) -> None:
    with pytest.raises(InputError, match=r"works inside of blocks.*recompute whole blocks"):
        step_of(model_of(Chain), other)


def test_hooks_inside_are_refused() -> None:
    model = model_of(Chain)
    model[0].inside.register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match=r"0\.inside has hooks"):
        step_of(model)(batch())


def test_what_cannot_be_compiled_whole_is_named(graphs: list[Any]) -> None:
    class Decides(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if float(x.detach().sum()) > 0 else -x)

    with pytest.raises(InputError, match="0 cannot be compiled as a whole"):
        step_of(model_of(Decides))(batch())


def test_tracing_leaves_attributes_alone(graphs: list[Any]) -> None:
    """A counter is moved by compiled code, once a pass."""

    class Counts(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.traced: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.traced.append(1)
            return super().forward(x)

    model = model_of(Counts)
    predict_step([ss.CompiledBlocks()], model, batch(), loss=loss, optimizer="sgd-plain")
    assert not model[0].traced
    step_of(model)(batch())
    assert model[0].traced == [1]


def test_buffers_that_are_assigned_are_refused() -> None:
    class Assigns(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDE))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return super().forward(x)

    model = model_of(Assigns)
    with pytest.raises(InputError, match=r"0\.mean is another tensor after each pass"):
        step_of(model)(batch())
    assert not model[0].mean.any()


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True])
def test_the_certificate_says_so(graphs: list[Any], recomputed: bool) -> None:
    model = model_of(Norm)
    chosen = [ss.CompiledBlocks(), *[ss.Checkpointing("residual-1")] * recomputed]
    found = ss.verify(chosen, model, [batch()], loss=loss, optimizer=sgd(model))
    assert found.ok, str(found)


def test_what_is_compiled_already_is_refused() -> None:
    model = model_of(Chain)
    model[1].compile()
    with pytest.raises(InputError, match="1 is compiled already"):
        step_of(model)


def test_blocks_can_be_named() -> None:
    model = model_of(Chain)
    apply([ss.CompiledBlocks(blocks=("1",))], model, sgd(model), loss=loss)
    assert ["forward" in block.__dict__ for block in model] == [False, True, False]
    with pytest.raises(InputError, match="no module 'up' to compile"):
        apply([ss.CompiledBlocks(blocks=("up",))], model, sgd(model), loss=loss)


def test_a_model_without_blocks_is_told() -> None:
    model = nn.Sequential(nn.Linear(WIDE, WIDE))
    with pytest.warns(NoEffectWarning, match="no repeated blocks"):
        step_of(model)


def test_it_is_planned_with_only_where_it_is_named() -> None:
    class Step:
        accounting, model = "device", model_of(Chain)

    (offer,) = ss.CompiledBlocks.offers(Step())  # type: ignore[arg-type]
    at = ss.techniques.claims.Circumstances("cuda")
    assert not Allowed.of("near").permits(offer, at)
    assert Allowed.of("lossless, compiled_blocks").permits(offer, at)
    assert Allowed.of("exact").wider([offer], at) == []


def test_it_can_be_written_down() -> None:
    plan = ss.Plan([ss.CompiledBlocks(blocks=("0", "1"))])
    assert ss.Plan.from_dict(plan.to_dict()) == plan
    assert ss.CompiledBlocks.from_flags({"compile_blocks": True}) == ss.CompiledBlocks()


def test_fused_functions_launch_no_kernel() -> None:
    """Product, sine and cosine are part of tanh's kernel."""
    trace = trace_plan(
        ss.Plan([ss.CompiledBlocks()]), model_of(Chain), batch(), loss=loss, optimizer=None
    )
    ran = [op.name for op in trace.forward_ops if op.times]
    assert [ran.count(f"aten.{name}") for name in ("mul", "sin", "cos", "tanh")] == [0, 0, 0, COUNT]


def test_schedules_beside_it_recompute_whole_blocks() -> None:
    option = Option(1, 1, 1, 1, Work(), Work(), Work())
    every = Stage("1", {"keep": option, "cheap": option, "lean": option})
    chain = Blocks(Stage("", {"keep": option}), (every, every), Stage("", {"keep": option}))
    left = _without_refused(chain, [ss.CompiledBlocks()], ss.Checkpointing.of)
    assert [set(stage.options) for stage in left.blocks] == [{"keep"}] * 2
    assert _without_refused(chain, [ss.Microbatching(2)], ss.Checkpointing.of) is chain


@pytest.mark.parametrize(
    "other",
    [
        ss.Microbatching(16),
        ss.GradientRelease(),
        *(
            pytest.param(one, marks=pytest.mark.slow, id=one.short())
            for one in (
                ss.Precision("bf16"),
                ss.Precision("fp16"),
                ss.OptimizerState(8, smallest=1),
                ss.Offload(smallest=1),
                ss.ActivationOffload("all", smallest=1),
                ss.ActivationOffload(smallest=1),
                ss.FusedUpdate(),
            )
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::shoestring.errors.NoEffectWarning")
def test_beside_others_it_takes_what_is_predicted(graphs: list[Any], other: ss.Technique) -> None:
    model = model_of(Chain)
    chosen = [ss.CompiledBlocks(), other]
    optimizer = torch.optim.Adam(model.parameters())
    given: dict[str, Any] = {"loss": loss, "optimizer": optimizer}
    predicted = predict_step(chosen, model, batch(), **given).peak_bytes
    step = apply(chosen, model, optimizer, loss=loss)
    step(batch())
    assert step.measure(batch()).peak_bytes == pytest.approx(predicted, rel=0.01)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="TorchInductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_compiled_code_takes_what_is_predicted() -> None:
    """By the allocator: no mode sees inside of compiled code."""
    x = batch().repeat(64, 1)
    model = model_of(Chain)
    plain = copy.deepcopy(model)
    predicted = predict_step([ss.CompiledBlocks()], model, x, loss=loss, optimizer="sgd-plain")
    step = step_of(model)
    for _ in range(2):
        step(x)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step(x)
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    made = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    now = peak = 0
    for event in made:
        now += event.nbytes()
        peak = max(peak, now)
    resident = x.nbytes + sum(p.nbytes for p in model.parameters())
    assert predicted.peak_bytes == pytest.approx(peak + resident, rel=0.02)
    reference = apply([], plain, sgd(plain), loss=loss)
    for _ in range(3):
        reference(x)
    for ours, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, its)
