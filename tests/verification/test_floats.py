"""The types a computation runs in, as operators show them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from shoestring.techniques.emulated import Rounded, rounded_
from shoestring.verification.floats import computed_kinds


def test_autocast_shows_and_views_do_not() -> None:
    layer, half = nn.Linear(3, 3), torch.ones(4, 3, dtype=torch.float16)

    def run() -> None:
        layer(half[1:].float()).sum().backward()

    assert computed_kinds(run) == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        assert computed_kinds(run) == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_numbers_are_rounded_as_their_type_rounds(kind: str, dtype: torch.dtype) -> None:
    """In the range of the type; beyond it nothing overflows."""
    torch.manual_seed(0)
    x = (torch.rand(1000) + 0.01) * 10
    expected = x.to(dtype).float()
    with Rounded(kind):
        made = x + 0
    assert torch.equal(made, expected)
    least = torch.tensor([torch.finfo(torch.float32).min, torch.inf])
    with Rounded(kind, seed=0):
        assert torch.equal(least + 0, least)


@pytest.mark.parametrize("scale", [1.0, 2.0**15])
def test_fp16_is_emulated_down_to_its_smallest_numbers(scale: float) -> None:
    """A gradient that is small beside the loss scale has few bits left, which is rounding too."""
    numbers = torch.cat([torch.randn(200) * 2.0**-k for k in range(0, 30, 3)])
    emulated = numbers / scale
    rounded_(emulated, 11, least=-13 - int(math.log2(scale)))
    assert torch.equal(emulated * scale, numbers.half().float())
