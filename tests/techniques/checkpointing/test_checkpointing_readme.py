"""The code in the README runs, and its peaks are those predicted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from shoestring.lab.models import builtin
from shoestring.step.predict import predict_step
from shoestring.techniques import Checkpointing
from shoestring.techniques import checkpointing as technique

PAGE = (Path(technique.__file__).parent / "README.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `(\S+)` \| (\d+\.\d) MB \|", PAGE, re.MULTILINE))

SCHEDULES = re.findall(r"^\| th\S[^|]* \| (`[^|]*) \| (\d+\.\d) MB \|", PAGE, re.MULTILINE)


def test_the_code_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ROWS)
def test_peaks(strategy: str) -> None:
    known = builtin("wrn-28-2")
    model, batch = known.build(), known.batch(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = predict_step(
        [Checkpointing(strategy)], model, batch, loss=known.loss, optimizer=optimizer
    )
    assert f"{found.peak_bytes / 1e6:.1f}" == ROWS[strategy]


@pytest.mark.slow
@pytest.mark.parametrize(("items", "peak"), SCHEDULES)
def test_peaks_of_schedules(items: str, peak: str) -> None:
    known = builtin("wrn-28-2")
    model, batch = known.build(), known.batch(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    chosen = [Checkpointing("per-block", schedule=tuple(re.findall(r"`(.*?)`", items)))]
    found = predict_step(chosen, model, batch, loss=known.loss, optimizer=optimizer)
    assert f"{found.peak_bytes / 1e6:.1f}" == peak


def test_every_row_is_read() -> None:
    assert len(ROWS) == 10 and len(SCHEDULES) == 4
