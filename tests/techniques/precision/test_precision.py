"""Training in 16 bits: what has which type, and that it learns what FP32 learns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from shoestring.errors import InputError, NoEffectWarning
from shoestring.step.predict import predict_step
from shoestring.techniques import Checkpointing, Microbatching, Precision, Sparsity
from shoestring.techniques.precision import blocks
from techniques.precision.precision_helpers import (
    OPTIMIZERS,
    OTHERS,
    assert_same,
    everything,
    make_step,
    own_state,
)
from techniques.small_models import SMALL

torch.set_num_threads(1)
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def trained(kind: str, name: str, optimizer: str, steps: int, *more: Any, **settings: Any) -> float:
    torch.manual_seed(0)
    small = SMALL[name]
    model, batch = small.build(), small.batch()
    made = (OPTIMIZERS | OTHERS)[optimizer](model.parameters())
    step = make_step(model, made, small.loss, Precision(kind, **settings), *more)
    torch.manual_seed(1)
    for _ in range(steps):
        value = step(batch)
    return value.item()


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_every_model_learns_what_it_learns_in_fp32(name, optimizer, kind):
    start, wide = (trained("fp32", name, optimizer, steps) for steps in (1, 25))
    narrow = trained(kind, name, optimizer, 25)
    assert wide < 0.98 * start
    allowed = 0.04 if kind == "fp16" else 0.15
    assert abs(narrow - wide) < allowed * start


@pytest.mark.parametrize("optimizer", OPTIMIZERS | OTHERS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_every_optimizer_learns_what_it_learns_in_fp32(optimizer, rounding):
    wide = trained("fp32", "mlp", optimizer, 40)
    narrow = trained("fp16", "mlp", optimizer, 40, rounding=rounding)
    assert abs(narrow - wide) < 0.02 * max(wide, 0.1)


@pytest.mark.parametrize("strategy", ["residual-1", "residual-2*", "no-bn", "every-2"])
def test_checkpointing_and_microbatching_on_top_change_little(strategy):
    more = Checkpointing(strategy), Microbatching(3, accumulate="compensated")
    wide = trained("fp32", "residual", "sgd", 15, *more)
    narrow = trained("fp16", "residual", "sgd", 15, *more)
    assert abs(narrow - wide) < 0.03 * wide
    plain = trained("fp16", "residual", "sgd", 15, more[1])
    assert narrow == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_quadratic_reaches_its_minimum(optimizer):
    target = torch.linspace(-1, 1, 64)

    def reached(kind: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(64, 1, bias=False)
        made = OPTIMIZERS[optimizer](model.parameters())
        for group in made.param_groups:
            group["weight_decay"] = 0.0

        def loss(m: nn.Module, b: torch.Tensor) -> torch.Tensor:
            return (m.weight[0].float() - b.float()).square().sum()

        step = make_step(model, made, loss, Precision(kind))
        for _ in range(800):
            value = step(target)
        return value

    assert reached("fp16") < reached("fp32") + 64 * (2.0**-9) ** 2


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_types_of_everything(kind, optimizer):
    small = SMALL["cnn"]
    model = small.build()
    seen: dict[str, Any] = {}
    hooks = [
        m.register_forward_hook(lambda m, i, o, n=n: seen.update({n: (i[0].dtype, o.dtype)}))
        for n, m in model.named_modules()
    ]
    made = OPTIMIZERS[optimizer](model.parameters())
    made.register_step_pre_hook(
        lambda *_: seen.update({n: p.grad.dtype for n, p in model.named_parameters()})
    )
    step = make_step(model, made, small.loss, Precision(kind))
    assert step(small.batch()).dtype is torch.float32
    for hook in hooks:
        hook.remove()
    norms = {f"{i}." for i, m in enumerate(model) if isinstance(m, nn.BatchNorm2d)}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        wide = any(name.startswith(norm) for norm in norms)
        if tensor.is_floating_point():
            assert tensor.dtype is (torch.float32 if wide else TYPES[kind]), name
            assert seen.get(name, tensor.dtype) is tensor.dtype, name
    assert seen["1"] == seen["4"] == (TYPES[kind], TYPES[kind])
    for parameter, state in made.state.items():
        for key, value in state.items():
            assert value.dim() == 0 or value.dtype is parameter.dtype, key


def test_integers_and_integer_buffers_are_left():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    model.register_buffer("count", torch.arange(3))
    model.register_buffer("mask", torch.tensor([0.0, -1e9, -torch.inf]))

    def loss(m: nn.Module, b: Any) -> torch.Tensor:
        assert b["tokens"].dtype is torch.int64 and b["x"].dtype is torch.float16
        assert b["flag"].dtype is torch.bool and b["words"] == "words"
        return F.mse_loss(m(b["tokens"]), b["x"])

    made = torch.optim.SGD(model.parameters(), lr=0.1)
    step = make_step(model, made, loss, Precision("fp16"))
    batch = {
        "tokens": torch.arange(5), "x": torch.zeros(5, 2), "flag": torch.ones(5).bool(),
        "words": "words",
    }  # fmt: skip
    step(batch)
    assert model.count.dtype is torch.int64
    assert model.mask.tolist() == [0.0, -65504.0, -torch.inf]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fp32_changes_no_bit(optimizer):
    small = SMALL["residual"]
    torch.manual_seed(0)
    model, batch = small.build(), small.batch()
    twin = copy.deepcopy(model)
    plain = make_step(model, OPTIMIZERS[optimizer](model.parameters()), small.loss)
    tried = make_step(twin, OPTIMIZERS[optimizer](twin.parameters()), small.loss, Precision("fp32"))
    for _ in range(3):
        assert torch.equal(plain(batch), tried(batch))
    assert_same(everything(plain), everything(tried))


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "amsgrad", "adamw", "sgd-damped"])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("fresh", [False, True])
def test_going_on_from_a_state_dict_is_exact(optimizer, kind, fresh):
    small = SMALL["residual"]
    torch.manual_seed(0)
    batch = small.batch()

    def begin() -> Any:
        torch.manual_seed(1)
        model = small.build()
        made = OPTIMIZERS[optimizer](model.parameters())
        settings = {"initial_scale": 2.0**30, "growth_interval": 3}
        return make_step(model, made, small.loss, Precision(kind, **settings))

    first = begin()
    for _ in range(0 if fresh else 20):
        first(batch)
    saved = copy.deepcopy(first.state_dict())
    second = begin()
    second.load_state_dict(saved)
    assert_same(everything(first), everything(second))
    for _ in range(4):
        assert torch.equal(first(batch), second(batch))
    assert_same(everything(first), everything(second))
    for key, value in own_state(first).items():
        assert torch.equal(value, own_state(second)[key]), key


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("how", ["before", "loaded"])
def test_state_of_an_fp32_run_goes_on(optimizer, how):
    """With state, whether it was there before or comes from a file, steps are as in FP32."""
    small = SMALL["mlp"]
    torch.manual_seed(0)
    model, batch = small.build(), small.batch()
    made = OPTIMIZERS[optimizer](model.parameters())
    plain = make_step(model, made, small.loss)
    for _ in range(30):
        plain(batch)
    twin = copy.deepcopy(model)
    other = OPTIMIZERS[optimizer](twin.parameters())
    if how == "before":
        other.load_state_dict(made.state_dict())
    step = make_step(twin, other, small.loss, Precision("fp16"))
    if how == "loaded":
        other.load_state_dict(made.state_dict())
    for _ in range(10):
        wide, narrow = plain(batch), step(batch)
    assert narrow.item() == pytest.approx(wide.item(), rel=0.02)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert q.dtype is torch.float16 and torch.allclose(p, q.float(), atol=2e-3)


def test_schedulers_groups_and_hooks_are_honoured():
    """The rate falls to nothing: no weight moves any more; a group without rate never does."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    made = torch.optim.Adam(
        [
            {"params": model[0].parameters(), "lr": 0.0},
            {"params": model[1].parameters(), "lr": 0.1},
        ],
    )
    called: list[str] = []
    made.register_step_pre_hook(lambda *_: called.append("pre"))
    made.register_step_post_hook(lambda *_: called.append("post"))
    rates = torch.optim.lr_scheduler.LambdaLR(made, lambda n: 1.0 if n < 2 else 0.0)
    step = make_step(model, made, lambda m, b: m(b).square().mean(), Precision("fp16"))
    frozen = model[0].weight.detach().clone()
    moved = []
    for _ in range(4):
        before = model[1].weight.detach().clone()
        step(torch.randn(8, 4))
        rates.step()
        moved.append((before - model[1].weight).abs().max().item())
    assert moved[0] > 0.05 and moved[1] > 0 and moved[2:] == [0.0, 0.0]
    assert torch.equal(frozen, model[0].weight)
    assert called == ["pre", "post"] * 4


def test_a_failure_later_leaves_everything_as_it_was(monkeypatch):
    small = SMALL["residual"]
    model = small.build()
    made = OPTIMIZERS["adam"](model.parameters())
    plain = make_step(model, made, small.loss)
    plain(small.batch())
    before = everything(plain)

    def fail(self: Microbatching, setup: Any) -> None:
        raise RuntimeError("stop")

    monkeypatch.setattr(Microbatching, "apply", fail)
    with pytest.raises(RuntimeError, match="stop"):
        make_step(model, made, small.loss, Precision("fp16"), Microbatching(2))
    assert_same(before, everything(plain))


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps
        super().step()


class InGroup(torch.optim.SGD):
    """Counts them in its groups."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / group["steps"])


class Bounded(torch.optim.SGD):
    """Looks at all gradients together."""

    def step(self, closure: Any = None) -> None:
        held = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(held, 0.1)
        super().step()


class Signs(torch.optim.SGD):
    """Each parameter by itself."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                p.data.sub_(p.grad.sign(), alpha=0.01 / state["step"])


@pytest.mark.parametrize("kind", [Counting, InGroup, Bounded, Signs])
def test_an_update_that_needs_more_than_one_parameter_is_refused(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    batch = torch.randn(4, 8)
    optimizer = kind(model.parameters(), lr=0.1)

    def loss(m: nn.Module, b: Any) -> torch.Tensor:
        return m(b).square().mean()

    if kind is Signs:
        make_step(model, optimizer, loss, Precision("fp16"))(batch)
        return
    with pytest.raises(InputError, match=f"{kind.__name__} needs more than a parameter's grad"):
        make_step(model, optimizer, loss, Precision("fp16"))
    with pytest.raises(InputError, match="needs more"):
        predict_step([Precision("fp16")], model, batch, loss=loss, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1 and not optimizer.state


def clips(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    optimizer.register_step_pre_hook(clip)


@pytest.mark.parametrize(
    "hook",
    [
        clips,
        lambda model, _: model[0].weight.register_hook(lambda g: g.clamp(-1, 1)),
        lambda model, _: model[1].register_full_backward_hook(lambda m, given, made: None),
    ],
)
def test_no_hook_sees_scaled_gradients(hook: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook(model, optimizer)

    def loss(m: nn.Module, b: Any) -> torch.Tensor:
        return m(b).square().mean()

    with pytest.raises(InputError, match="would see gradients times FP16's loss scale"):
        make_step(model, optimizer, loss, Precision("fp16"))(torch.randn(4, 8))


def test_what_cannot_be_done_is_said_first():
    model = nn.Linear(2, 2)

    def made() -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(m: nn.Module, b: Any) -> torch.Tensor:
        return m(b).mean()

    with pytest.raises(InputError, match="runs the loss by itself"):
        make_step(model, torch.optim.LBFGS(model.parameters()), loss, Precision("fp16"))
    with pytest.raises(InputError, match="not the model's"):
        strange = [*model.parameters(), *nn.Linear(2, 2).parameters()]
        make_step(model, torch.optim.SGD(strange, lr=0.1), loss, Precision("fp16"))
    with pytest.raises(InputError, match="sparse gradients"):
        table = nn.Embedding(3, 2, sparse=True)
        make_step(table, torch.optim.SGD(table.parameters(), lr=0.1), loss, Precision("fp16"))
    loss(model, torch.ones(1, 2)).backward()
    with pytest.raises(InputError, match="gradients from before"):
        make_step(model, made(), loss, Precision("fp16"))
    assert model.weight.dtype is torch.float32
    model.zero_grad()

    def mixed(m: nn.Module, b: Any) -> torch.Tensor:
        return m(torch.zeros(3, 2)).mean()

    step = make_step(model, made(), mixed, Precision("fp16"))
    with pytest.raises(InputError, match="mixes FP16 with another type"):
        step(torch.ones(1, 2))


def test_an_operation_without_a_kernel_is_named():
    model = nn.Linear(2, 4)

    def loss(m: nn.Module, b: Any) -> torch.Tensor:
        return F.ctc_loss(
            m(b).log_softmax(-1), torch.ones(2, 1, dtype=torch.long), torch.tensor([5, 5]),
            torch.tensor([1, 1]),
        )  # fmt: skip

    made = torch.optim.SGD(model.parameters(), lr=0.1)
    step = make_step(model, made, loss, Precision("fp16"))
    with pytest.raises(InputError, match=r"ctc_loss_cpu, which has no FP16 kernel"):
        step(torch.randn(5, 2, 2))


def test_a_model_of_nothing_but_batch_norm_is_told():
    model = nn.BatchNorm1d(3)
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(NoEffectWarning, match="outside BatchNorm"):
        make_step(model, made, lambda m, b: m(b).sum(), Precision("fp16"))


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "fp8"}, {"kind": "fp16", "rounding": "up"}, {"kind": "fp16", "initial_scale": 0.0},
        {"kind": "fp16", "growth_interval": 0},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(InputError):
        Precision(**settings)


@pytest.mark.parametrize("name", ["residual", "tied", "lstm"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_sparse_weights_that_are_rewired_learn_in_16_bits_too(name, optimizer):
    sparsity = Sparsity(0.5, rewire_fraction=0.05, schedule=((1000, 3),))
    start, wide = (trained("fp32", name, optimizer, steps, sparsity) for steps in (1, 25))
    assert abs(trained("fp16", name, optimizer, 25, sparsity) - wide) < 0.04 * start


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("optimizer", ["adam", "amsgrad", "adamw", "sgd"])
def test_a_parameter_that_is_one_number_is_trained_too(optimizer, kind):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(16, 4)
            self.scale = torch.nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return self.linear(x) * self.scale

    torch.manual_seed(0)
    wide, batch = Scaled(), torch.randn(12, 16)
    narrow = copy.deepcopy(wide)
    for model, techniques in ((wide, ()), (narrow, (Precision(kind),))):
        made = OPTIMIZERS[optimizer](model.parameters())
        step = make_step(model, made, lambda m, b: m(b).float().square().mean(), *techniques)
        for _ in range(5):
            step(batch)
        step.load_state_dict(step.state_dict())
        step(batch)
    assert narrow.scale.dim() == 0
    assert narrow.scale.item() == pytest.approx(wide.scale.item(), abs=0.02)
    assert narrow.scale.item() != 1


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_blocks_that_stand_for_others_change_no_byte(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace has one block for those between the first and the last two of a large tensor."""
    model = nn.Sequential(nn.Linear(300, 700), nn.ReLU(), nn.Linear(700, 10))
    given: dict[str, Any] = {
        "loss": lambda m, b: m(b).square().mean(), "optimizer": optimizer,
        "accounting": "device", "techniques": [Precision("bf16")],
    }  # fmt: skip
    fewer = ss.profile(model, torch.randn(4, 300), **given)
    monkeypatch.setattr(blocks, "is_fake", lambda tensor: False)
    every = ss.profile(model, torch.randn(4, 300), **given)
    assert len(fewer.timeline.labels) < len(every.timeline.labels)
    assert fewer.peak_bytes == every.peak_bytes
    assert fewer.bytes_by_role == every.bytes_by_role
