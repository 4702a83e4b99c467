"""Models of torch.compile: traced as they are written, and planned without what they undo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import shoestring as ss
from techniques.small_models import Attention

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler's own


frames = counters["frames"]
"""That were compiled, or tried."""


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def built(how: str = "") -> Any:
    torch.manual_seed(0)
    layers = [Attention(16, 0.0) for _ in range(3)]
    model: Any = nn.Sequential(nn.Embedding(20, 16), *layers, nn.Linear(16, 20))
    if how == "whole":
        model = torch.compile(model, backend="eager")
    if how == "in place":
        model.compile(backend="eager")
    if how == "blocks":
        for layer in layers:
            layer.compile(backend="eager")
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


WORDS = torch.randint(20, (8, 12), generator=torch.Generator().manual_seed(0))
BATCH = (WORDS, WORDS.roll(1, 1))


def test_a_profile_is_that_of_the_model_as_written() -> None:
    """The trace's own code was compiled with each operation that it sees, which took minutes."""
    peaks = []
    for how in ("", "whole", "in place"):
        model, optimizer = built(how)
        frames.clear()
        profile = ss.profile(model, BATCH, loss=loss, optimizer=optimizer, accounting="device")
        assert not frames
        peaks.append(profile.peak_bytes)
        model(WORDS)
        assert bool(frames) == bool(how)  # afterwards it is compiled again
    assert len(set(peaks)) == 1


@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_recomputation_and_sparsity_are_refused(how: str) -> None:
    model, optimizer = built(how)
    for technique in (ss.Checkpointing("residual-1"), ss.Sparsity(0.5)):
        with pytest.raises(ss.InputError, match=r"compiled.*"):
            ss.apply([technique], model, optimizer, loss=loss)


@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_a_plan_leaves_recomputation_out(how: str) -> None:
    plain = ss.profile(*built()[:1], BATCH, loss=loss, optimizer="sgd", accounting="device")
    model, optimizer = built(how)
    budget = int(0.7 * plain.peak_bytes)
    step = ss.fit(model, BATCH, loss=loss, optimizer=optimizer, budget=budget)
    assert not any(isinstance(t, ss.Checkpointing) for t in step.plan.techniques)
    twin, own = built()
    expected = F.cross_entropy(twin(WORDS).flatten(0, 1), BATCH[1].flatten())
    torch.testing.assert_close(step(BATCH), expected.detach())
    assert own is not None
