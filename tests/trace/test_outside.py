"""What the loss uses beside the model stays as it is; single numbers can be read."""

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from shoestring.errors import TraceError
from shoestring.memory.live.measure import measure
from shoestring.memory.model import memory_profile
from shoestring.step.predict import predict_step
from shoestring.step.trace_step import trace_plan
from shoestring.techniques.plan import Plan
from shoestring.trace.tracing import trace_model

Use = Callable[[nn.Module, Tensor, Callable[..., Tensor], torch.optim.Optimizer], object]

USES: dict[str, Use] = {
    "cpu": lambda m, b, loss, o: trace_model(m, b, loss=loss, optimizer=o),
    "cuda": lambda m, b, loss, o: trace_model(m, b, loss=loss, optimizer=o, device="cuda"),
    "planned": lambda m, b, loss, o: trace_plan(Plan(), m, b, loss=loss, optimizer=o),
    "predicted": lambda m, b, loss, o: predict_step(Plan(), m, b, loss=loss, optimizer=o),
}


def discriminator() -> nn.Sequential:
    first = spectral_norm(nn.Linear(6, 8))
    return nn.Sequential(first, nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_other_modules_are_left_alone(use: Use) -> None:
    generator, other, real, mean = (
        nn.Linear(4, 6),
        discriminator(),
        torch.randn(5, 6),
        torch.ones(3),
    )
    other(real).mean().backward()
    other[3].zero_grad()  # some have a gradient, some have none
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    gradients = [p.grad for p in other.parameters()]
    values = [None if g is None else g.clone() for g in gradients]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        mean.mul_(0.9).add_(0.1)
        mean[1:].sub_(1)
        return F.softplus(-other(model(batch))).mean() + F.softplus(other(real)).mean()

    use(generator, torch.randn(5, 4), loss, torch.optim.Adam(generator.parameters()))
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for parameter, gradient, value in zip(other.parameters(), gradients, values, strict=True):
        assert parameter.grad is gradient
        assert value is None or torch.equal(value, parameter.grad)
    assert torch.equal(mean, torch.ones(3))
    assert all(p.grad is None for p in generator.parameters())


def test_failed_trace_leaves_other_modules_alone() -> None:
    other = nn.Linear(6, 1)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        other(model(batch)).mean().backward()
        raise ValueError("after a gradient")

    with pytest.raises(Exception, match="after a gradient"):
        trace_model(nn.Linear(4, 6), torch.randn(5, 4), loss=loss)
    assert other.weight.grad is None


def test_other_modules_are_counted_once() -> None:
    generator = nn.Linear(16, 32)
    other = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))
    batch, optimizer = torch.randn(64, 16), torch.optim.Adam(generator.parameters())

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return F.softplus(-other(model(batch))).mean()

    trace = trace_model(generator, batch, loss=loss, optimizer=optimizer)
    predicted = predict_step(Plan(), generator, batch, loss=loss, optimizer=optimizer).peak_bytes
    measured = measure(generator, batch, loss=loss, optimizer=optimizer).peak_bytes
    assert memory_profile(trace, "device").peak_bytes == predicted == measured


class LayerDrop(nn.Module):
    """Layers that are left out at random, as in BART, Whisper and Wav2Vec2."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            drawn = torch.rand([])
            if drawn < self.chance and self.training:
                continue
            x = layer(x)
        return x + 0 * x.mean()


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_single_draws_can_be_compared(use: Use) -> None:
    model = LayerDrop(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream = torch.get_rng_state()
    use(model, torch.ones(2, 4), lambda m, b: m(b).square().mean(), optimizer)
    assert torch.equal(torch.get_rng_state(), stream)


class Seen:
    """What a class holds is not put back."""

    draws: ClassVar[list[float]] = []


def test_draws_are_those_of_the_stream() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        Seen.draws.append(torch.rand([]).item())
        return model(batch).sum() * torch.zeros(())

    trace_model(nn.Linear(4, 2), torch.ones(3, 4), loss=loss)
    assert Seen.draws[0] == torch.rand([]).item()


def test_own_generators_do_not_move() -> None:
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum() * torch.rand([], generator=generator)

    trace_model(nn.Linear(4, 2), torch.ones(3, 4), loss=loss)
    assert torch.equal(generator.get_state(), before)


def test_what_depends_on_the_batch_is_still_unknown() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        total = torch.zeros(())
        total += batch.sum()
        return model(batch).sum() if total > 0 else model(batch).mean()

    with pytest.raises(TraceError, match="reads the value of a tensor"):
        trace_model(nn.Linear(4, 2).to("meta"), torch.ones(3, 4), loss=loss)


# -- optimizers that read values -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["NAdam", "Adafactor", "ASGD"])
def test_optimizers_that_read_their_state(kind: str) -> None:
    """ASGD copies while the weight of its mean, which it reads, is one."""
    model, batch = nn.Linear(64, 64), torch.randn(8, 64)
    optimizer = getattr(torch.optim, kind)(model.parameters())

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    trace = trace_model(model, batch, loss=loss, optimizer=optimizer)
    predicted = predict_step(Plan(), model, batch, loss=loss, optimizer=optimizer).peak_bytes
    measured = measure(model, batch, loss=loss, optimizer=optimizer).peak_bytes
    assert memory_profile(trace, "device").peak_bytes == predicted == measured
