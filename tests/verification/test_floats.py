"""The types a computation runs in, as operators show them."""

from __future__ import annotations

import torch
from torch import nn

from shoestring.verification.floats import computed_kinds


def test_autocast_shows_and_views_do_not() -> None:
    layer, half = nn.Linear(3, 3), torch.ones(4, 3, dtype=torch.float16)

    def run() -> None:
        layer(half[1:].float()).sum().backward()

    assert computed_kinds(run) == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        assert computed_kinds(run) == {torch.float32, torch.bfloat16}
