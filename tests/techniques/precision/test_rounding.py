"""Stochastic rounding: right on average, the same for a seed, and never beyond the neighbors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoestring.kernels.rounding import Noise
from shoestring.techniques import Precision
from techniques.precision.precision_helpers import make_step
from techniques.small_models import SMALL

torch.set_num_threads(1)
TYPES = [torch.bfloat16, torch.float16]


def noise(seed: int = 0) -> Noise:
    return Noise(torch.device("cpu"), seed)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_mean_of_many_draws_is_the_number(dtype):
    torch.manual_seed(0)
    numbers = torch.cat(
        [torch.randn(50), torch.rand(50) * 1e-3 + 1e-4, torch.tensor([1.0, -2.0, 0.0])]
    )
    draws = 20_000
    source = noise()
    total = torch.zeros(len(numbers), dtype=torch.float64)
    for _ in range(20):
        wide = numbers.expand(draws // 20, -1).contiguous()
        total += source.rounded(wide, dtype).double().sum(0)
    error = (total / draws - numbers.double()).abs()
    ulp = torch.finfo(dtype).eps * numbers.abs().double()
    assert (error <= ulp * 5 * 0.5 / draws**0.5 + 1e-30).all()  # five standard deviations


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_only_neighbors_are_chosen_and_what_fits_stays(dtype):
    torch.manual_seed(0)
    x = torch.randn(10_000)
    rounded = noise().rounded(x, dtype)
    near = x.to(dtype).float()
    assert ((rounded.float() - near).abs() <= near.abs() * torch.finfo(dtype).eps).all()
    fits = x.to(dtype)
    assert torch.equal(noise().rounded(fits.float(), dtype), fits)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_infinities_stay_and_no_nan_becomes_a_number(dtype):
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int32)
    for seed in range(20):
        assert noise(seed).rounded(bits.view(torch.float32), dtype).isnan().all()
    infinite = torch.tensor([torch.inf, -torch.inf])
    assert noise().rounded(infinite, dtype).tolist() == infinite.tolist()


def test_the_seed_decides_and_the_global_stream_is_left_alone():
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(0)
        small = SMALL["mlp"]
        model, batch = small.build(), small.batch()
        made = torch.optim.SGD(model.parameters(), lr=0.01)
        step = make_step(model, made, small.loss, Precision("bf16", seed=seed))
        state = torch.get_rng_state()
        for _ in range(3):
            step(batch)
        assert torch.equal(state, torch.get_rng_state())
        return model[0].weight.detach()

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_updates_under_half_an_ulp_arrive_only_at_random(kind):
    """1000 steps of 1e-4 from one: nearest stands still in BF16 and FP16, chance does not."""

    def moved(rounding: str) -> float:
        model = nn.Linear(512, 1, bias=False)
        model.weight.data.fill_(1.0)
        made = torch.optim.SGD(model.parameters(), lr=1e-4)
        step = make_step(
            model, made, lambda m, b: -m.weight.float().sum(), Precision(kind, rounding=rounding)
        )
        for _ in range(1000):
            step(torch.zeros(1))
        return model.weight.float().mean().item() - 1

    assert moved("nearest") == 0.0
    assert moved("stochastic") == pytest.approx(0.1, rel=0.05)


def test_draws_look_independent():
    """Of elements, of draws and of seeds: no correlation, and every value as often."""
    like = torch.zeros(2**14)
    source = noise()
    draws = torch.stack(
        [source.bits(like, 13).double() for _ in range(40)]
        + [noise(seed).bits(like, 13).double() for seed in range(1, 25)]
    )
    counts = torch.bincount(draws.flatten().long() >> 5, minlength=256).double()
    expected = draws.numel() / 256
    assert ((counts - expected) ** 2 / expected).sum() < 256 + 6 * (2 * 256) ** 0.5
    centered = (draws - draws.mean()) / draws.std()
    between = (centered @ centered.T) / like.numel()
    between.fill_diagonal_(0)
    assert between.abs().max() < 6 / like.numel() ** 0.5
    for lag in (1, 2, 16, 256):
        along = (centered[:, lag:] * centered[:, :-lag]).mean()
        assert along.abs() < 6 / draws.numel() ** 0.5, lag


def test_a_loaded_stream_stays_where_a_captured_step_reads_it() -> None:
    noise = Noise(torch.device("cpu"), 3)
    noise.skip()
    held = [noise.counter.data_ptr(), noise._place.data_ptr()]
    before, later = noise.state_dict(), Noise(torch.device("cpu"), 3)
    noise.skip()
    noise.load_state_dict(before)
    assert [noise.counter.data_ptr(), noise._place.data_ptr()] == held
    later.load_state_dict(before)
    assert torch.equal(later.counter, noise.counter) and torch.equal(noise._place, noise.counter)
