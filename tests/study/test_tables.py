"""Names and numbers that tables, figures and pages must not stumble over."""

import json

import pytest

from shoestring.errors import InputError
from shoestring.records.run import FILE
from shoestring.study.display import Progress
from shoestring.study.execute import Outcome
from shoestring.study.expand import Job, expand
from shoestring.study.report import report
from shoestring.study.results import load_results
from shoestring.study.spec import load
from shoestring.study.tables import Table

STUDY = """
title = "costs $x_{$"
profile = false
seeds = [0, 1]
score = "%s"
[base]
model = "m"
data = "digits"
[[figure]]
name = "front"
x = "lr"
series = "family"
[[grid]]
lr = 0.1
labels = {family = "a $x_{$"}
"""


def test_signs_that_mean_something_elsewhere():
    table = Table("t", "t", ("a",), (("x\\y^2~{1} < 3",), ("two\nlines | 1",)))
    assert r"x\textbackslash{}y\textasciicircum{}2\textasciitilde{}\{1\} $<$ 3 \\" in table.latex()
    assert "| two lines \\| 1 |" in table.markdown()


@pytest.fixture
def ended(tmp_path):
    """Writes a study whose runs have ended with these fields."""

    def write(score, *ends):
        (tmp_path / "study.toml").write_text(STUDY % score)
        for job, end in zip(expand(load(tmp_path / "study.toml"), None).jobs, ends, strict=True):
            folder = tmp_path / "runs" / job.name
            folder.mkdir(parents=True)
            last = {"event": "end", "seconds": 1.0, "measured_peak_bytes": 8, **end}
            events = ({"event": "start", "settings": {}}, last)
            (folder / FILE).write_text("".join(json.dumps(event) + "\n" for event in events))
        return tmp_path

    return write


def test_a_study_without_a_title_is_called_like_its_folder(tmp_path):
    folder = tmp_path / "densities"
    folder.mkdir()
    (folder / "study.toml").write_text("[base]\nmodel = 'm'\ndata = 'digits'\n")
    assert load_results(folder).study.title == "densities"


def test_dollars_are_dollars_in_a_figure(ended):
    made = report(ended("best_accuracy", {"best_accuracy": 90.0}, {"best_accuracy": 92.0}))
    assert "front.svg" in made.files and made.results.rows[0].score.mean == 91.0


def test_a_mean_that_is_no_number_is_in_no_front(ended):
    made = report(ended("loss", {"loss": float("nan")}, {"loss": 1.0}))
    assert made.results.rows[0].score.n == 2 and made.results.front == ()
    assert "NaN" not in json.dumps(made.as_dict())


@pytest.mark.parametrize(
    ("score", "message"),
    [("best_acuracy", "no run has the study's score, 'best_acuracy'"), ("host", "is no number in")],
)
def test_a_score_that_no_run_has_is_named(ended, score, message):
    folder = ended(score, *2 * [{"best_accuracy": 90.0, "host": {}}])
    with pytest.raises(InputError, match=message):
        report(folder)


def test_an_error_on_a_terminal_is_no_markup(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress(lambda job: tmp_path) as progress:
        progress.ended(Outcome(Job("train", {"model": "m"}), tmp_path, (), "no file [/tmp/x] [a]"))
    assert "[/tmp/x] [a]" in capsys.readouterr().err
