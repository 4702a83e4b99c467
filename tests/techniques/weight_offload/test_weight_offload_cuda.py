"""Weights in pinned memory: streams that copy ahead and behind must not change a bit."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from shoestring.step.predict import predict_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::shoestring.errors.NoEffectWarning"),
]
WIDTH, BLOCKS = 768, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    """Layers, and a head that is the embedding; large beside its activations."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        if frozen:
            self.requires_grad_(False)
            for layer in self.layers:
                layer.norm.requires_grad_(True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.embedding.weight)


def build(frozen: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Network(frozen).cuda()


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def tokens() -> torch.Tensor:
    made = torch.Generator().manual_seed(1)
    return torch.randint(4096, (2, 64), generator=made).cuda()


PLANS: dict[str, tuple[ss.Technique, ...]] = {
    "alone": (),
    "blocks": (ss.Checkpointing("residual-1"),),
    "pairs": (ss.Checkpointing("residual-2*"),),
    "released": (ss.GradientRelease(), ss.Checkpointing("residual-1")),
    "parts": (ss.Microbatching(1),),
    "all on the host": (ss.GradientRelease(), ss.Checkpointing("residual-1"), ss.Offload()),
    "chunked": (ss.ChunkedLoss(1024), ss.GradientRelease()),
}


def trained(*plan: ss.Technique, frozen: bool = False, steps: int = 6) -> list[torch.Tensor]:
    model = build(frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    step = ss.apply(plan, model, optimizer, loss=loss)
    step.use_graph(False)
    losses = [step(tokens()).detach().clone() for _ in range(steps)]
    return [*losses, *(t.cpu() for t in model.state_dict().values())]


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("beside", PLANS)
def test_equal_to_training_without(beside: str, frozen: bool, share: float) -> None:
    others = PLANS[beside]
    found = trained(ss.WeightOffload(share), *others, frozen=frozen)
    torch.testing.assert_close(found, trained(*others, frozen=frozen), rtol=0, atol=0)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("beside", PLANS)
def test_the_predicted_peak_is_measured(beside: str, frozen: bool) -> None:
    model, batch = build(frozen), tokens()
    plan = [ss.WeightOffload(), *PLANS[beside]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    given: dict[str, Any] = {"loss": loss, "optimizer": optimizer}
    predicted = predict_step(plan, model, batch, **given, device="cuda").peak_bytes
    step = ss.apply(plan, model, optimizer, loss=loss)
    del model
    for _ in range(3):
        step(batch)
    gc.collect()
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(batch)
    measured = torch.cuda.max_memory_allocated()
    print(f"predicted {predicted / 1e6:.2f} measured {measured / 1e6:.2f}", beside, frozen)
    assert measured == pytest.approx(predicted, rel=0.03)
    for _ in range(10):
        step(batch)
    assert torch.cuda.memory_allocated() == after


def test_the_weights_are_not_on_the_card() -> None:
    model = build(frozen=True)
    weights = sum(p.nbytes for p in model.parameters())
    before = torch.cuda.memory_allocated()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = ss.apply([ss.WeightOffload()], model, optimizer, loss=loss)
    step(tokens())
    left = before - torch.cuda.memory_allocated()
    assert left > 0.7 * weights
    model.eval()
    with torch.inference_mode():
        assert model(tokens()).isfinite().all()
    assert all(not t.is_cuda for n, t in model.state_dict().items() if "up.weight" in n)
