"""Saved activations in few bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from shoestring.errors import InputError, NoEffectWarning
from shoestring.kernels.rounding import Noise
from shoestring.step.predict import predict_step
from shoestring.techniques import activation_bits as technique
from shoestring.techniques.activation_bits.saving import SavedInBits, SavingInBits

BITS = (8, 4, 2)


def network(width: int = 48) -> nn.Module:
    torch.manual_seed(0)
    layers = ([nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()] for _ in range(4))
    return nn.Sequential(*(layer for some in layers for layer in some))


def data(rows: int = 64, width: int = 48) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def loss(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    return (model(given) - given).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def step_of(*plan: ss.Technique, model: nn.Module | None = None) -> ss.Step:
    model = model or network()
    return ss.apply(plan, model, sgd(model), loss=loss)


# -- codes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [1, 255, 256, 5000])
def test_a_code_is_one_of_its_neighbors(bits: int, count: int) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(bits))
    noise = Noise(x.device, 0)
    made = SavedInBits(x, bits, noise).value()
    for start in range(0, count, 256):
        part, found = x[start : start + 256], made[start : start + 256]
        step = (part.max() - part.min()) / (2**bits - 1)
        assert (part - found).abs().max() <= step * 1.0001
        torch.testing.assert_close(found.min(), part.min())
        torch.testing.assert_close(found.max(), part.max())


@pytest.mark.parametrize("bits", BITS)
def test_the_mean_of_many_is_the_number(bits: int) -> None:
    x = torch.randn(512, generator=torch.Generator().manual_seed(3))
    noise = Noise(x.device, 0)
    many = torch.stack([SavedInBits(x, bits, noise).value() for _ in range(600)])
    step = (x.max() - x.min()) / (2**bits - 1)
    assert (many.mean(0) - x).abs().max() < 5 * step / 2 / 600**0.5
    assert many.std(0).max() > 0.1 * step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layouts_and_types_come_back(dtype: torch.dtype) -> None:
    noise = Noise(torch.device("cpu"), 0)
    whole = torch.randn(3, 8, 5, 7).to(dtype)
    last = whole.contiguous(memory_format=torch.channels_last)
    for given in (whole, last, whole.transpose(1, 3), whole[:, ::2], whole.half().to(dtype)[1:]):
        made = SavedInBits(given, 8, noise).value()
        assert made.dtype == dtype and made.shape == given.shape
        torch.testing.assert_close(made, given, atol=0.05, rtol=0.02)
    assert SavedInBits(last, 8, noise).value().stride() == last.stride()


def test_two_values_stay_what_they_are() -> None:
    """As in a dropout mask."""
    noise = Noise(torch.device("cpu"), 0)
    mask = (torch.rand(3000) < 0.5).float() / 0.9
    torch.testing.assert_close(SavedInBits(mask, 2, noise).value(), mask)
    for constant in (torch.zeros(300), torch.full((300,), 1.5)):
        assert torch.equal(SavedInBits(constant, 2, noise).value(), constant)


def test_what_is_not_finite_is_not_hidden() -> None:
    noise = Noise(torch.device("cpu"), 0)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.randn(600)
        x[300] = bad
        made = SavedInBits(x, 4, noise).value()
        assert not made[300].isfinite() and made[:256].isfinite().all()


# -- what is saved -----------------------------------------------------------------------------


def gradients(
    run: Any, *inputs: torch.Tensor, bits: int = 2, seed: int = 0
) -> tuple[list[torch.Tensor], int]:
    """Of all inputs, with what is saved in few bits; and how many tensors were."""
    model = nn.Module()
    given = [t.clone().requires_grad_() for t in inputs]
    with SavingInBits(model, (), bits, 1, Noise(torch.device("cpu"), seed)) as saved:
        out = run(*(t * 1 for t in given))
    return list(torch.autograd.grad(out.square().sum() / 2, given)), saved.rounded


@pytest.mark.parametrize(
    "function",
    [F.relu, torch.relu, F.leaky_relu, lambda x: x.clone().relu_()],
    ids=["relu", "torch-relu", "leaky-relu", "in-place"],
)
def test_signs_are_exact(function: Any) -> None:
    x = torch.randn(40, 40)
    x[0] = 0
    x[1] = 1e-6  # would be rounded to zero as often as not
    expected = torch.autograd.grad(
        (function(y := x.clone().requires_grad_()) * torch.arange(40.0)).sum(), y
    )[0]
    model = nn.Module()
    with SavingInBits(model, (), 2, 1, Noise(torch.device("cpu"), 0)) as saved:
        y = x.clone().requires_grad_()
        middle = function(y + 0.0)
    found = torch.autograd.grad((middle * torch.arange(40.0)).sum(), y)[0]
    assert torch.equal(found, expected) and saved.rounded == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.softmax(-1),
        lambda x: F.log_softmax(x, -1),
        lambda x: F.cross_entropy(x, torch.arange(40) % 40)[None],
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
        lambda x: x.exp(),
        lambda x: F.hardtanh(x),
    ],
    ids=["softmax", "log_softmax", "cross_entropy", "attention", "exp", "hardtanh"],
)
def test_what_bends_sharply_is_kept_whole(function: Any) -> None:
    x = torch.randn(40, 40)
    y = x.clone().requires_grad_()
    expected = torch.autograd.grad(function(y).square().sum() / 2, y)[0]
    with SavingInBits(nn.Module(), (), 2, 1, Noise(torch.device("cpu"), 0)) as saved:
        y = x.clone().requires_grad_()
        out = function(y + 0.0)
    found = torch.autograd.grad(out.square().sum() / 2, y)[0]
    assert torch.equal(found, expected) and saved.rounded == 0


def test_one_tensor_is_rounded_once_and_not_where_it_is_kept_whole() -> None:
    def three(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w[0] + x @ w[1] + F.linear(x, w[2])

    _, rounded = gradients(three, torch.randn(20, 30), torch.randn(3, 30, 30))
    assert rounded == 1 + 2  # and two factors; the third is a layer's weight

    def after_softmax(x: torch.Tensor) -> torch.Tensor:
        p = x.softmax(-1)
        return p @ p.detach().mT

    _, rounded = gradients(after_softmax, torch.randn(20, 30))
    assert rounded == 0


def test_a_storage_that_comes_again_is_another_tensor() -> None:
    """Addresses are reused: codes of a tensor that is gone must not be found for a new one."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        total = x.sum()
        for scale in range(1, 30):
            with torch.no_grad():
                mask = torch.full((2000,), float(scale))
            total = total + (x * mask).sum()
            del mask
        return total[None]

    x = torch.ones(2000)
    given = x.clone().requires_grad_()
    expected = torch.autograd.grad(chain(given).square().sum() / 2, given)[0]
    torch.testing.assert_close(gradients(chain, x)[0][0], expected)


def test_parameters_and_the_batch_are_not_rounded() -> None:
    model, x = nn.Linear(48, 48), data()
    with SavingInBits(model, x, 2, 1, Noise(torch.device("cpu"), 0)) as saved:
        model(x).sum().backward()
    assert saved.rounded == 0
    with (
        SavingInBits(model, x, 2, 1, Noise(torch.device("cpu"), 0)) as saved,
        torch.autocast("cpu", torch.bfloat16),
    ):
        model(model(x)).sum().backward()
    assert saved.rounded == 2  # inputs, cast; weights, cast, are kept


# -- training ----------------------------------------------------------------------------------


def test_gradients_are_right_on_average() -> None:
    model, x = network(), data()
    loss(model, x).backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    noise, total, count = Noise(x.device, 0), [torch.zeros_like(g) for g in plain], 60
    for _ in range(count):
        model.zero_grad()
        with SavingInBits(model, x, 4, 1, noise):
            value = loss(model, x)
        value.backward()
        for sum_, parameter in zip(total, model.parameters(), strict=True):
            sum_ += parameter.grad
    alone = max(
        float((p.grad - g).norm() / g.norm())
        for p, g in zip(model.parameters(), plain, strict=True)
    )
    mean = max(float((s / count - g).norm() / g.norm()) for s, g in zip(total, plain, strict=True))
    assert alone > 0.02
    assert mean < max(0.02, alone / 4)


@pytest.mark.parametrize("bits", BITS)
def test_the_forward_pass_is_the_plain_one(bits: int) -> None:
    assert torch.equal(step_of()(data()), step_of(ss.ActivationBits(bits, smallest=1))(data()))


@pytest.mark.parametrize(
    ("others", "share"),
    [
        ((), 0.62),
        ((ss.Microbatching(256),), 0.95),
        ((ss.Checkpointing("every-2"),), 0.9),
        ((ss.Precision("bf16"),), 1.0),
        ((ss.GradientRelease(), ss.OptimizerState(8, smallest=1)), 0.7),
    ],
    ids=str,
)
def test_the_predicted_peak_is_measured(others: tuple[ss.Technique, ...], share: float) -> None:
    plan = [*others, ss.ActivationBits(4, smallest=1)]
    model, x = network(), data(1024)
    predicted = predict_step(plan, model, x, loss=loss, optimizer=sgd(model)).peak_bytes
    step, plain = step_of(*plan), step_of(*others)
    step(x), plain(x)
    measured = step.measure(x).peak_bytes
    assert measured == pytest.approx(predicted, rel=0.01)
    assert measured < share * plain.measure(x).peak_bytes


def test_a_kept_input_of_a_block_is_rounded() -> None:
    """It is what recomputation keeps, so both together need less than either."""
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.gelu(self.up(self.norm(x))))

    def peak(*plan: ss.Technique) -> int:
        model = nn.Sequential(*(Block() for _ in range(12)))
        step = ss.apply(plan, model, sgd(model), loss=loss)
        step(x)
        return step.measure(x).peak_bytes

    x = torch.randn(1024, 64)
    bits, recomputed = ss.ActivationBits(4), ss.Checkpointing("residual-1")
    alone = peak(recomputed)
    both = peak(bits, recomputed)
    assert both < alone - 4 * 0.8 * x.nbytes and both < peak(bits)


def test_snapshots_resume_to_the_bit(tmp_path: Path) -> None:
    bits = ss.ActivationBits(4, smallest=1)
    whole, half = step_of(bits), step_of(bits)
    for _ in range(4):
        whole(data())
    for _ in range(2):
        half(data())
    torch.save(half.state_dict(), tmp_path / "snapshot.pt")
    on = step_of(bits)
    on(data())
    on.load_state_dict(torch.load(tmp_path / "snapshot.pt"))
    for _ in range(2):
        on(data())
    for a, b in zip(whole.model.parameters(), on.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_it_is_certified_as_lossy() -> None:
    model = network()
    given: dict[str, Any] = {"loss": loss, "optimizer": sgd(model)}
    found = ss.verify([ss.ActivationBits(4, smallest=1)], model, [data()], **given)
    assert found.ok and found["gradients"].claim is ss.Level.LOSSY
    assert 0 < found["gradients"].error < 1
    both = [ss.ActivationBits(4, smallest=1), ss.Checkpointing("every-2")]
    found = ss.verify(both, model, [data()], **given)
    assert found.ok and found["checkpointing"].found is ss.Level.EQUAL


def test_it_trains() -> None:
    x = data(256)

    def last(*plan: ss.Technique) -> float:
        step = step_of(*plan)
        for _ in range(30):
            value = step(x)
        return float(value)

    plain = last()
    assert last(ss.ActivationBits(4, smallest=1)) < plain * 1.03
    assert last(ss.ActivationBits(2, smallest=1)) < plain * 1.2


def test_a_plan_uses_it_only_by_name() -> None:
    """A batch that cannot be cut, and no blocks: nothing lossless needs less than 1.9 MB."""

    def scaled(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
        return loss(model, given / given.std())

    model, x = network(), data(1024)
    given: dict[str, Any] = {"loss": scaled, "optimizer": sgd(model), "budget": "1.6 MB"}
    with pytest.raises(ss.BudgetError) as error:
        ss.plan(model, x, allow="lossless", **given)
    assert "allow " in str(error.value.hint)
    plan = ss.plan(model, x, allow="lossless,activation_bits", **given)
    assert [t.name for t in plan.techniques if t.name == "activation_bits"]
    assert plan.kind == "lossy"
    step = ss.apply(plan, model, sgd(model), loss=scaled)
    step(x)
    assert step.measure(x).peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("given", "said"),
    [({"bits": 3}, "no activations in 3 bits"), ({"smallest": 0}, "not a whole number")],
)
def test_bad_settings(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ss.ActivationBits(**given)


def test_nothing_large_warns() -> None:
    with pytest.warns(NoEffectWarning, match="8-bit activations: nothing of 4096 elements"):
        step_of(ss.ActivationBits(8))(data(4))


def test_its_readme_runs() -> None:
    text = Path(technique.__file__).with_name("README.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    exec(compile(code, "README.md", "exec"), {})


def test_a_weight_that_was_put_there_while_the_model_runs_is_not_rounded() -> None:
    """As ranks do that split a model: its parameters are others than those before."""

    class Turned(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.t()

    layer, x = Turned(8, 8, bias=False), torch.randn(4, 8, requires_grad=True)
    with SavingInBits(layer, x, 2, 1, Noise(torch.device("cpu"), 0)) as saved:
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        out = layer(x)
    assert saved.rounded == 0
    out.sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0).expand(4, 8))


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_last_piece_that_is_smaller_is_predicted(bits: int) -> None:
    """Pieces of 4,096, 4,096 and 1,024 elements: none is there while the next one is encoded."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    x, plan = torch.randn(144, 64), [ss.ActivationBits(bits, smallest=1)]
    given: Any = {"loss": lambda m, b: m(b).square().mean(), "optimizer": own}
    predicted = predict_step(plan, model, x, **given).peak_bytes
    step = ss.apply(plan, model, own, loss=given["loss"])
    step(x)
    assert step.measure(x).peak_bytes == pytest.approx(predicted, rel=1e-3)
