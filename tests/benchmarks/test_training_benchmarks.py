"""The benchmarks of training run, in a tiny form, and find what they are there to find."""

import mmap

import pytest
import torch

import soak
import train_step
from shoestring.lab.runs.settings import settings_for
from shoestring.techniques.plan import Plan
from tiny_nets import TINY, small_task

CPU = torch.device("cpu")


def test_step_time_beside_a_bare_loop():
    found = train_step.compare("wrn-10-0.25", small_task(), 4, CPU, False, updates=2, groups=2)
    assert found["updates"] == 4 and not found["captured"]
    assert found["ratio"] == found["loop_step_seconds"] / found["bare_step_seconds"] > 0


def test_the_bare_loop_trains():
    bare = train_step.Bare("wrn-10-0.25", small_task(), 16, CPU, False)
    before = {name: p.clone() for name, p in bare.model.named_parameters()}
    for _ in range(3):
        bare.advance()
    assert all(not p.equal(before[name]) for name, p in bare.model.named_parameters())
    assert bare.batch[0].shape == (16, 3, 32, 32)


@pytest.mark.parametrize("leak", [False, True])
def test_soak_sees_memory_that_grows(leak, monkeypatch):
    settings = settings_for(TINY, "digits", images=64, plan=Plan(), epochs=20, batch=16)
    held = []
    if leak:
        plain = soak.Watched.advance

        def advance(self):
            held.append(mmap.mmap(-1, 2**20))  # pages that are nobody's yet
            held[-1].write(bytes(2**20))
            plain(self)

        monkeypatch.setattr(soak.Watched, "advance", advance)
    found = soak.soak(settings, small_task(), CPU, 60)
    assert found["steps"] == 60 and found["slower"] > 0
    assert (found["grown_bytes"] > soak.MOST_GROWN_BYTES) is leak
