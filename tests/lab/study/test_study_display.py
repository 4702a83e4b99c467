"""What a study says of the time that is left."""

import json

import pytest

from shoestring.lab.records.run import FILE
from shoestring.lab.study.display import Progress
from shoestring.lab.study.execute import Outcome
from shoestring.lab.study.expand import StudyJob

JOBS = [StudyJob("train", {"model": "m", "seed": seed}) for seed in range(8)]


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when they are told to."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_the_time_left_follows_the_pace_of_all_runs_at_a_time(tmp_path, capsys, clock):
    """Two at a time, 20 seconds each and 5 to start: six more take 75."""
    with Progress(lambda job: tmp_path / job.name) as progress:
        progress.total = len(JOBS)
        clock[0] = 5.0
        progress.tick(JOBS[:2])
        clock[0] = 25.0
        for job in JOBS[:2]:
            progress.ended(Outcome(job, tmp_path, ()))
        progress.tick([])
    assert capsys.readouterr().err.splitlines()[-1] == "2/8 runs · 0 running · 1:15 min left"


def test_what_was_there_before_is_not_of_its_pace(tmp_path, capsys, clock):
    """A run that goes on at 80% and comes to 90% in 20 seconds: a tenth of a run."""

    def come_to(step):
        events = [{"event": "start", "updates": 10}, {"event": "evaluation", "step": step}]
        (tmp_path / FILE).write_text("".join(json.dumps(event) + "\n" for event in events))

    with Progress(lambda job: tmp_path) as progress:
        progress.total = 2
        come_to(8)
        progress.tick(JOBS[:1])
        clock[0] = 20.0
        come_to(9)
        progress.tick(JOBS[:1])
        assert capsys.readouterr().err.splitlines()[-1] == "0/2 runs · 1 running · 3:40 min left"
        clock[0] = 40.0
        progress.ended(Outcome(JOBS[0], tmp_path, ()))
        progress.tick([])
    assert capsys.readouterr().err.splitlines()[-1] == "1/2 runs · 0 running · 3:20 min left"
