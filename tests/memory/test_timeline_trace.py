"""A predicted timeline as Perfetto and PyTorch's memory_viz open it, and results in notebooks."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

import shoestring as ss
from cli.calling import call
from shoestring.integrations.cards import CardFit, Cards
from shoestring.memory.snapshot import pickled
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
    row = CardFit(24 * 10**9, "24 GB", "RTX <4090>", 10**9, None, None, 0, None)
    shown = Cards("hf:x", "1 image", 1, 1, (row,))._repr_html_()
    assert "<table>" in shown and "RTX &lt;4090&gt;" in shown and "24 GB" in shown


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_snapshot_has_the_live_bytes_of_every_instant(device: str) -> None:
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.zeros(2, 8)
    line = ss.profile(
        model, batch, loss=lambda m, b: m(b).sum(), optimizer="adamw", accounting="device",
        device=device,
    ).timeline  # fmt: skip
    found = pickle.loads(pickled(line))
    live, totals, blocks = 0, [0] * len(line.labels), {}
    for event in found["device_traces"][0]:
        if event["action"] == "alloc":
            begin, end = event["addr"], event["addr"] + event["size"]
            assert all(end <= b or begin >= b + s for b, s in blocks.items())  # none overlaps
            blocks[begin] = event["size"]
            live += event["size"]
        elif event["action"] == "free_completed":
            assert blocks.pop(event["addr"]) == event["size"]
            live -= event["size"]
        for instant in range(event["time_us"], len(totals)):
            totals[instant] = live
    assert totals == line.totals.tolist()
    (segment,) = found["segments"]
    active = {b["address"]: b["size"] for b in segment["blocks"] if b["state"] != "inactive"}
    assert active == blocks and sum(b["size"] for b in segment["blocks"]) == segment["total_size"]


def test_memory_viz_reads_a_snapshot(tmp_path: Path) -> None:
    file = tmp_path / "s.pickle"
    done = call("profile", "wrn-10-1", "--batch", 4, "--accounting", "device", "--device", "cuda",
                "--snapshot", file, "--json")  # fmt: skip
    assert done.status == 0, done.err
    found = pickle.loads(file.read_bytes())
    assert "a = seg_0[0:" in _memory_viz.trace(found)
    assert "segments: 1" in _memory_viz.segsum(found)
    for page in (_memory_viz.trace_plot(found), _memory_viz.segment_plot(found)):
        assert "<script" in page and len(page) > 1000


def test_results_show_in_a_notebook() -> None:
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.zeros(2, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how = {"loss": lambda m, b: m(b).sum(), "optimizer": optimizer}
    shown = [
        ss.profile(model, batch, **how),
        ss.plan(model, batch, budget="1 MB", **how),
        ss.explain(model, batch, **how),
        ss.verify([ss.Microbatching(1)], model, [batch], **how, steps=1),
        CardFit(24 * 10**9, "24 GB", "L4", 10**9, None, None, 0, None),
    ]
    for result in shown:
        assert "<p>" in result._repr_html_() and "<table><tr>" in result._repr_html_()
        assert repr(result) == str(result)  # as a shell shows it
