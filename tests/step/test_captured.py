"""Captured steps, as far as a machine without a GPU can tell."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from happens_before import Recorder
from shoestring.step.captured import CapturedStep, capture_stream


def test_a_pinned_batch_may_be_filled_again_as_soon_as_the_step_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def replay() -> None:
        held: Any = object.__new__(CapturedStep)
        held._inputs, held._loss, held.replays = [torch.zeros(4)], torch.zeros(()), 0
        held._randomness = SimpleNamespace(placed=nullcontext)
        held._graph = SimpleNamespace(replay=lambda: None)
        batch = torch.zeros(4).pin_memory()
        held(batch)
        batch.fill_(1)

    recorder = Recorder()
    recorder.run(monkeypatch, replay)
    assert recorder.faults == []


def test_each_gpu_has_one_stream_to_capture_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step on a second GPU would run nothing, in silence, if it was captured on the first one."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    streams = [capture_stream(torch.device("cuda", 7 + n)) for n in (0, 1, 0)]
    assert [stream.device.index for stream in streams] == [7, 8, 7]
    assert streams[0] is streams[2]
