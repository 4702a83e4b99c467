"""Weights on the host: in files beside the CPU, brought and written back beside a GPU."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoestring as ss
from shoestring.errors import BudgetError, InputError, NoEffectWarning
from shoestring.step.predict import predict_step
from shoestring.techniques import host, offload, weight_offload
from shoestring.techniques.weight_offload.parameters import weight_on_host
from shoestring.trace.graph import Role
from shoestring.trace.places import is_elsewhere

BLOCKS, WIDTH = 4, 32
ON_HOST = ss.WeightOffload(smallest=1)


@pytest.fixture(params=["mapped", "streamed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As beside the CPU; and as beside a GPU, copies made at once."""
    if request.param == "streamed":
        stream(monkeypatch)
    return str(request.param)


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    stream(monkeypatch)


def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (weight_offload, offload):
        monkeypatch.setattr(module, "on_cuda", lambda tensor: True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), blocks, nn.Linear(WIDTH, 10))


def data(rows: int = 24) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), x[:, :10].argmax(1))


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
}


def trained(
    *plan: ss.Technique,
    build: Callable[[], nn.Module] = network,
    batch: Any = None,
    of: Callable[[nn.Module, Any], torch.Tensor] = loss,
    optimizer: str = "sgd",
) -> list[torch.Tensor]:
    """Losses, weights, buffers and the random stream after three steps."""
    model, batch = build(), data() if batch is None else batch
    step = ss.apply(plan, model, OPTIMIZERS[optimizer](model), loss=of)
    torch.manual_seed(3)
    losses = [step(batch).detach().clone() for _ in range(3)]
    state = [t.clone() for t in model.state_dict().values()]
    return [*losses, *state, torch.get_rng_state()]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=False)


BESIDE: dict[str, tuple[ss.Technique, ...]] = {
    "alone": (),
    "blocks": (ss.Checkpointing("residual-1"),),
    "pairs of blocks": (ss.Checkpointing("residual-2*"),),
    "cheap": (ss.Checkpointing("no-bn"),),
    "parts": (ss.Microbatching(8),),
    "released": (ss.GradientRelease(),),
    "released, blocks": (ss.GradientRelease(), ss.Checkpointing("residual-1")),
    "state on the host": (ss.Offload(smallest=1),),
    "all on the host": (ss.Offload(smallest=1), ss.GradientRelease(), ss.Microbatching(8)),
    "8-bit state": (ss.OptimizerState(8, smallest=1),),
    "activations on the host": (ss.ActivationOffload("all", smallest=1),),
    "bits": (ss.ActivationBits(4, smallest=1),),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("beside", BESIDE)
def test_equal_to_training_without(way: str, beside: str, optimizer: str) -> None:
    others = BESIDE[beside]
    expected = trained(*others, optimizer=optimizer)
    assert_equal(trained(ON_HOST, *others, optimizer=optimizer), expected)


@pytest.mark.parametrize("beside", BESIDE)
def test_the_predicted_peak_is_measured(way: str, beside: str) -> None:
    plan, model = [ON_HOST, *BESIDE[beside]], network()
    optimizer = OPTIMIZERS["adamw"](model)
    given: dict[str, Any] = {"loss": loss, "optimizer": optimizer}
    predicted = predict_step(plan, model, data(), **given).peak_bytes
    without = predict_step(BESIDE[beside], model, data(), **given).peak_bytes
    step = ss.apply(plan, model, optimizer, loss=loss)
    step(data())
    assert predicted == pytest.approx(step.measure(data()).peak_bytes, rel=0.01)
    weights = sum(p.nbytes for p in network().parameters())
    assert predicted < without - 0.4 * weights


# -- models that read their weights in other ways ------------------------------------------------


class Tied(nn.Module):
    """An embedding that is the head, too, and a weight that is read through views."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 8)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + sum(F.gelu(x @ expert) for expert in self.experts)
        x = torch.addmm(x.new_zeros(WIDTH), x.flatten(0, 1), self.mix.t()).view_as(x)
        return F.linear(x, self.embedding.weight)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 8, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x.view(4, -1, WIDTH))[0])


class Attention(nn.Module):
    """`nn.MultiheadAttention` reads the weight of its output layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.view(4, -1, WIDTH))


class Square(torch.autograd.Function):
    """A function that saves its weight itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ (weight * weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ (weight * weight).t(), 2 * weight * (x.t() @ gradient)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.normed = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.conv = nn.Conv1d(1, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.normed(Square.apply(x, self.weight))
        return self.conv(x.unsqueeze(1))


class Moving(nn.Module):
    """Codes that follow what was seen, written through `.data`, and through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.codes = nn.Parameter(torch.randn(8, WIDTH), requires_grad=False)
        self.total = nn.Parameter(torch.zeros(8, WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.into(x)
        nearest = (inside.detach() @ self.codes.t()).argmax(1)
        chosen = self.codes[nearest].clone()
        rows, later = self.total[:4], self.total.data
        with torch.no_grad():
            self.codes.data.mul_(0.9).add_(inside.mean(0))
            rows.add_(inside[:4])
            self.codes.detach()[0] = self.into.weight[0]
            later[5] += 1
        return self.out(inside + chosen + self.total.sum(0))


class Adapted(nn.Module):
    """Layers that do not train, with small ones that do."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(base(x) + up(down(x)))
        return x


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A gradient of a gradient, and a norm of the weights."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    decay = sum(p.square().sum() for p in model.parameters())
    return slope.square().mean() + 1e-3 * decay


def functional(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    scaled = {name: 0.5 * p for name, p in model.named_parameters()}
    return torch.func.functional_call(model, scaled, (x,)).square().mean()


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Softplus(), nn.Linear(16, 1))


STRANGERS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "tied": (Tied, torch.arange(16).view(2, 8), square),
    "recurrent": (Recurrent, data(), square),
    "attention": (Attention, data(), square),
    "custom": (Custom, data(), square),
    "moving": (Moving, data(), square),
    "adapted": (Adapted, data(), square),
    "penalty": (smooth, data(), penalty),
    "functional": (smooth, data(), functional),
}


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("kind", STRANGERS)
def test_models_that_read_weights_in_other_ways(streamed: None, kind: str, released: bool) -> None:
    make, batch, of = STRANGERS[kind]

    def build() -> nn.Module:
        torch.manual_seed(5)
        return make()

    others = [ss.GradientRelease()] * released
    given: dict[str, Any] = {"build": build, "batch": batch, "of": of, "optimizer": "adamw"}
    assert_equal(trained(ON_HOST, *others, **given), trained(*others, **given))
    model = build()
    optimizer = OPTIMIZERS["adamw"](model)
    predicted = predict_step([ON_HOST, *others], model, batch, loss=of, optimizer=optimizer)
    step = ss.apply([ON_HOST, *others], model, optimizer, loss=of)
    step(batch)
    assert predicted.peak_bytes == pytest.approx(step.measure(batch).peak_bytes, rel=0.01)


class Positionwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


@pytest.mark.parametrize("others", [(), (ss.Checkpointing("residual-1"),)], ids=["kept", "ours"])
def test_mlps_in_tiles(streamed: None, others: tuple[ss.Technique, ...]) -> None:
    """MLPs are found by running them on fake tensors, while their weights are still there."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Positionwise() for _ in range(3)), nn.Linear(WIDTH, 10))

    plan = (ss.TiledMLP(8), *others)
    given: dict[str, Any] = {"build": build, "optimizer": "adamw"}
    assert_equal(trained(ON_HOST, *plan, **given), trained(*plan, **given))
    model = build()
    own = OPTIMIZERS["adamw"](model)
    predicted = predict_step([ON_HOST, *plan], model, data(), loss=loss, optimizer=own).peak_bytes
    step = ss.apply([ON_HOST, *plan], model, own, loss=loss)
    step(data())
    assert predicted == pytest.approx(step.measure(data()).peak_bytes, rel=0.01)


class Recomputing(nn.Sequential):
    """With PyTorch's own checkpointing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self:
            x = checkpoint(part, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("plan", [(), (ss.Checkpointing("residual-1"),)], ids=["own", "ours"])
def test_frozen_weights_of_blocks_that_are_recomputed(
    streamed: None, plan: tuple[ss.Technique, ...]
) -> None:
    """Recomputation holds what is saved again until backward reads it."""

    def build() -> nn.Module:
        model = network()
        for block in model[1]:  # type: ignore[union-attr]
            block.up.requires_grad_(False)
            block.norm.weight.requires_grad_(False)
        return model if plan else Recomputing(*model)

    assert_equal(trained(ON_HOST, *plan, build=build), trained(*plan, build=build))
    model = build()
    optimizer = OPTIMIZERS["sgd"](model)
    predicted = predict_step([ON_HOST, *plan], model, data(), loss=loss, optimizer=optimizer)
    step = ss.apply([ON_HOST, *plan], model, optimizer, loss=loss)
    step(data())
    assert predicted.peak_bytes == pytest.approx(step.measure(data()).peak_bytes, rel=0.01)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", [(ON_HOST,), (ss.Offload(smallest=1), ss.FusedUpdate())], ids=str)
def test_transposed_weights_keep_their_layout(
    plan: tuple[ss.Technique, ...], optimizer: str
) -> None:
    """A fused update takes weight, gradient and state in the order of their memory."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, 10)
        model.weight = nn.Parameter(torch.randn(WIDTH, 10).t())
        return model

    given: dict[str, Any] = {"build": build, "optimizer": optimizer}
    expected = trained(*plan[1:], **given)
    assert_equal(trained(*plan, **given), expected)


def test_other_optimizers_update_weights_where_they_are(streamed: None) -> None:
    def run(*plan: ss.Technique) -> list[torch.Tensor]:
        model = Adapted()
        model.load_state_dict(start)
        step = ss.apply(plan, model, torch.optim.Adafactor(model.parameters()), loss=square)
        return [step(data()), step(data()), *model.state_dict().values()]

    start = Adapted().state_dict()
    assert_equal(run(ON_HOST), run())


# -- a model whose weights are away --------------------------------------------------------------


def away(optimizer: str = "adamw") -> tuple[ss.Step, nn.Module]:
    model = network()
    step = ss.apply([ON_HOST], model, OPTIMIZERS[optimizer](model), loss=loss)
    step(data())
    return step, model


def test_weights_are_there_for_whoever_reads_them(streamed: None) -> None:
    _, model = away()
    expected = dict(zip(model.state_dict(), trained_once(), strict=True))
    model.eval()
    twin = network().eval()
    twin.load_state_dict(expected)
    assert torch.equal(model(data()), twin(data()))
    with torch.inference_mode():
        assert torch.equal(model(data()), twin(data()))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name])
        assert parameter.norm() == expected[name].norm() and parameter.isfinite().all()
        assert parameter.shape == expected[name].shape and parameter.is_contiguous()
        assert type(copy.deepcopy(parameter)) is nn.Parameter
    copied = copy.deepcopy(model)
    assert torch.equal(copied(data()), twin(data()))
    held = io.BytesIO()
    torch.save(model.state_dict(), held)
    held.seek(0)
    loaded = torch.load(held)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def trained_once() -> list[torch.Tensor]:
    model = network()
    step = ss.apply([], model, OPTIMIZERS["adamw"](model), loss=loss)
    step(data())
    return [t.clone() for t in model.state_dict().values()]


def test_gradients_outside_of_the_step(streamed: None) -> None:
    """Of the user's own, for which no hooks of the step are in force."""
    _, model = away()
    twin = network()
    twin.load_state_dict(model.state_dict())
    for one in (model, twin):
        one.eval()
        loss(one, data()).backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]


def test_what_is_written_or_loaded_is_kept(streamed: None) -> None:
    step, model = away()
    with torch.no_grad():
        first = next(model.parameters())
        first.mul_(2).add_(1)
        torch._foreach_zero_(list(model.parameters())[2:4])
    own = {name: t.clone() for name, t in model.state_dict().items()}
    assert own["0.weight"].isfinite().all() and not list(own.values())[2].any()
    model.load_state_dict(network().state_dict())
    fresh = network().state_dict()
    assert all(torch.equal(t, fresh[name]) for name, t in model.state_dict().items())
    step(data())
    assert not any(torch.equal(t, fresh[name]) for name, t in model.state_dict().items())


def test_snapshots_load_with_and_without(streamed: None) -> None:
    step, _ = away()
    state = copy.deepcopy(step.state_dict())
    model = network()
    plain = ss.apply([], model, OPTIMIZERS["adamw"](model), loss=loss)
    plain.load_state_dict(state)
    for one in (step, plain):
        torch.manual_seed(7)
        one(data())
    assert_equal(list(step.model.state_dict().values()), list(model.state_dict().values()))


def test_a_weight_that_changes_between_the_passes_is_an_error(streamed: None) -> None:
    _, model = away()
    linear = model[0]
    out = linear(data().requires_grad_())
    with torch.no_grad():
        linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place after it was saved"):
        out.sum().backward()


def test_weights_that_are_read_past_functions_are_told(streamed: None) -> None:
    stacked = nn.Module()
    stacked.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH))

    def mapped(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        each = torch.vmap(lambda weight, x: x @ weight, in_dims=(0, None))
        return each(model.weight, x).square().mean()

    step = ss.apply([ON_HOST], stacked, OPTIMIZERS["sgd"](stacked), loss=mapped)
    before = stacked.weight.clone()
    with pytest.raises(InputError, match="past PyTorch's functions"):
        step(data())
    assert torch.equal(stacked.weight, before)


def test_between_calls_nothing_is_on_the_device(streamed: None) -> None:
    _, model = away()
    held = [p.untyped_storage().nbytes() for p in model.parameters()]
    assert max(held) == 4
    weight = weight_on_host(model[0].weight)
    assert weight is not None and (weight.here is None or weight.here() is None)


def test_what_fails_later_takes_it_back(way: str) -> None:
    class Fails(ss.GradientRelease):
        def apply(self, setup: Any) -> None:
            raise InputError("no")

    model = network()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    kinds = [type(p) for p in model.parameters()]
    with pytest.raises(InputError):
        ss.apply([ON_HOST, Fails()], model, OPTIMIZERS["sgd"](model), loss=loss)
    assert [type(p) for p in model.parameters()] == kinds
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not model._state_dict_pre_hooks and not model._state_dict_hooks


# -- plans ---------------------------------------------------------------------------------------


def test_a_share_leaves_evenly_apart() -> None:
    model = network()
    chosen = ss.WeightOffload(share=0.5, smallest=1)._leaving(model.parameters())
    numbers = [i for i, p in enumerate(model.parameters()) if any(p is c for c in chosen)]
    assert numbers == list(range(1, len(list(model.parameters())), 2))


def deep() -> nn.Module:
    """Weights are most of what it holds."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))


def test_it_is_planned_where_nothing_else_is_enough() -> None:
    model, x = deep().requires_grad_(False), torch.randn(4, 512)
    model[-1].requires_grad_(True)
    given: dict[str, Any] = {
        "loss": lambda m, x: m(x).square().mean(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    with pytest.raises(BudgetError):
        ss.plan(model, x, **given, budget="1 MB", allow="lossless")
    plan = ss.plan(model, x, **given, budget="6 MB", allow="lossless")
    assert any(isinstance(t, ss.WeightOffload) for t in plan.techniques)
    assert plan.kind == "lossless" and plan.predicted.peak_bytes <= 6e6
    assert ss.verify(plan, model, [x], **given).ok
    step = ss.apply(plan, model, given["optimizer"], loss=given["loss"])
    step(x)
    assert step.measure(x).peak_bytes <= 6e6


def test_it_is_planned_for_cuda() -> None:
    model, x = deep(), torch.randn(4, 512)
    given: dict[str, Any] = {
        "loss": lambda m, x: m(x).square().mean(),
        "optimizer": torch.optim.AdamW(model.parameters()),
    }
    techniques = [ss.WeightOffload(), ss.GradientRelease()]
    plain = ss.profile(model, x, **given, accounting="device", device="cuda")
    found = ss.profile(model, x, **given, accounting="device", device="cuda", techniques=techniques)
    weights = sum(p.nbytes for p in model.parameters())
    assert found.peak_bytes < plain.peak_bytes - 1.2 * weights


def test_the_reports_accounting_counts_one_weight() -> None:
    model, x = deep(), torch.randn(4, 512)
    given: dict[str, Any] = {"loss": lambda m, x: m(x).square().mean(), "optimizer": "sgd"}
    plain = ss.profile(model, x, **given)
    found = ss.profile(model, x, **given, techniques=[ss.WeightOffload()])
    assert plain.bytes_by_role[Role.MODEL] - found.bytes_by_role[Role.MODEL] == 7 * 4 * 512 * 512


# -- refusals ------------------------------------------------------------------------------------


def test_refused_before_anything_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = OPTIMIZERS["sgd"](model)
    for bad in (0, 1.5, True, "all"):
        with pytest.raises(InputError):
            ss.WeightOffload(share=bad)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="cannot follow elements"):
        ss.apply([ON_HOST, ss.Sparsity(0.5)], model, optimizer, loss=loss)
    monkeypatch.setattr(host, "in_memory", lambda folder: True)
    with pytest.raises(InputError, match="lies in memory"):
        ss.apply([ss.WeightOffload(smallest=1, folder=str(tmp_path))], model, optimizer, loss=loss)
    monkeypatch.undo()
    full = type(host.shutil.disk_usage("/"))(1, 1, 100)
    monkeypatch.setattr(host.shutil, "disk_usage", lambda folder: full)
    with pytest.raises(InputError, match=r"weights of .* has no room"):
        ss.apply([ON_HOST], model, optimizer, loss=loss)
    monkeypatch.undo()
    model[0].compile(backend="eager")
    with pytest.raises(InputError, match="compiled"):
        ss.apply([ON_HOST], model, optimizer, loss=loss)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="as Linux has it")
def test_a_disk_that_fills_is_said_and_nothing_changes(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    optimizer = OPTIMIZERS["sgd"](model)
    before = {n: (id(p), p.detach().clone()) for n, p in model.named_parameters()}
    given, left = os.posix_fallocate, iter(range(5))

    def full(file: int, start: int, nbytes: int) -> None:
        if next(left, None) is None:
            raise OSError(28, "No space left on device")
        given(file, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match=r"^no room for the weights .*No space left") as said:
        ss.apply([ON_HOST, ss.GradientRelease()], model, optimizer, loss=loss)
    assert "\n" not in str(said.value)
    for name, parameter in model.named_parameters():
        own, numbers = before[name]
        assert id(parameter) == own and type(parameter) is nn.Parameter
        assert torch.equal(parameter, numbers) and not parameter._post_accumulate_grad_hooks
    assert not any(map(is_elsewhere, model.parameters()))
    ss.apply([], model, optimizer, loss=loss)(data())


def test_it_says_so_where_nothing_moves() -> None:
    model = network()
    with pytest.warns(NoEffectWarning, match="no floating-point weight"):
        ss.apply([ss.WeightOffload()], model, OPTIMIZERS["sgd"](model), loss=loss)
