"""A predicted timeline as events that Perfetto opens."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

import shoestring as ss
from cli.calling import call
from shoestring.integrations.cards import CardFit, Cards
from shoestring.memory.timeline import perfetto


def test_counters_hold_the_live_bytes_of_every_instant() -> None:
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.zeros(2, 8)
    found = ss.profile(
        model, batch, loss=lambda m, b: m(b).sum(), optimizer="adamw", accounting="device"
    )
    events = json.loads(json.dumps(perfetto(found.timeline)))["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    assert [sum(c["args"].values()) for c in counters] == found.timeline.totals.tolist()
    ran = [event for event in events if event["ph"] == "X"]
    assert len(ran) == len(counters) and {e["cat"] for e in ran} >= {"forward", "backward"}


def test_the_command_line_writes_it(tmp_path: Path) -> None:
    done = call("profile", "wrn-10-1", "--batch", 4, "--trace", tmp_path / "t.json", "--json")
    assert done.status == 0, done.err
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_a_table_of_cards_shows_in_a_notebook() -> None:
    row = CardFit(24 * 10**9, "RTX <4090>", 10**9, None, None, 0, None)
    shown = Cards("hf:x", "1 image", 1, 1, (row,))._repr_html_()
    assert "<table>" in shown and "RTX &lt;4090&gt;" in shown and "24 GB" in shown
