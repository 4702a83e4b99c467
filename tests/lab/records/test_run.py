"""Records: whole lines on the disk, cut back where they will happen again."""

import json
import math
import resource
import sys

import pytest
import torch

from shoestring.errors import InputError, TrainingStopped
from shoestring.lab.records.run import FILE, Records, git_revision, provenance, read, strip_times


def test_events_are_lines_in_order(tmp_path):
    with Records(tmp_path) as records:
        records.write("start", seed=3, plan={"precision": {"kind": "fp16"}})
        records.write("end", note="größer\nals")
        assert records.size_bytes == (tmp_path / FILE).stat().st_size
    first, last = read(tmp_path)
    assert first["seed"] == 3 and first["plan"] == {"precision": {"kind": "fp16"}}
    assert last["note"] == "größer\nals"
    assert len((tmp_path / FILE).read_text(encoding="utf-8").splitlines()) == 2


def test_numbers_come_back_to_the_bit(tmp_path):
    numbers = [0.1 + 0.2, 1e-323, 3.0, 2**70]
    with Records(tmp_path) as records:
        records.write("end", numbers=numbers)
    assert read(tmp_path)[0]["numbers"] == numbers


def test_numbers_that_are_not_finite_are_json(tmp_path):
    """Every reader takes the line, and a run that diverged is still told apart."""
    with Records(tmp_path) as records:
        records.write("end", loss=math.nan, best_loss=-math.inf, timeline={"x": [math.inf]})
    (line,) = (tmp_path / FILE).read_text().splitlines()
    json.loads(line, parse_constant=pytest.fail)
    (event,) = read(tmp_path)
    assert math.isnan(event["loss"]) and event["best_loss"] == -math.inf


def test_what_came_after_a_snapshot_is_dropped(tmp_path):
    with Records(tmp_path) as records:
        records.write("start")
        size = records.size_bytes
        records.write("evaluation", epoch=1)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"event": "evalu')  # killed in the middle of a line
    with Records(tmp_path) as records:
        records.truncate(size)
        records.write("evaluation", epoch=1)
    assert [e["event"] for e in read(tmp_path)] == ["start", "evaluation"]
    with Records(tmp_path) as records, pytest.raises(InputError, match="10,000"):
        records.truncate(10_000)


def test_a_full_disk_leaves_whole_lines(tmp_path):
    with Records(tmp_path) as records:
        records.write("start")
        before = (tmp_path / FILE).read_bytes()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
        try:
            with pytest.raises(TrainingStopped, match=f"cannot write to .*{FILE}"):
                records.write("evaluation", epoch=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (tmp_path / FILE).read_bytes() == before
        records.write("evaluation", epoch=1)
    assert len(read(tmp_path)) == 2


def test_times_and_machine_do_not_count():
    events = [
        {"event": "start", "time": "2026-01-01", "host": {"torch": "2"}, "seed": 1},
        {"event": "resume", "step": 4},
        {"event": "evaluation", "seconds": 3.2, "accuracy": 50.0},
    ]
    assert strip_times(events) == [
        {"event": "start", "seed": 1},
        {"event": "evaluation", "accuracy": 50.0},
    ]


def test_what_is_no_record_is_named(tmp_path):
    with pytest.raises(InputError, match=f"cannot read .*{FILE}"):
        read(tmp_path / FILE)
    (tmp_path / FILE).write_text('{"event": "start"}\nnot json\n')
    with pytest.raises(InputError, match="line 2 is not an event"):
        read(tmp_path)
    (tmp_path / FILE).write_text("[1]\n")
    with pytest.raises(InputError, match="line 1 is not an event"):
        read(tmp_path)


def test_provenance_names_versions_and_revision(monkeypatch):
    made = provenance(torch.device("cpu"))
    assert made["torch"] == torch.__version__ and made["device"] == "cpu"
    assert made["threads"] == torch.get_num_threads()
    json.dumps(made)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("SHOESTRING_REVISION", "abc123")
    assert git_revision() == "abc123"


def test_the_program_is_named_without_the_folders_of_a_machine(monkeypatch):
    for path, name in [("/a/shoestring/__main__.py", "shoestring"), ("/b/bin/shoestring", None)]:
        monkeypatch.setattr(sys, "argv", [path, "train", "x"])
        made = provenance(torch.device("cpu"))
        assert made["command"] == [name or "shoestring", "train", "x"]
