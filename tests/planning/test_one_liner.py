"""At the predicted peak of checkpointing every block, there is a plan, and it takes no longer."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoestring.planning.cost import NOMINAL
from shoestring.planning.planner import Planner

pytestmark = pytest.mark.slow


class Mixer(nn.Module):
    """A residual layer on vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Convolved(nn.Module):
    """A residual layer on images, with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(2))
        self.norm = nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.norm(self.one(x)).relu())


def attending() -> nn.Module:
    return nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True)


class Net(nn.Module):
    """Blocks, each checkpointed as people do it or not."""

    def __init__(self, blocks: list[nn.Module], again: bool) -> None:
        super().__init__()
        self.blocks, self.again = nn.ModuleList(blocks), again

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x.square().mean()


SUBJECTS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mixer": (Mixer, (8192, 256)),
    "convolved": (Convolved, (32, 64, 64, 64)),
    "attending": (attending, (32, 256, 256)),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_no_plan_is_behind_checkpointing_every_block(name: str) -> None:
    block, shape = SUBJECTS[name]

    def planner(again: bool) -> Planner:
        with torch.device("meta"):
            model = Net([block() for _ in range(5)], again)
            batch = torch.zeros(shape)
        optimizer = torch.optim.AdamW(model.parameters())
        return Planner(
            model, batch, loss=lambda m, b: m(b), optimizer=optimizer, device="cuda",
            costs=NOMINAL["cuda"], allow="lossless",
        )  # fmt: skip

    line, ours = planner(True).estimates.plain, planner(False)
    assert line.needed_bytes < 0.7 * ours.estimates.plain.needed_bytes
    assert line.seconds is not None
    for share in (1.0, 0.95):
        found = ours.plan(int(share * line.needed_bytes)).predicted
        assert found.seconds is not None and found.seconds <= line.seconds
        assert found.needed_bytes <= share * line.needed_bytes
