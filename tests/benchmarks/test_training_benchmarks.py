"""The benchmarks of training run, in a tiny form, and find what they are there to find."""

import json
import mmap

import pytest
import torch

import language_model
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


@pytest.mark.slow
def test_levers_of_a_language_model_beside_plain_training(tmp_path, monkeypatch, capsys):
    rows = tmp_path / "rows.jsonl"
    size = "--width 32 --layers 1 --heads 2 --length 8 --batch 2 --updates 4 --every 2 --held-out 4"
    size += " --warmup 1 --lr 0.01"
    names = ["plain", "released gradients", "4-bit state", "factored, 8-bit first moment"]
    chosen = [word for name in names for word in ("--only", name)]
    given = ["--data", "number_words", "--seeds", "0", "1", "--out", str(rows), "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["language_model", *given, *size.split(), *chosen])
    language_model.main()
    made = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["lever"] for row in made] == 2 * names
    plain, released, coded, factored = (row["curve"] for row in made[:4])
    assert plain == released and len({str(c) for c in (plain, coded, factored)}) == 3
    assert [update for update, _, _ in plain] == [2, 4]
    assert all(row["predicted_peak_bytes"] == row["measured_peak_bytes"] for row in made[:2])
    assert "| released gradients | 2 | " in capsys.readouterr().out
    before = rows.read_bytes()
    language_model.main()  # all of it is there
    assert rows.read_bytes() == before
