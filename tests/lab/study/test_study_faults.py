"""Faults of studies and reports: hung workers, odd runs, names that are code elsewhere."""

import json
import os
import re
import shutil
import time

import pytest
from studies import context

from shoestring.errors import InputError, TrainingStopped
from shoestring.lab.records.run import FILE
from shoestring.lab.study import local
from shoestring.lab.study.command import run_study
from shoestring.lab.study.execute import FAILURE, Place
from shoestring.lab.study.expand import expand
from shoestring.lab.study.report import report
from shoestring.lab.study.spec import load
from shoestring.lab.study.tables import Table

SETTINGS = {
    "model": "m", "data": "digits", "plan": {}, "batch": 10, "learning_rate": 0.1, "seed": 0,
    "epochs": 1,
}  # fmt: skip
HOST = {"device": "cpu", "torch": "2"}


def write(folder, seed=0, *, events=None, **end):
    """A finished run."""
    folder.mkdir(parents=True)
    held = events or [
        {"event": "start", "settings": {**SETTINGS, "seed": seed}, "host": HOST, "updates": 2},
        {"event": "evaluation", "epoch": 1, "step": 2, "accuracy": 50.0, "loss": 1.0},
        {"event": "end", "step": 2, "best_accuracy": 50.0, "accuracy": 50.0, "seconds": 1.0,
         "measured_peak_bytes": 100, "predicted": {"fundamental_peak_bytes": 90}, **end},
    ]  # fmt: skip
    (folder / FILE).write_text("".join(json.dumps(event) + "\n" for event in held))


def page_data(folder):
    text = (folder / "report" / "index.html").read_text()
    inside = re.search(r"<script[^>]*application/json[^>]*>(.*?)</script>", text, re.S)
    return json.loads(inside[1], parse_constant=pytest.fail)


ODD = {
    "nested": b"[" * 200_000,
    "no epoch": b'{"event": "start", "settings": {}}\n{"event": "evaluation"}\n{"event": "end"}\n',
    "numbers": b'{"event": "end", "best_accuracy": "x", "seconds": []}\n',
    "huge": b'{"event": "end", "best_accuracy": ' + b"9" * 4000 + b"}\n",
    "empty": b"",
    "host": b'{"event": "start", "settings": {}, "host": 3}\n',
}


@pytest.mark.parametrize("what", [*ODD, "fifo"])
def test_an_odd_run_does_not_break_a_report(tmp_path, what):
    write(tmp_path / "good", 1)
    odd = tmp_path / "odd"
    odd.mkdir()
    if what == "fifo":
        os.mkfifo(odd / FILE)
    else:
        (odd / FILE).write_bytes(ODD[what])
    made = report(tmp_path)
    assert "good" in made.results.outcomes
    assert page_data(tmp_path)["rows"]


def test_an_evaluation_without_an_epoch_is_no_point_of_a_curve(tmp_path):
    write(tmp_path / "good", 1)
    lines = (tmp_path / "good" / FILE).read_text().replace('"epoch": 1, ', "")
    (tmp_path / "good" / FILE).write_text(lines)
    report(tmp_path)
    assert page_data(tmp_path)["curves"] == {}


def test_names_that_are_not_utf8(tmp_path):
    write(tmp_path / os.fsdecode(b"good-\xff"), 1)
    write(tmp_path / os.fsdecode(b"twin-\xfe"), 1)
    made = report(tmp_path)
    assert len(made.results.outcomes) == 2 and made.results.passed_over
    assert "\\udc" in (tmp_path / "report" / "tables.md").read_text()
    page_data(tmp_path)


EVIL = "x\n\\input{/etc/passwd} <script>alert(1)</script> [a](javascript:b) `c` *d* |e \\| f"


def test_names_are_text_in_every_format(tmp_path):
    write(tmp_path / "good", 1)
    write(tmp_path / EVIL.replace("/", "_"), 1)
    report(tmp_path)
    tex = (tmp_path / "report" / "tables.tex").read_text()
    assert "\\input{" not in tex
    for line in tex.splitlines():
        assert (
            line.startswith(("%", "\\", "{}")) or "&" in line or line.endswith("\\\\") or not line
        )
    markdown = (tmp_path / "report" / "tables.md").read_text()
    assert not re.search(r"(?<!\\)\](?=\()", markdown) and "<script" not in markdown
    assert "\\[a\\]" in markdown and "\\`c\\`" in markdown
    assert "<script>alert" not in (tmp_path / "report" / "index.html").read_text()


def test_a_cell_cannot_leave_its_table():
    table = Table("t", EVIL, (EVIL,), ((EVIL,), ("\\",)), notes=(EVIL,))
    lines = table.markdown().splitlines()
    assert len(lines) == 8 and lines[0].startswith("## x ")
    for line in lines[2:6]:
        assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 2, line
    assert "\\input{" not in table.latex()
    assert all("\n" not in line for line in table.latex().split("\n"))


ONE = '[base]\nmodel = "tiny_nets:tiny_linear"\ndata = "digits"\nbatch = 200\nepochs = 1\n'


@pytest.mark.parametrize(
    "text",
    [
        f"trials = 99999999999\n{ONE}",
        f"seeds = [-1]\n{ONE}",
        f"{ONE}seed = -1\n",
        f"{ONE}[[grid]]\nlr = [nan]\n",
        f"{ONE}lr = inf\n",
        f"{ONE}[[target]]\nscore = nan\n",
        f"{ONE}[[grid]]\nseed = [{', '.join(map(str, range(2000)))}]\n"
        f"lr = [{', '.join(f'{n}.5' for n in range(2000))}]\n",
        "a = " + "[" * 100_000,
        f"x = {'9' * 5000}\n{ONE}",
        f'name = "a\\u0000b"\n{ONE}',
        f"run_seconds = 0\n{ONE}",
        "",
    ],
    ids=lambda text: text[:25],
)  # fmt: skip
def test_a_study_that_cannot_be_is_refused_and_writes_nothing(tmp_path, text):
    file = tmp_path / "study.toml"
    file.write_text(text)
    with pytest.raises(InputError):
        expand(load(file), lambda job: None)
    with pytest.raises(InputError):
        run_study(file, tmp_path / "out")
    assert os.listdir(tmp_path) == ["study.toml"]


HUNG = """
import time
from torch import nn
class Hung(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(192, 10), 0
    def forward(self, x):
        self.calls += 1
        while self.calls > 3:
            time.sleep(1000)
        return self.linear(nn.functional.avg_pool2d(x, 4).flatten(1))
"""


def study_process(file, out, seconds, status):
    import sys

    local.STOP_SECONDS = 1.0
    sys.path.insert(0, str(file.parent))
    os.chdir(file.parent)
    try:
        found = run_study(file, out, place=Place(device="cpu", run_seconds=seconds))
        status.send((found.runs, found.failed))
    except TrainingStopped as error:
        status.send(error.exit_status)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["limit", "signal"])
def test_a_hung_run_does_not_keep_a_study(tmp_path, how):
    """Its time is over, or the study is told to end: the run is told, then killed."""
    (tmp_path / "hung_runs.py").write_text(HUNG)
    file = tmp_path / "s.toml"
    text = ONE.replace("tiny_nets:tiny_linear", "hung_runs:Hung")
    file.write_text(f"profile = false\n{text}snapshot_every = 1\npredict = false\n")
    theirs, ours = context().Pipe()
    limit = 5.0 if how == "limit" else None
    process = context().Process(target=study_process, args=(file, tmp_path / "out", limit, ours))
    process.start()
    if how == "signal":
        end = time.monotonic() + 150
        while not list(tmp_path.glob("out/runs/*/snapshot*-000000003-*")):
            assert time.monotonic() < end and process.is_alive()
            time.sleep(0.05)
        process.terminate()
    assert theirs.poll(60)
    found = theirs.recv()
    process.join(30)
    assert process.exitcode == 0
    if how == "signal":
        assert found == 143
        return
    assert found == (1, 1)
    (failed,) = tmp_path.glob(f"out/runs/*/{FAILURE}")
    assert "took longer than run_seconds = 5" in failed.read_text()


def test_a_failure_that_cannot_be_read_is_a_failure(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text(f"profile = false\n{ONE}")
    (job,) = expand(load(file), lambda job: None).jobs
    out = tmp_path / "out"
    (out / "runs" / job.name).mkdir(parents=True)
    (out / "runs" / job.name / FAILURE).write_bytes(b"\xff" * 9)
    shutil.copy(file, out / "study.toml")
    assert run_study(file, out, resume=True).failed == 1
    assert report(out).results.failed == 1
