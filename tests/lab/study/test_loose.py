"""Reports of runs that no study made: which of them are trials of one setting."""

import json
import re
import sys

import pytest

from shoestring.cli.main import main
from shoestring.errors import InputError
from shoestring.lab.records.run import FILE
from shoestring.lab.study.execute import FAILURE
from shoestring.lab.study.report import report
from shoestring.lab.study.results import load_results

IMAGES = {
    "model": "wrn-10-1", "data": "digits", "epochs": 1, "batch": 100, "learning_rate": 0.1,
    "drops": [0.5], "split": "test", "evaluate_every": 1, "evaluation_batch": 1000,
}  # fmt: skip
END = {"measured_peak_bytes": 2_000_000, "seconds": 3.0, "predicted": {}}
SPARSE = {"density": 0.3, "schedule": [[100, 10]]}


@pytest.fixture
def runs(tmp_path):
    """Writes a run's records; without a score it has not ended."""

    def write(name, score=None, plan=None, *, field="best_accuracy", **settings):
        events = [{"event": "start", "settings": {**IMAGES, "plan": plan or {}, **settings}}]
        events += [] if score is None else [{"event": "end", field: score, **END}]
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / FILE).write_text("".join(json.dumps(event) + "\n" for event in events))
        return folder

    write.folder = tmp_path / "runs"
    return write


def test_seeds_are_trials_and_what_changes_no_bit_is_no_setting(runs):
    for seed in (0, 1):
        runs(f"sparse{seed}", 90 + seed, {"sparsity": {**SPARSE, "seed": seed}}, seed=seed)
    runs("plain", 95.0, seed=0)
    neutral = {"precision": {"kind": "fp32", "seed": 3}, "microbatching": {"size": 100}}
    runs("neutral", 96.0, {**neutral, "sparsity": {"density": 1.0}}, seed=1, evaluation_batch=7)
    results = load_results(runs.folder)
    assert [(row.settings["density"], row.score.n, row.score.mean) for row in results.rows] == [
        (1.0, 2, 95.5),
        (0.3, 2, 90.5),
    ]
    assert results.varied == ("density",), "what the density explains is not shown"


@pytest.mark.parametrize(
    ("one", "other", "shown"),
    [
        ({"split": "test"}, {"split": "validation"}, "split"),
        ({"evaluate_every": 1}, {"evaluate_every": 4}, "evaluate_every"),
        *(
            ({"plan": {technique: first}}, {"plan": {technique: second}}, shown)
            for technique, first, second, shown in [
                ("sparsity", SPARSE, {**SPARSE, "fraction_multiplier": 2.0},
                 "sparsity.fraction_multiplier"),
                ("checkpointing", {"strategy": "per-block", "schedule": ["keep*3"]},
                 {"strategy": "per-block", "schedule": ["keep", "cheap*2"]}, "checkpoint"),
                ("precision", {"kind": "bf16"}, {"kind": "bf16", "rounding": "nearest"},
                 "precision.rounding"),
            ]
        ),
    ],
)  # fmt: skip
def test_runs_that_differ_are_rows(runs, one, other, shown):
    runs("a", 90.0, **one)
    runs("b", 80.0, **other)
    results = load_results(runs.folder)
    assert [row.score.n for row in results.rows] == [1, 1] and results.varied == (shown,)
    assert all(shown in row.settings for row in results.rows), "the default is said, too"


def test_translations_have_their_bleu(runs):
    runs("a", 24.5, field="bleu")
    text = report(runs.folder).text
    assert "BLEU |" in text and "24.50 (n = 1)" in text and "accuracy" not in text
    runs("b", 90.0, data="cifar10")
    results = load_results(runs.folder)
    assert [row.score.mean for row in results.rows] == [24.5, 90.0]
    assert results.study.score_label == "BLEU or accuracy (%)"


def test_different_data_have_fronts_of_their_own(runs):
    runs("small", 60.0, batch=10)
    runs("large", 95.0)
    runs("words", 4.0, data="multi30k", field="bleu")
    for file in runs.folder.glob(f"*/{FILE}"):
        text = file.read_text()
        size = 9 if "large" in str(file) else 8
        plan = json.dumps({"fundamental_peak_bytes": size})
        file.write_text(text.replace('"predicted": {}', f'"predicted": {plan}'))
    results = load_results(runs.folder)
    assert [results.rows[i].score.mean for i in results.front] == [60.0, 95.0, 4.0]
    with pytest.raises(InputError, match="no setting is the best for digits, multi30k together"):
        report(runs.folder, budget="1 MB")


def test_a_run_made_twice_is_one_trial(runs):
    for name, seed, score in (("a", 0, 90.0), ("b", 0, 90.0), ("c", 1, 92.0)):
        runs(name, score, seed=seed)
    made = report(runs.folder)
    assert [row.score.n for row in made.results.rows] == [2]
    assert "Passed over: b has the settings and the seed of a." in made.text


def test_what_cannot_be_read_is_passed_over_and_named(runs):
    runs("good", 90.0)
    half = runs("half", 91.0) / FILE
    half.write_text(half.read_text()[:-9])
    (runs("foreign") / FILE).write_text('{"step": 1, "loss": 0.5}\n[2]\n')
    (runs("alike") / FILE).write_text('{"event": "start", "settings": {"plan": "B"}}\n')
    runs("going")
    failed = runs("failed")
    (failed / FAILURE).write_text('{"error": "the loss is nan"}')
    made = report(runs.folder)
    assert [(row.score.n, row.quantities["failed"]) for row in made.results.rows] == [(1, 1)]
    for note in (
        "1 run has not finished.", "1 run failed.",
        "Passed over: half/records.jsonl, line 2 is not an event.",
        "Passed over: foreign/records.jsonl, line 1 is not an event.",
        "Passed over: alike/records.jsonl is not of shoestring train.",
    ):  # fmt: skip
        assert note in made.text
    assert "the loss is nan" in (made.folder / "index.html").read_text()


def page_data(text):
    """What the page's script draws; not a number is no JSON."""

    def strict(name):
        raise ValueError(name)

    data = re.search(r'id="data">(.*?)</script>', text, re.S)[1]
    return json.loads(data, parse_constant=strict)


def test_folders_of_the_same_name_are_linked_apart(runs):
    for name, rate in (("a/x", 0.1), ("b #1/x", 0.2)):
        file = runs(name, 90.0, learning_rate=rate) / FILE
        first, end = file.read_text().splitlines()
        losses = (f'{{"event": "evaluation", "epoch": {e}, "loss": {v}}}' for e, v in LOSSES)
        file.write_text("\n".join([first, *losses, end]) + "\n")
    text = (report(runs.folder).folder / "index.html").read_text()
    data = page_data(text)
    assert [row["runs"] for row in data["rows"]] == [[n] for n in data["curves"]]
    assert set(data["curves"]) == {"a/x", "b #1/x"}
    assert all("loss" not in curve for curve in data["curves"].values()), "one was not finite"
    for at, name in (("../a/x", "a/x"), ("../b%20%231/x", "b #1/x")):
        assert f'href="#run-{name}"' in text and f'<tr id="run-{name}">' in text
        assert f'href="{at}/records.jsonl"' in text
    alone = (report(runs.folder / "a/x").folder / "index.html").read_text()
    assert 'href="../records.jsonl"' in alone


LOSSES = ((1, 0.5), (2, "NaN"))


@pytest.mark.parametrize("line", ['{"loss": 1}', '"text"', "[]", '{"event": "start"}'])
def test_somebody_elses_records_are_one_line(runs, line, monkeypatch, capsys):
    (runs("one") / FILE).write_text(line)
    with pytest.raises(InputError, match=r"no run in .* has ended: one/records\.jsonl"):
        report(runs.folder)
    monkeypatch.setattr(sys, "argv", ["shoestring", "report", str(runs.folder)])
    monkeypatch.setattr("warnings.showwarning", lambda *args, **kwargs: None)
    with pytest.raises(SystemExit) as left:
        main()
    error = capsys.readouterr().err
    assert left.value.code == 2 and error.startswith("InputError: no run in")
    assert not (runs.folder / "report").exists()
