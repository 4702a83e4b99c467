"""Adam's moments in FP16: what scaling saves, and how exactly they are stored."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.kernels.rounding import Noise
from shoestring.techniques import Precision
from shoestring.techniques.precision.blocks import Piece, UpdateBlock, blocks, cut, gather
from shoestring.techniques.precision.moments import MomentStorage, power_of_two
from shoestring.techniques.precision.update import NarrowUpdate
from techniques.precision.precision_helpers import OPTIMIZERS, make_step

torch.set_num_threads(1)


def path_of(monkeypatch: Any, kind: str, *, scaled: bool = True) -> torch.Tensor:
    """Weights over 60 steps of Adam under gradients of about 1e-4, whose squares FP16 lacks."""
    if not scaled:
        plain = functools.partial(NarrowUpdate, scaled_moments=False)
        monkeypatch.setattr("shoestring.techniques.precision.NarrowUpdate", plain)
    torch.manual_seed(0)
    model = nn.Linear(256, 1, bias=False)
    model.weight.data.zero_()
    made = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-12)

    def loss(m: nn.Module, b: torch.Tensor) -> torch.Tensor:
        return (m.weight * b).float().sum() * 1e-4

    step = make_step(model, made, loss, Precision(kind))
    weights = []
    for _ in range(60):
        step(1 + 0.5 * torch.randn(1, 256))
        weights.append(model.weight.detach().float().clone())
    return torch.stack(weights)


def test_without_scaled_moments_steps_explode(monkeypatch):
    wide = path_of(monkeypatch, "fp32")
    scaled = path_of(monkeypatch, "fp16")
    unscaled = path_of(monkeypatch, "fp16", scaled=False)
    assert (scaled - wide).abs().max() < 0.03 * wide.abs().max()
    assert (unscaled - wide).abs().max() > 2 * wide.abs().max()


class Stored:
    """One state tensor, stored as FP16."""

    def __init__(self, key: str, count: int) -> None:
        self.key, self.state = key, {}
        self.storage = MomentStorage(Noise(torch.device("cpu"), 0), scaled=True)
        like = torch.zeros(count, dtype=torch.float16)
        self.storage.make(self.state, key, like, 1)
        self.block = UpdateBlock({}, (key,), [Piece(like, ..., 0, True)])

    def write(self, value: torch.Tensor) -> None:
        wide = gather([value], torch.float32)
        self.storage.write(self.block, [self.state], self.key, wide, None)

    def read(self) -> torch.Tensor:
        return self.storage.read(self.block, [self.state], self.key).whole


@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 1e-4, 1.0, 1e6, 1e18])
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_any_magnitude_is_stored_to_eleven_bits(magnitude, key):
    torch.manual_seed(0)
    value = torch.rand(1000).add(0.01).mul(magnitude)
    stored = Stored(key, 1000)
    stored.write(value)
    allowed = 2.0**-9 if key == "exp_avg_sq" else 2.0**-10
    assert ((stored.read() - value).abs() / value).max() <= allowed * 1.001
    assert stored.state[key].dtype is stored.state[key + "_exponent"].dtype is torch.float16


def test_second_moments_span_the_range_of_the_gradients():
    """Roots of second moments: gradients a millionth of the largest keep theirs."""
    stored = Stored("exp_avg_sq", 3)
    stored.write(torch.tensor([1.0, 1e-6, 0.0]).square())
    again = stored.read()
    assert again[1] == pytest.approx(1e-12, rel=1e-2) and again[2] == 0


def test_a_slow_average_does_not_stand_still():
    """β₂ = 0.9999 moves a second moment by less than half an ulp a step."""
    stored = Stored("exp_avg_sq", 400)
    stored.write(torch.ones(400))
    for _ in range(3000):
        stored.write(stored.read() * 0.9999)
    assert stored.read().mean().item() == pytest.approx(0.9999**3000, rel=0.01)


def test_blocks_hold_every_row_once_and_join_what_is_alike():
    a, b, c, d = torch.zeros(10, 6), torch.zeros(7), torch.zeros(()), torch.zeros(40, 1)
    one: dict[str, Any] = {}
    other: dict[str, Any] = {}
    work = [
        (group, (), tensor, cut(tensor, 20))
        for group, tensor in ((one, a), (one, b), (other, c), (one, d))
    ]
    made = list(blocks(work, 20))
    assert sorted([p.narrow.numel() for p in block.pieces] for block in made) == [
        [1], [6, 7], [18], [18], [18], [20], [20],
    ]  # fmt: skip
    assert [p.last for block in made for p in block.pieces if p.parameter is a] == [
        False, False, False, True,
    ]  # fmt: skip


def test_powers_of_two_are_exact():
    exponents = torch.arange(-120, 121)
    assert power_of_two(exponents.half()).tolist() == [2.0**e for e in range(-120, 121)]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "amsgrad", "adamw", "sgd-damped"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_blocks_change_nothing_but_the_exponents(monkeypatch, optimizer, memory_format):
    def trained(block_elements: int) -> Any:
        monkeypatch.setattr(
            "shoestring.techniques.precision.update.block_elements", lambda total: block_elements
        )
        torch.manual_seed(0)
        model = nn.Conv2d(4, 10, 3).to(memory_format=memory_format)
        made = OPTIMIZERS[optimizer](model.parameters())
        step = make_step(model, made, lambda m, b: m(b).float().square().mean(), Precision("fp16"))
        for _ in range(10):
            step(torch.randn(4, 4, 5, 5, generator=torch.Generator().manual_seed(3)))
        return model.weight.detach().float(), made.state[model.weight]

    (whole, state), (parts, pieces) = trained(2**18), trained(100)
    assert torch.allclose(whole, parts, atol=1e-3)
    if "sgd" not in optimizer:
        assert state["exp_avg_exponent"].numel() == 1
        assert pieces["exp_avg_exponent"].numel() == len(cut(parts, 100)) == 5
        assert pieces["step"] == 10
    else:
        assert torch.equal(whole, parts)


def test_adam_needs_eight_bytes_a_parameter():
    model = nn.Linear(100, 100, bias=False)
    made = torch.optim.Adam(model.parameters())
    step = make_step(model, made, lambda m, b: m(b).float().mean(), Precision("fp16"))
    step(torch.randn(4, 100))
    stored = sum(t.nbytes for t in made.state[model.weight].values())
    assert model.weight.nbytes == 20_000
    assert stored == 40_000 + 4 + 2 + 2  # two moments, the counter, two exponents


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_centered_variance_is_not_negative(kind):
    """Of gradients that do not vary, both averages round, and their difference has any sign."""
    torch.manual_seed(0)
    model = nn.Linear(16, 1, bias=False)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, alpha=0.5, centered=True)
    step = make_step(model, optimizer, lambda m, b: m(b).float().mean(), Precision(kind))
    batch = torch.rand(4, 16) + 1
    for _ in range(30):
        step(batch)
    assert model.weight.isfinite().all()


def test_a_plain_update_of_scaled_moments_is_refused():
    """The step that knows their exponents is gone; one that is applied again goes on."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), torch.randn(4, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).float().square().mean()

    step = ss.apply([ss.Precision("fp16")], model, optimizer, loss=loss)
    step(x)
    del step
    loss(model, x.half()).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ss.InputError, match="an fp16 step that is gone"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()
    ss.apply([ss.Precision("fp16")], model, optimizer, loss=loss)(x)
    moved = [(b - p).abs().max() for b, p in zip(before, model.parameters(), strict=True)]
    assert 0 < max(moved) < 3e-2
