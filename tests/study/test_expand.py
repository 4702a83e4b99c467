"""Files → jobs: grids, searches in stages, and which runs are the same."""

import math

import pytest

from shoestring.errors import InputError
from shoestring.study.expand import Job, expand
from shoestring.study.spec import load

BASE = """
trials = 2
[base]
model = "wrn-10-1"
data = "digits"
"""
SEARCHED = (
    BASE
    + """
[[search]]
per = ["density"]
over = {lr = [0.1, 0.2]}
using = {epochs = 3}

[[search]]
per = ["density"]
only = {density = [0.5]}
over = {sparsity.method = ["dsr", "set"]}

[[grid]]
density = [1.0, 0.5]
precision = ["fp32", "fp16"]
"""
)


@pytest.fixture
def study(tmp_path):
    def read(text):
        path = tmp_path / "some.toml"
        path.write_text(text)
        return load(path)

    return read


def trained(jobs):
    return [dict(job.settings) for job in jobs if job.kind == "train"]


def test_a_grid_is_all_combinations_times_all_seeds(study):
    made = expand(study(BASE + "[[grid]]\ndensity = [1.0, 0.5]\nlr = [0.1, 0.2]"), lambda job: None)
    assert len(made.rows) == 4 and made.total == len(made.jobs) == 4 * 2 + 2  # 2 profiles
    seeds = [(s["density"], s["lr"], s["seed"]) for s in trained(made.jobs)]
    assert seeds == [(d, lr, s) for d in (1.0, 0.5) for lr in (0.1, 0.2) for s in (0, 1)]


def test_searches_come_one_after_the_other(study):
    read = study(SEARCHED)
    first = expand(read, lambda job: None)
    assert all(s["split"] == "validation" and s["epochs"] == 3 for s in trained(first.jobs))
    assert len(first.jobs) == 2 * 2 * 2 and first.rows == ()

    rates = lambda job: job.settings["lr"] * (1 if job.settings["density"] == 1 else -1)  # noqa: E731
    done = {job.name: rates(job) for job in first.jobs}
    second = expand(read, lambda job: done.get(job.name))
    new = [job for job in second.jobs if job.name not in done]
    assert [s["sparsity.method"] for s in trained(new)] == ["dsr", "dsr", "set", "set"]
    assert all(s["lr"] == 0.1 and s["density"] == 0.5 for s in trained(new))

    done |= {job.name: float(job.settings["sparsity.method"] == "set") for job in new}
    last = expand(read, lambda job: done.get(job.name))
    assert last.total == first.total == second.total == len(last.jobs)
    chosen = {(r.settings["density"], r.settings["lr"]): r.settings for r in last.rows}
    assert set(chosen) == {(1.0, 0.2), (0.5, 0.1)}
    assert chosen[0.5, 0.1]["sparsity.method"] == "set"
    assert "sparsity.method" not in chosen[1.0, 0.2]
    assert all(s.get("split") is None for s in trained(j for r in last.rows for j in r.jobs))


def test_values_whose_trial_failed_are_not_chosen(study):
    read = study(BASE + "[[search]]\nover = {lr = [0.1, 0.2, 0.3]}\n[[grid]]\ndensity = 0.5")
    scores = {0.1: 50.0, 0.2: 99.0, 0.3: 50.0}
    failing = (0.2, 0)

    def score(job):
        if job.kind != "train" or (job.settings["lr"], job.settings["seed"]) == failing:
            return math.nan
        return scores[job.settings["lr"]]

    choice = expand(read, score).choices[0]
    assert choice.values == {"lr": 0.1}, "and of equals the first"
    assert [(c.score.n, c.failed) for c in choice.candidates] == [(2, 0), (1, 1), (2, 0)]


def test_the_same_settings_are_the_same_run():
    job = Job("train", {"model": "m", "density": 0.5, "seed": 1, "lr": 0.1})
    turned = Job("train", dict(reversed(job.settings.items())))
    neutral = Job("train", {**job.settings, "checkpoint": "none", "precision": "fp32"})
    elsewhere = Job("train", {**job.settings, "data_on": "host"})
    assert job.name == turned.name == neutral.name == elsewhere.name
    others = [{"seed": 2}, {"lr": 0.2}, {"checkpoint": "no-bn"}, {"split": "validation"}]
    assert len({Job("train", {**job.settings, **o}).name for o in others} | {job.name}) == 5


def test_a_fast_equivalent_trains_one_thing_and_shows_another(study):
    text = """
    [[grid]]
    microbatch = 10
    simulated = true
    stands_for = {simulated = false, checkpoint = "no-bn"}
    """
    (row,) = expand(study(BASE + text), lambda job: None).rows
    assert all(s["simulated"] and "checkpoint" not in s for s in trained(row.trials))
    assert row.settings["checkpoint"] == "no-bn" and not row.settings["simulated"]
    assert row.profile.settings["checkpoint"] == row.measure.settings["checkpoint"] == "no-bn"
    assert row.trained == {"simulated": True, "checkpoint": None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[grid]]\ndensty = 0.5", r"\[grid\] has no setting 'densty'"),
        ("[[grid]]\nout = 'x'", "has no setting 'out'"),
        ("[[grid]]\nstands_for = {chekpoint = 'no-bn'}", "has no setting 'chekpoint'"),
        ("[[search]]\nover = {lr = 0.1}", "a search is over lists"),
        ("[[figure]]\nx = 'density'", "a figure needs a name"),
        ("[extra]", "a study has no setting 'extra'"),
    ],
)
def test_what_a_file_cannot_say_is_named(study, text, message):
    with pytest.raises(InputError, match=message):
        study(BASE + text)


def test_a_file_that_is_none(tmp_path, study):
    with pytest.raises(InputError, match="cannot read the study"):
        load(tmp_path / "none.toml")
    with pytest.raises(InputError, match="is not TOML"):
        study("= 3")
    with pytest.raises(InputError, match="no data is given"):
        study("[base]\nmodel = 'wrn-10-1'")
