"""What a profile says beside its numbers."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoestring.step.profiling import profile


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda given: self.first(given).tanh(), x, use_reentrant=False)
        return self.second(hidden)


def test_a_model_that_recomputes_by_itself_is_named() -> None:
    batch = torch.randn(3, 4)
    told = profile(Checkpointed(), batch, loss=lambda model, x: model(x).sum())
    assert any("again in the backward pass" in note for note in told.warnings)
    plain = profile(nn.Linear(4, 1), batch, loss=lambda model, x: model(x).sum())
    assert plain.warnings == ()
    on_device = profile(
        Checkpointed(), batch, loss=lambda model, x: model(x).sum(), accounting="device"
    )
    assert on_device.recompute_flops > 0
