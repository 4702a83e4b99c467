"""Adam's moments in FP16: what scaling saves, and how exactly they are stored."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from shoestring.techniques import Precision
from shoestring.techniques.precision import moments
from shoestring.techniques.precision.moments import Storage, blocks, power_of_two
from shoestring.techniques.precision.rounding import Noise
from shoestring.techniques.precision.update import Update
from techniques.precision.precision_helpers import OPTIMIZERS, make_step

torch.set_num_threads(1)


def path_of(monkeypatch: Any, kind: str, *, scaled: bool = True) -> torch.Tensor:
    """Weights over 60 steps of Adam under gradients of about 1e-4, whose squares FP16 lacks."""
    if not scaled:
        plain = functools.partial(Update, scaled_moments=False)
        monkeypatch.setattr("shoestring.techniques.precision.Update", plain)
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


@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 1e-4, 1.0, 1e6, 1e18])
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_any_magnitude_is_stored_to_eleven_bits(magnitude, key):
    torch.manual_seed(0)
    value = torch.rand(1000).add(0.01).mul(magnitude)
    storage = Storage(Noise(torch.device("cpu"), 0), scaled=True)
    state: dict[str, Any] = {}
    storage.make(state, key, value.half(), 1)
    storage.write(state, key, ..., 0, value.clone(), None)
    again = storage.read(state, key, ..., 0)
    allowed = 2.0**-9 if key == "exp_avg_sq" else 2.0**-10
    assert ((again - value).abs() / value).max() <= allowed * 1.001
    assert state[key].dtype is state[key + "_exponent"].dtype is torch.float16


def test_second_moments_span_the_range_of_the_gradients():
    """Roots of second moments: gradients a millionth of the largest keep theirs."""
    gradient = torch.tensor([1.0, 1e-6, 0.0])
    storage = Storage(Noise(torch.device("cpu"), 0), scaled=True)
    state: dict[str, Any] = {}
    storage.make(state, "exp_avg_sq", gradient.half(), 1)
    storage.write(state, "exp_avg_sq", ..., 0, gradient.square(), None)
    again = storage.read(state, "exp_avg_sq", ..., 0)
    assert again[1] == pytest.approx(1e-12, rel=1e-2) and again[2] == 0


def test_a_slow_average_does_not_stand_still():
    """β₂ = 0.9999 moves a second moment by less than half an ulp a step."""
    torch.manual_seed(0)
    storage = Storage(Noise(torch.device("cpu"), 0), scaled=True)
    state: dict[str, Any] = {}
    value = torch.ones(400)
    storage.make(state, "exp_avg_sq", value.half(), 1)
    storage.write(state, "exp_avg_sq", ..., 0, value, None)
    for _ in range(3000):
        storage.write(
            state, "exp_avg_sq", ..., 0, storage.read(state, "exp_avg_sq", ..., 0) * 0.9999, None
        )
    mean = storage.read(state, "exp_avg_sq", ..., 0).mean().item()
    assert mean == pytest.approx(0.9999**3000, rel=0.01)


def test_powers_of_two_are_exact():
    exponents = torch.arange(-120, 121)
    assert power_of_two(exponents.half()).tolist() == [2.0**e for e in range(-120, 121)]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "amsgrad", "adamw", "sgd-damped"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_blocks_change_nothing_but_the_exponents(monkeypatch, optimizer, memory_format):
    def trained(block_elements: int) -> Any:
        monkeypatch.setattr(moments, "BLOCK_ELEMENTS", block_elements)
        torch.manual_seed(0)
        model = nn.Conv2d(4, 10, 3).to(memory_format=memory_format)
        made = OPTIMIZERS[optimizer](model.parameters())
        step = make_step(model, made, lambda m, b: m(b).float().square().mean(), Precision("fp16"))
        for _ in range(10):
            step(torch.randn(4, 4, 5, 5, generator=torch.Generator().manual_seed(3)))
        return model.weight.detach().float(), made.state[model.weight]

    (whole, state), (parts, cut) = trained(2**18), trained(100)
    assert torch.allclose(whole, parts, atol=1e-3)
    if "sgd" not in optimizer:
        assert state["exp_avg_exponent"].numel() == 1
        assert cut["exp_avg_exponent"].numel() == len(list(blocks(torch.empty(10, 4, 3, 3)))) == 5
        assert cut["step"] == 10
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
