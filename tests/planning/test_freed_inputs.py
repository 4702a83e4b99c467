"""Blocks that do not save what they are given, as those whose normalization casts to FP32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from chains import chain_of
from shoestring import Checkpointing
from shoestring.memory.items import Item
from shoestring.step.predict import predict_step
from shoestring.techniques.checkpointing.stages import Chain, evaluate

BATCH = (torch.zeros(64, 256, dtype=torch.bfloat16), torch.zeros(64))


class Block(nn.Module):
    """Adds to a stream in 16 bits what it computes from a copy in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.products = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.products(self.norm(x.float())).to(x.dtype)


def deep(blocks: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)), nn.Linear(256, 1).bfloat16())


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]).squeeze(1).float(), batch[1])


@pytest.fixture(scope="module")
def chain() -> Chain:
    return chain_of((), deep(8), BATCH, loss=loss, optimizer="sgd-plain")


SCHEDULES: list[tuple[Item, ...]] = [
    ("keep",) * 8,
    ("cheap",) * 8,
    (("keep",),) * 8,
    (("keep",) * 4,) * 2,
    ("keep",) * 4 + (("keep",) * 2,) * 2,
    (("keep",),) * 3 + ("keep",) * 5,
]


@pytest.mark.parametrize("items", SCHEDULES)
def test_estimated_as_the_step_itself(chain: Chain, items: tuple[Item, ...]) -> None:
    assert chain.blocks[3].freed_bytes == BATCH[0].nbytes
    paths = tuple(stage.name for stage in chain.blocks)
    plan = [Checkpointing.of(items, paths)]
    step = predict_step(plan, deep(8), BATCH, loss=loss, optimizer="sgd-plain", device="cpu")
    assert evaluate(chain, items).peak_bytes == pytest.approx(step.peak_bytes, rel=0.01)


def test_alike_in_the_middle_of_many(chain: Chain) -> None:
    """First and last block need other tensors around them; all do the same work."""
    middle = [stage.options for stage in chain.blocks[1:-1]]
    assert all(options == middle[0] for options in middle)


def test_blocks_that_run_twice_or_never_are_no_stages() -> None:
    """As many calls as blocks, though not one of each."""

    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.leave = deep(6)[:-1], deep(1)[-1]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number in (0, 2, 3, 4, 5, 2):
                x = self.layers[number](x)
            made: torch.Tensor = self.leave(x)
            return made

    found = chain_of((), Reused(), BATCH, loss=loss, optimizer="sgd-plain")
    assert [stage.name for stage in found.blocks] == [f"layers.{n}" for n in (0, 3, 4, 5)]
