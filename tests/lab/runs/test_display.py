"""Progress: lines where stderr is a file, a bar where it is a terminal."""

import io

import pytest
import torch
from test_loop import settings

from shoestring.lab.runs.display import Display, duration
from shoestring.lab.runs.trainer import Trainer
from tiny_nets import small_task


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0 s"), (59.4, "59 s"), (200, "3:20 min"), (7500, "2:05 h"), (360_000, "100:00 h")],
)
def test_durations_are_for_people(seconds, shown):
    assert duration(seconds) == shown


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_loss_accuracy_time_left_and_peak_are_shown(monkeypatch, stream):
    trainer = Trainer(settings(), small_task(), torch.device("cpu"), predict=False)
    stderr = stream()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    with Display(trainer) as display:
        assert not display.due()
        for _ in range(4):
            trainer.advance()
        display.show()
        for _ in range(4):
            trainer.advance()
        display.evaluated(trainer.evaluate())
    said = stderr.getvalue()
    for part in ("epoch 1/2", "loss ", "accuracy ", " s left", "ms/update", "peak 308.3 KB"):
        assert part in said
    if stream is io.StringIO:
        assert "update 4/16" in said and len(said.splitlines()) == 2
