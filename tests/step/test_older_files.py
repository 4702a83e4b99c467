"""Plans and snapshots that earlier versions wrote still load, and training goes on from them.

`tests/older/` has what two of them wrote after three updates of the model below: 182f508, where a
plan had four fields, and 2f2214c, of version 0.3.0.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoestring as ss

OLDER = Path(__file__).parents[1] / "older"
LOSSES = 1.0811, 1.0781, 1.0747
"""Of the next updates, as these versions made them."""


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("version", ["182f508", "2f2214c"])
def test_a_step_goes_on(version: str) -> None:
    plan = ss.Plan.load(OLDER / f"{version}.toml")
    assert plan.short() == "fp16 + every-2 + microbatch 4"
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    step = ss.apply(plan, model, torch.optim.AdamW(model.parameters(), lr=0.01), loss=loss)
    snapshot = torch.load(OLDER / f"{version}.pt", weights_only=False)
    step.load_state_dict(snapshot)
    for name, value in step.model.state_dict().items():
        assert torch.equal(value, snapshot["model"][name])
    batch = torch.arange(32.0).view(8, 4) / 32, torch.arange(8) % 3
    assert [step(batch).item() for _ in LOSSES] == pytest.approx(LOSSES, abs=5e-4)


def test_a_plan_of_another_kind_of_file_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('[quantum]\nkind = "none"\n')
    with pytest.raises(ss.InputError, match="quantum") as caught:
        ss.Plan.load(tmp_path / "plan.toml")
    assert "its parts are" in (caught.value.hint or "")
