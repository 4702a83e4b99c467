"""Searches that feed the studies after them: what was chosen there is used, kept and said."""

import json
import shutil

import pytest

from shoestring.errors import InputError
from shoestring.lab.records.run import FILE
from shoestring.lab.study import feed
from shoestring.lab.study.command import Folder, run_study
from shoestring.lab.study.expand import expand
from shoestring.lab.study.results import load_results
from shoestring.lab.study.spec import load

BASE = 'profile = false\n[base]\nmodel = "tiny_nets:tiny_linear"\ndata = "digits"\nepochs = 1\n'
RATES = BASE + "[[search]]\nper = ['density']\nover = {lr = [0.1, 0.2, 0.3]}\n"
GRID = "[[grid]]\ndensity = [1.0, 0.5]\n"
AFTER = f"after = ['rates', 'wiring']\n{BASE}{GRID}"


def study(folder, text):
    folder.mkdir()
    (folder / "study.toml").write_text(text)
    return load(folder / "study.toml", folder.name)


def end(folder, job, score):
    place = folder / "runs" / job.name
    place.mkdir(parents=True)
    events = [{"event": "start", "settings": {}}, {"event": "end", "best_accuracy": score}]
    (place / FILE).write_text("".join(json.dumps(event) + "\n" for event in events))


def searched(folder):
    """A study of learning rates that has ended: 0.2 is the best where it is dense, else 0.3."""
    made = study(folder, RATES + GRID)
    for job in expand(made, lambda job: None).jobs:
        best = 0.2 if job.settings["density"] == 1 else 0.3
        end(folder, job, 90 - abs(job.settings["lr"] - best))


def gathered(made, folder):
    return feed.gathered(made, folder, lambda s, at: Folder(at).expansion(s))


def rates(made, fed):
    return [row.settings.get("lr") for row in expand(made, lambda job: None, fed.choices).rows]


def test_what_was_chosen_beside_it_is_used_and_kept(tmp_path, capsys):
    searched(tmp_path / "rates")
    made = study(tmp_path / "density", AFTER)
    fed = gathered(made, tmp_path / "density")
    assert rates(made, fed) == [0.2, 0.3] and fed.missing == ("wiring",)
    assert "wiring is not there" in capsys.readouterr().err
    fed.save(tmp_path / "density")
    shutil.rmtree(tmp_path / "rates")  # its report does not need it any more
    assert feed.of_folder(tmp_path / "density") == fed
    found = load_results(tmp_path / "density")
    assert [row.settings["lr"] for row in found.rows] == [0.2, 0.3]
    assert "chosen by the searches of rates" in found.remarks[0]
    assert "wiring were not run" in found.remarks[1]


def test_a_search_that_has_not_ended_has_not_chosen(tmp_path):
    searched(tmp_path / "rates")
    shutil.rmtree(next((tmp_path / "rates" / "runs").iterdir()))
    file = tmp_path / "density.toml"
    file.write_text(AFTER)
    with pytest.raises(InputError, match="rates has not chosen yet"):
        run_study(file, tmp_path / "density")
    assert not (tmp_path / "density").exists()


def test_a_search_goes_on_with_what_another_chose(tmp_path):
    searched(tmp_path / "rates")
    more = "[[search]]\nper = ['density']\nover = {'sparsity.fraction_multiplier' = [1.0, 2.0]}\n"
    made = study(tmp_path / "wiring", f"after = ['rates']\n{BASE}{more}{GRID}")
    jobs = expand(made, lambda job: None, gathered(made, tmp_path / "wiring").choices).jobs
    assert {(job.settings["density"], job.settings["lr"]) for job in jobs} == {(1, 0.2), (0.5, 0.3)}


@pytest.mark.parametrize("text", ["{", "[]", '{"choices": [3], "missing": []}', "[" * 100_000])
def test_choices_that_somebody_changed(tmp_path, text):
    (tmp_path / feed.CHOICES).write_text(text)
    with pytest.raises(InputError, match="not of shoestring study"):
        feed.of_folder(tmp_path)
