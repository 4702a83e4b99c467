"""Noise of one kind of optimizer state does not hide in another's scale."""

from __future__ import annotations

import torch

from shoestring.techniques.distance import NEAR_MULTIPLE, RoundingNoise, distance
from shoestring.verification.near import of_squares


def state(error: float) -> dict[tuple[str, str], torch.Tensor]:
    """Counts are large and exact, squares small and rounded."""
    made = {(name, "step"): torch.tensor(2.0) for name in "abc"}
    made |= {(name, "exp_avg_sq"): torch.full((8,), 1e-6 * (1 + error)) for name in "ab"}
    made["c", "exp_avg_sq"] = torch.full((8,), 1e-6)
    return made


def test_counts_do_not_hide_the_noise_of_squares() -> None:
    noise = RoundingNoise.between(state(0.0), state(0.1))
    found = state(0.0)
    found["c", "exp_avg_sq"] = torch.full((8,), 1.05e-6)  # its own noise was zero by luck
    assert distance(state(0.0), found, noise, 1.0).within
    found["c", "exp_avg_sq"] = torch.full((8,), 1.2e-6)
    assert not distance(state(0.0), found, noise, 1.0).within


def test_counts_have_no_noise_of_squares() -> None:
    noise = RoundingNoise.between(state(0.0), state(0.1))
    found = state(0.0) | {("a", "step"): torch.tensor(2.05)}
    assert not distance(state(0.0), found, noise, 1.0).within


def test_squares_may_differ_by_twice_what_gradients_may() -> None:
    gradients = {"a": torch.full((4,), 2.0)}
    near = {"gradients": RoundingNoise({"a": 0.04 * 4 / NEAR_MULTIPLE})}  # 4%
    held = {("a", "exp_avg_sq"): torch.full((4,), 3.0), ("a", "step"): torch.tensor(1.0)}
    noise = of_squares(held, gradients, near)
    for error, within in ((0.08, True), (0.09, False)):
        found = {**held, ("a", "exp_avg_sq"): torch.full((4,), 3.0 * (1 + error))}
        assert distance(held, found, noise, NEAR_MULTIPLE).within is within
