"""Names and numbers that tables, figures and pages must not stumble over."""

import json

import pytest

from shoestring.errors import InputError
from shoestring.lab.records.run import FILE
from shoestring.lab.study.display import Progress
from shoestring.lab.study.execute import Outcome
from shoestring.lab.study.expand import StudyJob, expand
from shoestring.lab.study.report import report
from shoestring.lab.study.results import load_results
from shoestring.lab.study.spec import load
from shoestring.lab.study.tables import Table, main_table

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
    table = Table("t", "a <i>\nstudy", ("[a]", "b"), (("*", "[1]"), ("[x]\n\ny", "*")))
    assert "\\toprule\n{}[a] & b \\\\\n" in table.latex()
    assert "{}* & [1] \\\\\n{}[x] y & * \\\\\n" in table.latex()
    assert table.markdown().startswith("## a &lt;i> study\n")


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
    [
        ("best_acuracy", "no run has the study's score, 'best_acuracy'"),
        ("host", "is not a number in"),
    ],
)
def test_a_score_that_no_run_has_is_named(ended, score, message):
    folder = ended(score, *2 * [{"best_accuracy": 90.0, "host": {}}])
    with pytest.raises(InputError, match=message):
        report(folder)


def test_a_record_that_lacks_a_field_is_no_error(ended):
    folder = ended("best_accuracy", {"best_accuracy": 90.0}, {"best_accuracy": 92.0})
    study = folder / "study.toml"
    study.write_text(study.read_text().replace("profile = false", "profile = true"))
    for file in folder.glob(f"runs/*/{FILE}"):
        file.write_text(file.read_text().replace('"seconds": 1.0, ', ""))
    (row,) = expand(load(study), None).rows
    old = folder / "runs" / row.profile.name
    old.mkdir()
    (old / FILE).write_text('{"event": "start"}\n{"event": "end", "peak_bytes": 8}\n')
    made = report(folder)
    (row,) = made.results.rows
    assert f"Passed over: runs/{old.name} is a profile that lacks something." in made.text
    assert row.quantities == {"n": 2, "failed": 0, "score": 91.0, "interval": 12.7062} | {
        "measured_bytes": 8
    }


def test_a_search_that_has_not_ended_has_chosen_nothing(ended):
    folder = ended("best_accuracy", *2 * [{"best_accuracy": 90.0}])
    study = folder / "study.toml"
    search = "[[search]]\nper = ['density']\nover = {warmup = [1, 2]}\n"
    two = "[[grid]]\nlr = 0.1\ndensity = [1.0, 0.5]\n[[target]]\nwhere = {density = 0.5}\n"
    targets = two + "score = 90.0\n[[target]]\nwhere = {density = 0.5}\nwarmup = 2\n"
    study.write_text(study.read_text().partition("[[figure]]")[0] + search + targets)
    job, *_ = expand(load(study), lambda job: None).jobs
    (done,) = set(folder.glob(f"runs/*seed0*/{FILE}"))
    (folder / "runs" / job.name).mkdir()
    (folder / "runs" / job.name / FILE).write_text(done.read_text())
    made = report(folder)
    assert made.as_dict()["chosen"] == [] and made.results.rows == ()
    assert "| 100% | – | – | 1 of 4 runs have ended |" in made.text
    assert "| 50% | – | 2 | 0 of 4 runs have ended |" in made.text, "the second of two targets"
    assert f"{made.results.missing} runs have not finished." in made.text


def test_an_error_on_a_terminal_is_no_markup(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress(lambda job: tmp_path) as progress:
        progress.ended(
            Outcome(StudyJob("train", {"model": "m"}), tmp_path, (), "no file [/tmp/x] [a]")
        )
    assert "[/tmp/x] [a]" in capsys.readouterr().err


@pytest.mark.parametrize("source", [None, "a paper"])
def test_targets_of_no_source_are_asked_for(ended, source):
    folder = ended("accuracy", {"accuracy": 90.0}, {"accuracy": 92.0})
    file = folder / "study.toml"
    head = "" if source is None else f'source = "{source}"\n'
    file.write_text(f"{head}{file.read_text()}[[target]]\nwhere = {{lr = 0.1}}\nmin_score = 95.0\n")
    heads, *_, row = main_table(load_results(folder)).markdown().split("\n\n")[1].splitlines()
    assert ("asked for" in heads) is (source is None)
    assert ("the report" in heads) is (source is not None) and "≥ 95.00" in row
