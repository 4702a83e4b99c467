"""Files → jobs: grids, searches in stages, and which runs are the same."""

import math
import sys

import pytest

from shoestring.cli.main import main
from shoestring.errors import InputError
from shoestring.lab.study.expand import FedChoice, StudyJob, expand, values_of
from shoestring.lab.study.spec import load

BASE = """
trials = 2
[base]
model = "wrn-10-1"
data = "digits"
"""
SEARCH = "[[search]]\nover = {lr = [0.1, 0.2]}"
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


def test_a_choice_is_for_its_combination_alone(study):
    """Grids that do not name the setting are a combination of their own, wherever they stand."""
    rates = lambda job: -abs(job.settings["lr"] - (0.2 if "density" in job.settings else 0.1))  # noqa: E731
    search = "[[search]]\nper = ['density']\nover = {lr = [0.1, 0.2]}\n"
    grids = ["[[grid]]\ndensity = 0.5\n", "[[grid]]\nprecision = 'bf16'\n"]
    for both in (grids, grids[::-1]):
        rows = expand(study(BASE + search + "".join(both)), rates).rows
        assert {(r.settings.get("density"), r.settings["lr"]) for r in rows} == {
            (0.5, 0.2),
            (None, 0.1),
        }


def test_a_choice_is_for_what_the_base_says_and_not_for_a_grid(study):
    text = BASE + f"lr = 0.01\n{SEARCH}\n[[grid]]\ndensity = 0.5\n[[grid]]\nlr = 0.3\n"
    rows = expand(study(text), lambda job: job.settings["lr"]).rows
    assert [row.settings["lr"] for row in rows] == [0.2, 0.3]
    assert [{s["lr"] for s in trained(row.trials)} for row in rows] == [{0.2}, {0.3}]


def test_values_are_no_choice_before_all_trials_have_ended(study):
    read = study(BASE + SEARCH)
    first, *_ = expand(read, lambda job: None).jobs
    (choice,) = expand(read, lambda job: 1.0 if job.name == first.name else None).choices
    assert (choice.ended, choice.is_made) == (1, False)
    (choice,) = expand(read, lambda job: math.nan).choices
    assert (choice.ended, choice.is_made) == (4, True)


def test_a_second_search_goes_on_with_what_was_chosen_for_the_base(study):
    text = BASE + "density = 0.5\n[[search]]\nper = ['density']\nover = {lr = [0.1, 0.2]}\n"
    read = study(text + "[[search]]\nover = {warmup = [1, 2]}\n")
    made = expand(read, lambda job: job.settings["lr"] + job.settings.get("warmup", 0))
    assert all(s["lr"] == 0.2 for s in trained(made.jobs) if "warmup" in s)


def test_a_search_tries_single_combinations_too(study):
    """The report's arm without rewiring: one candidate, not one for every fraction."""
    over = "over = {'sparsity.fraction_multiplier' = [1, 2], 'sparsity.frequency_multiplier' = [1]}"
    text = f"density = 0.5\n[[search]]\n{over}\nalso = [{{'sparsity.frequency_multiplier' = 0}}]\n"
    made = expand(study(BASE + text), lambda job: None)
    tried = [c.values for c in made.choices[0].candidates]
    assert len(tried) == 3 and tried[-1] == {"sparsity.frequency_multiplier": 0}
    with pytest.raises(InputError, match="also names 'lr'"):
        study(
            BASE + text.replace("also = [{'sparsity.frequency_multiplier' = 0", "also = [{lr = 1")
        )


def test_a_microbatch_of_the_whole_minibatch_is_no_microbatch(study):
    """Its trainings are those without one, simulated or not: forty of the report's studies."""
    text = "batch = 20\n[[grid]]\n[[grid]]\nmicrobatch = [20, 10]\n"
    made = expand(study(BASE + text + "simulated = true\n"), lambda job: None)
    assert len(made.rows) == 2
    assert len(trained(made.jobs)) == 4  # two seeds each
    text = text.replace("batch = 20\n[", "[").replace("20", "100")  # the data's own
    assert len(expand(study(BASE + text), lambda job: None).rows) == 2


def test_choices_of_another_study_are_for_its_settings_and_not_for_a_grids_own(study):
    fed = [
        FedChoice("rates", {"model": "wrn-10-1", "density": 0.5}, {"lr": 0.3}),
        FedChoice("rates", {"model": "wrn-10-1", "density": 1.0}, {"lr": 0.4}),
        FedChoice("rates", {"model": "another"}, {"lr": 0.5}),
    ]
    text = "lr = 0.01\n[[grid]]\ndensity = 0.5\n[[grid]]\n[[grid]]\ndensity = 0.5\nlr = 0.9\n"
    rows = expand(study(BASE + text), lambda job: None, fed).rows
    assert [row.settings["lr"] for row in rows] == [0.3, 0.4, 0.9]


def test_what_grids_share_is_one_row(study):
    made = expand(study(BASE + 2 * "[[grid]]\ndensity = [0.5, 0.5]\n"), lambda job: None)
    assert len(made.rows) == 1 and made.total == 3


def test_one_number_written_twice_is_one_row(study):
    made = expand(study(BASE + "[[grid]]\nlr = [1, 1.0]\n[[grid]]\nlr = 1.0"), lambda job: None)
    assert len(made.rows) == 1 and len(trained(made.jobs)) == 2


def test_seeds_of_a_grid_are_trials_of_one_row(study):
    text = "[[grid]]\nlr = [0.1, 0.2]\nseed = [3, 4]\n[[grid]]\nlr = 0.1\nseed = 5"
    made = expand(study(BASE + text), lambda job: None)
    found = [(row.settings["lr"], [t.settings["seed"] for t in row.trials]) for row in made.rows]
    assert found == [(0.1, [3, 4, 5]), (0.2, [3, 4])]
    assert all("seed" not in row.settings for row in made.rows)


def test_a_baseline_that_no_row_has_is_named_before_the_runs(study):
    read = study("baseline = {lr = 0.9}\n" + BASE + "[[grid]]\nlr = [0.1, 0.2]")
    with pytest.raises(InputError, match=r"no row is the baseline {'lr': 0.9}"):
        expand(read, lambda job: None)


def test_a_wrong_baseline_is_named_before_a_search(study):
    grid = "[[grid]]\ndensity = [1.0, 0.5]"
    with pytest.raises(InputError, match=r"no row is the baseline {'density': 0.9}"):
        expand(
            study("baseline = {density = 0.9}\n" + BASE + SEARCH + "\n" + grid), lambda job: None
        )
    chosen = study("baseline = {lr = 0.9}\n" + BASE + SEARCH + "\n" + grid)
    expand(chosen, lambda job: None)
    with pytest.raises(InputError, match=r"no row is the baseline {'lr': 0.9}"):
        expand(chosen, lambda job: 1.0)


def test_what_is_not_said_is_not_used(study):
    grids = "[[grid]]\nlr = 0.1\n[[grid]]\nlr = 0.1\nprecision = 'fp32'\ndensity = 1\n"
    made = expand(study("baseline = {precision = 'fp32'}\n" + BASE + grids), lambda job: None)
    assert len(made.rows) == 1


def test_every_value_of_a_setting_is_known(study):
    known = values_of(study(SEARCHED))
    assert set(known["lr"]) == {0.1, 0.2} and set(known["split"]) == {"validation"}
    assert set(known["sparsity.method"]) == {"dsr", "set"} and set(known["seed"]) == {0, 1}
    assert set(known["density"]) == {1.0, 0.5} and set(known["epochs"]) == {3}


def test_profiles_for_two_devices_are_two_runs(study):
    text = "kind = 'profile'\n[base]\nmodel = 'wrn-10-1'\n[[grid]]\ndevice = ['cpu', 'cuda']"
    assert expand(study(text), lambda job: None).total == 2


def test_the_same_settings_are_the_same_run():
    job = StudyJob("train", {"model": "m", "density": 0.5, "seed": 1, "lr": 0.1})
    turned = StudyJob("train", dict(reversed(job.settings.items())))
    neutral = StudyJob("train", {**job.settings, "checkpoint": "none", "precision": "fp32"})
    elsewhere = StudyJob("train", {**job.settings, "data_on": "host"})
    assert job.name == turned.name == neutral.name == elsewhere.name
    others = [{"seed": 2}, {"lr": 0.2}, {"checkpoint": "no-bn"}, {"split": "validation"}]
    assert len({StudyJob("train", {**job.settings, **o}).name for o in others} | {job.name}) == 5


def test_a_fast_equivalent_trains_one_thing_and_shows_another(study):
    text = """
    [[grid]]
    microbatch = 10
    simulated = true
    stands_for = {simulated = false, checkpoint = "no-bn"}
    """
    (row,) = expand(study(BASE + text), lambda job: None).rows
    assert all(s["simulated"] and "checkpoint" not in s for s in trained(row.trials))
    assert row.settings["checkpoint"] == "no-bn" and "simulated" not in row.settings
    assert row.profile.settings["checkpoint"] == row.measure.settings["checkpoint"] == "no-bn"
    assert row.trained == {"simulated": True, "checkpoint": None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[grid]]\ndensty = 0.5", r"\[\[grid\]\] has no setting 'densty'"),
        ("[[grid]]\nout = 'x'", "has no setting 'out'"),
        ("[[grid]]\nstands_for = {chekpoint = 'no-bn'}", "has no setting 'chekpoint'"),
        ("[[search]]\nover = {lr = 0.1}", "a search is over lists"),
        ("[[search]]\nover = {lr = []}", "search.over lr has no values"),
        ("[[grid]]\ndensity = []", r"\[\[grid\]\] density has no values"),
        ("[[search]]\nover = {lr = [0.1]}\nseeds = [3, 3]", r"seeds \[3, 3\] has one twice"),
        ("[[figure]]\nname = 'a'\nx = 'counted'", "names 'counted', which is not a quantity"),
        ("[[target]]\nmax_scor = 1.0", r"\[\[target\]\] names 'scor', which is not a quantity"),
        ("[[figure]]\nx = 'density'", "a figure needs a name"),
        ("[[figure]]\nname = 'a/b'", r"\[\[figure\]\] name 'a/b' is not a file name"),
        ("[[figure]]\nname = ' '", r"\[\[figure\]\] name ' ' is not a file name"),
        (2 * "[[figure]]\nname = 'a'\n", "two figures are called 'a'"),
        ("[[grid]]\nsnapshot_every = [1, 2]", "snapshot_every has several values"),
        ("seed = 5", r"\[base\] seed is beside trials or seeds"),
        (f"{SEARCH}\n[[grid]]\nlr = 0.1", "over lr: every .* sets it"),
        ("[extra]", "a study has no setting 'extra'"),
        ("[grid]\ndensity = 0.5", "grid must be a list of tables, not {'density': 0.5}"),
        ("[[grid]]\nlabels = 'x'", r"\[\[grid\]\] labels must be a table, not 'x'"),
        ("[[grid]]\nstands_for = 3", "stands_for must be a table, not 3"),
        ("[[grid]]\ndensity = [0.5, 'x']", "density must be a number or a list of numbers"),
        ("epochs = '3'", r"\[base\] epochs must be a whole number, not '3'"),
        ("density = [1.0, 0.5]", r"\[base\] density must be a number, not \[1.0, 0.5\]"),
        ("[[target]]\nwhere = 3", r"\[\[target\]\] where must be a table, not 3"),
        ("[[target]]\nscore = 'x'", r"\[\[target\]\] score must be a number, not 'x'"),
        ("[[target]]\nwhere = {densty = 1}", "where names 'densty', which is not a setting"),
        ("[baseline]\ndensty = 1", "baseline names 'densty', which is not a setting"),
        ("[[figure]]\nname = 'a'\nseries = 'densty'", "series names 'densty', which is no"),
        ("[[figure]]\nname = 'a'\nkind = 'pies'", "unknown figure 'pies'"),
        (f"{SEARCH}\nper = ['densty']", "per names 'densty', which is not a setting of this study"),
        (f"{SEARCH}\nper = 'model'", "per must be a list of texts, not 'model'"),
        (f"{SEARCH}\nonly = {{densty = 1}}", "only names 'densty', which is not a setting"),
        (f"{SEARCH}\nonly = 3", "only must be a table, not 3"),
        (f"{SEARCH}\nseeds = 3", r"\[\[search\]\] seeds must be a list of whole numbers, not 3"),
    ],
)
def test_what_a_file_cannot_say_is_named(study, text, message):
    with pytest.raises(InputError, match=message):
        study(BASE + text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds = 3", "seeds must be a list of whole numbers, not 3"),
        ("seeds = [true]", "seeds must be a list of whole numbers"),
        ("trials = '3'", "trials must be a whole number, not '3'"),
        ("trials = 0", "trials 0 is below 1"),
        ("base = 3", "base must be a table, not 3"),
        ("columns = 3", "columns must be a list of texts, not 3"),
        ("columns = 'n'", "columns must be a list of texts, not 'n'"),
        ("name = 3", "name must be a text, not 3"),
        ("name = '../x'\n" + BASE, "name '../x' is not a file name"),
        ("name = ''\n" + BASE, "name '' is not a file name"),
        ("grid = []\n" + BASE, "grid has no tables"),
        ("profile = 'no'", "profile must be true or false, not 'no'"),
    ],
)
def test_a_value_of_another_kind_is_named(study, text, message):
    with pytest.raises(InputError, match=message):
        study(text)


def test_a_mistake_ends_before_anything_is_written(tmp_path, monkeypatch, capsys):
    file, out = tmp_path / "a.toml", tmp_path / "out"
    file.write_text(BASE + "[grid]\ndensity = 0.5")
    monkeypatch.setattr("warnings.showwarning", lambda *args, **kwargs: None)
    monkeypatch.setattr(sys, "argv", ["shoestring", "study", str(file), "--out", str(out)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2 and not out.exists()
    assert capsys.readouterr().err.endswith("hint: [[grid]] in place of [grid]\n")


def test_a_file_that_is_none(tmp_path, study):
    with pytest.raises(InputError, match="cannot read the study"):
        load(tmp_path / "none.toml")
    with pytest.raises(InputError, match="is not TOML"):
        study("= 3")
    with pytest.raises(InputError, match="no data is given"):
        study("[base]\nmodel = 'wrn-10-1'")
