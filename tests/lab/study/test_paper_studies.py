"""The report as data: every file is read, and every number in it belongs to something."""

from pathlib import Path

import pytest

from shoestring.lab.models import builtin
from shoestring.lab.runs.defaults import (
    CIFAR10,
    TRANSLATION,
    TRANSLATION_BY_DENSITY,
    TRANSLATION_BY_MODEL,
)
from shoestring.lab.study.expand import expand, matches
from shoestring.lab.study.spec import load

PAPER = Path(__file__).parents[3] / "studies" / "paper"
FILES = sorted(PAPER.glob("*.toml"))
LABELS = """
    fig:pie table:overall fig:sparsity fig:batchsize fig:ckpt fig:resnet-sparsity-lp fig:resnet)
    table:micro fig:resnet-compare table:pareto) fig:transformer) table:transformer)
    sec:transformer-micro2 fig:transformer-compare table:cifar-lr table:iwslt-lr table:cifar-dsr
    table:iwslt-dsr
""".split()


def test_every_figure_and_table_has_a_file():
    sources = [load(file).source for file in FILES]
    for label in LABELS:
        assert any(label in source for source in sources), label


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_target_is_for_some_row_or_choice(file):
    study = load(file)
    made = expand(study, lambda job: 1.0)
    assert made.rows and study.targets
    settings = [row.settings for row in made.rows] + [choice.where for choice in made.choices]
    for target in study.targets:
        assert any(matches(target.where, given) for given in settings), target
    for row in made.rows:
        builtin(row.settings["model"])
    if study.baseline is not None:
        assert any(matches(study.baseline, row.settings) for row in made.rows)


def test_the_searches_agree_with_the_recipes():
    """Both are typed from the report's tables: they must not differ."""
    for target in load(PAPER / "learning-rates.toml").targets:
        model, density = target.where["model"], target.where["density"]
        told = CIFAR10.learning_rate * CIFAR10.multipliers(model, density).learning_rate
        assert target.quantities["lr"] == pytest.approx(told), target
    for target in load(PAPER / "translation-learning-rates.toml").targets:
        model, density = target.where["model"], target.where["density"]
        known = TRANSLATION_BY_MODEL.get(model, TRANSLATION_BY_DENSITY[density])
        told = TRANSLATION.learning_rate * known.learning_rate
        assert target.quantities["lr"] == pytest.approx(told), target
    tables = {"rewiring": CIFAR10.by_density, "translation-rewiring": TRANSLATION_BY_DENSITY}
    for name, table in tables.items():
        for target in load(PAPER / f"{name}.toml").targets:
            known = table[target.where["density"]]
            assert dict(target.quantities) == {
                "sparsity.fraction_multiplier": known.rewire_fraction,
                "sparsity.frequency_multiplier": known.rewire_frequency,
            }


def test_the_searches_come_in_the_reports_order():
    """Rates under default rewiring, then rewiring, then the rest with what both chose."""
    for before in ("", "translation-"):
        rates, wiring = (load(PAPER / f"{before}{n}.toml") for n in ("learning-rates", "rewiring"))
        (search,) = rates.searches
        assert set(search.using.values()) == {1.0} and len(search.using) == 2
        assert rates.after == () and wiring.after == (f"{before}learning-rates",)
    none = [v for s in wiring.searches for v in s.also]
    assert none == [{"sparsity.frequency_multiplier": 0.0}]
    for file in FILES:
        study = load(file)
        if study.kind == "train" and not study.searches:
            translation = "translation-" if "translation" in study.name else ""
            assert study.after == (f"{translation}learning-rates", f"{translation}rewiring")


def test_the_readme_counts_the_trainings():
    """`studies/README.md` has the number of every file."""
    said = (PAPER.parent / "README.md").read_text()
    for file in FILES:
        jobs = expand(load(file), lambda job: 1.0).jobs
        count = sum(job.kind == "train" for job in jobs)
        (line,) = [line for line in said.splitlines() if f"`paper/{file.name}`" in line]
        assert line.endswith(f"| {count:,} |"), (line, count)
