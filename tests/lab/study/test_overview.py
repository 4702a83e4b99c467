"""The page of all studies: values from records, nothing that was not run, and odd files."""

import json
import sys

import pytest

from shoestring.cli.main import main
from shoestring.errors import InputError
from shoestring.lab.records.run import FILE
from shoestring.lab.study.expand import expand
from shoestring.lab.study.overview import OVERVIEW, PAGE, overview
from shoestring.lab.study.spec import load

STUDY = """
profile = false
seeds = [0, 1, 2]
[base]
model = "wrn-10-1"
data = "digits"
[[grid]]
density = [1.0, 0.5]
[[target]]
where = {density = 1.0}
score = 94.43
interval = 0.17
"""
FILE_OF_ALL = """
title = "All"
[[item]]
name = "Table 1"
command = "shoestring study x.toml"
status = "departs"
how = "two seeds"
folder = "sub/one"
show = [{where = {density = 1.0}, words = "dense"}, {where = {density = 0.5}, words = "half"}]
[[item]]
name = "Figure 2"
status = "not run"
how = "no time"
[[agreement]]
claim = "it works"
agrees = "yes"
folder = "sub/one"
show = [{where = {density = 1.0}, says = "well"}]
"""


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "sub" / "one"
    folder.mkdir(parents=True)
    (folder / "study.toml").write_text(STUDY)
    for job in expand(load(folder / "study.toml", "one"), lambda job: None).jobs:
        if job.settings["density"] == 1 and job.settings["seed"] < 2:
            place = folder / "runs" / job.name
            place.mkdir(parents=True)
            end = {"event": "end", "best_accuracy": 90.0 + job.settings["seed"], "seconds": 1.0}
            start = {"event": "start", "settings": {}, "host": {}}
            (place / FILE).write_text(f"{json.dumps(start)}\n{json.dumps(end)}\n")
    (tmp_path / OVERVIEW).write_text(FILE_OF_ALL)
    return tmp_path


def test_a_line_for_each_table_and_figure(results):
    lines = overview(results).text.splitlines()
    (table,) = [line for line in lines if line.startswith("| Table 1")]
    assert "dense: 90.50 ± 6.35 (n = 2); half: not run" in table
    assert "| 2, 0 |" in table and "dense: 94.43 ± 0.17" in table and "departs: two seeds" in table
    assert "| Figure 2 |  | – | – | – | – | not run: no time |" in lines
    assert "| it works | 90.50 ± 6.35 (n = 2) | well | yes |" in lines


def test_the_command_makes_the_reports_too_and_the_same_bytes_again(results, monkeypatch, capsys):
    made = []
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["shoestring", "report", str(results), "--json"])
        monkeypatch.setattr("warnings.showwarning", None)  # main() replaces it
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        assert json.loads(capsys.readouterr().out)["reports"] == ["sub/one"]
        files = [results / PAGE, *sorted((results / "sub/one/report").iterdir())]
        made.append([path.read_bytes() for path in files])
    assert made[0] == made[1] and len(made[0]) > 3


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('status = "departs"', 'status = "fine"', "status 'fine'"),
        ('name = "Figure 2"\n', "", "has no name"),
        ('folder = "sub/one"', 'folder = "../one"', "not a folder inside"),
        ("show = [{where", "show = [{wher", "no setting 'wher'"),
        ("[[item]]", "[[item", "not TOML"),
    ],
)
def test_files_that_cannot_be(results, old, new, match):
    (results / OVERVIEW).write_text(FILE_OF_ALL.replace(old, new))
    with pytest.raises(InputError, match=match):
        overview(results)
    assert not (results / PAGE).exists()
