"""Records, the pages made of them, and what README and docs/report.md say of them agree."""

import json
import re
import shutil
from pathlib import Path

import pytest

from shoestring.lab.study.overview import PAGE, folders, overview
from shoestring.lab.study.results import load_results
from shoestring.lab.study.tables import shown, with_interval

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
README = (ROOT / "README.md").read_text()
REPORT = (ROOT / "docs" / "report.md").read_text()


@pytest.fixture(scope="module")
def cifar10():
    return load_results(RESULTS / "cifar10").rows


def test_the_page_of_all_comes_from_the_records(tmp_path):
    shutil.copytree(RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("*.md", "report"))
    made = overview(tmp_path / "results")
    assert made.text == (RESULTS / PAGE).read_text()


def test_every_study_folder_is_in_the_overview():
    there = {path.parent.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("study.toml")}
    assert there == set(folders(RESULTS))


def test_flops_are_relative_to_the_baselines_minibatch():
    """The report's arrows: sparsity takes less, microbatches as many, checkpoints more."""
    rows = load_results(RESULTS / "paper" / "techniques").rows
    ratio = {row.settings["technique"]: row.quantities["flops_ratio"] for row in rows}
    assert ratio["none"] == ratio["low precision"] == 1
    assert 0.3 < ratio["sparsity"] < 0.31
    assert ratio["microbatching"] == pytest.approx(1, abs=1e-6)
    assert 1.3 < ratio["checkpointing"] < 1.32


def test_accuracies_in_the_report_are_those_of_the_records(cifar10):
    """Its table has the rows of results/cifar10 in their order: memory, accuracy and the rest."""
    table = REPORT.partition("## What they cost in accuracy")[2].partition("\n\n\\*")[0]
    lines = [line for line in table.splitlines() if re.match(r"\| fp(16|32) ", line)]
    assert len(lines) == len(cifar10)
    for line, row in zip(lines, cifar10, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = ("precision", "density", "checkpoint", "microbatch")
        assert cells[:4] == [shown(n, row.settings.get(n)) for n in names], line
        sizes = [shown(n, row.quantities[n]) for n in ("counted_bytes", "measured_bytes")]
        assert cells[4:6] == sizes, line
        assert cells[6].removesuffix(" *") == with_interval(row.score), line


def test_the_choice_of_shortcut_and_rate_is_that_of_its_records():
    """Validation accuracy at the last evaluation, in results/cifar10/README.md and the overview."""
    found = {}
    for path in (RESULTS / "cifar10" / "choices").glob("*.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        settings, last = events[0]["settings"], events[-1]
        assert settings["split"] == "validation" and last["epoch"] >= 192
        found[settings["model"], settings["learning_rate"]] = last["accuracy"]
    said = (RESULTS / "cifar10" / "README.md").read_text().replace("**", "")
    page = (RESULTS / PAGE).read_text()
    for model, word in (("wrn-28-2", "strided"), ("wrn-28-2-pool", "pooled")):
        texts = [f"{found[model, rate]:.2f}" for rate in (0.05, 0.1, 0.2)]
        assert f"| {word} (`{model}`) | " + "% | ".join(texts) + "% |" in said
        assert f"{', '.join(texts)}% {word}" in page
    assert max(found, key=found.__getitem__) == ("wrn-28-2-pool", 0.1)


def test_bleu_in_the_report_is_that_of_the_records():
    text = " ".join(REPORT.split())
    held = load_results(RESULTS / "translation" / "multi30k").rows
    multi30k = {row.settings["precision"]: row for row in held}
    for precision, words in (("fp16", "in FP16"), ("fp32", "in FP32")):
        assert multi30k[precision].score.n == 3
        assert re.search(rf"{multi30k[precision].score.mean:.2f} (BLEU )?{words}", text), precision
    rows = load_results(RESULTS / "translation" / "europarl").rows
    told = text.partition("on Europarl, 20,000 updates")[2][:300]
    for row in rows:
        if row.score.mean is not None:
            assert f"{row.score.mean:.2f}" in told, (row.settings, row.score.mean)


def test_executed_rows_in_the_report_are_those_of_their_record():
    """Bytes, milliseconds, and how many times less."""
    text = " ".join(REPORT.split())
    record = json.loads((ROOT / "benchmarks/results/measured_memory_h200.json").read_text())
    rows = {row["name"].partition(",")[0]: row for row in record["rows"]}
    names = [("1", 100), ("1", 10), ("0.3", 10), ("0.2", 10), ("0.2", 4), ("0.1", 4)]
    planned = [rows[f"density {density} microbatch {size}"] for density, size in names]
    plain = [row for row in record["rows"] if row["name"].startswith("plain FP32")]
    sizes = [f"{row['peak_bytes'] / 1e6:.1f}" for row in (plain[0], *planned)]
    assert f"{', '.join(sizes[:-1])} and {sizes[-1]} MB" in text
    eager = sum(row["milliseconds"] for row in plain) / len(plain)
    times = [f"{eager:.1f}", *(f"{row['milliseconds']:.1f}" for row in planned)]
    assert f"{', '.join(times[:-1])} and {times[-1]} ms" in text
    less = plain[0]["peak_bytes"] / planned[2]["peak_bytes"]
    assert f"{less:.0f} times less executed" in text
    translation = [r for r in record["rows"] if r["name"].startswith("dc-transformer")]
    less = translation[0]["peak_bytes"] / translation[1]["peak_bytes"]
    assert f"{less:.1f} times less executed" in text


def test_the_readme_repeats_the_executed_ratio_and_its_accuracies(cifar10):
    record = json.loads((ROOT / "benchmarks/results/measured_memory_h200.json").read_text())
    rows = {row["name"].partition(",")[0]: row["peak_bytes"] for row in record["rows"]}
    plain, least = rows["plain FP32"], rows["density 0.3 microbatch 10"]
    text = " ".join(README.split())
    assert (
        f"plainly takes {plain / 1e6:.1f} MB" in text and f"it takes {least / 1e6:.1f} MB" in text
    )
    assert f"**{plain / least:.0f} times less executed**" in text
    best = {(r.settings.get("precision"), r.settings.get("density")): r.score for r in cifar10}
    planned, dense = best["fp16", 0.3], best["fp32", 1.0]
    assert f"at {planned.mean:.2f}% test accuracy beside {dense.mean:.2f}%" in text
    assert (planned.n, dense.n) == (1, 3), "one run beside three"


def readme_rows(start):
    """The cells of the README's table whose heading starts so."""
    lines = README.partition(f"| {start}")[2].splitlines()[2:]
    table = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[c.strip().strip("*") for c in line.strip("|").split("|")] for line in table]


@pytest.mark.parametrize(
    ("first", "name", "run"), [(0, "llama-8b-bf16", "c"), (3, "llama-1b-bf16", "b")]
)
def test_the_readme_compares_by_measured_rows(first, name, run):
    """Reserved bytes and milliseconds of one run, alone on the GPU, and the budget asked for."""
    held = (ROOT / "benchmarks/results/card_h200.jsonl").read_text().splitlines()[1:]
    rows = {r["way"]: r for r in map(json.loads, held) if (r["name"], r["run"]) == (name, run)}
    ways = ("plain", "checkpointed", "plan gc")
    for cells, way in zip(readme_rows("full fine-tuning")[first:], ways, strict=False):
        assert rows[way]["alone"]
        assert cells[1] == f"{rows[way]['reserved_bytes'] / 1e9:.1f} GB"
        assert cells[2] == f"{rows[way]['ms']:.0f} ms"
    planned = rows["plan gc"]
    assert planned["kind"] == "lossless"
    assert (
        f"{planned['budget_bytes'] / 1e9:.1f} GB" in readme_rows("full fine-tuning")[first + 2][0]
    )


def test_the_readme_compares_by_plan_speed():
    """Peak and time of plain, to two digits, as `benchmarks/plan_speed.py` printed them."""
    text = (ROOT / "benchmarks/results/plan_speed_h200.txt").read_text()
    printed = [re.findall(r"([\d.]+)x", line) for line in text.splitlines() if " MB " in line]
    gpt2, resnet = printed[1:5], printed[6:10]
    order = (0, 1, 2, 3)
    for cells, place in zip(readme_rows("FP32, allocated"), order, strict=True):
        for cell, rows in zip(cells[1:], (gpt2, resnet), strict=True):
            assert cell.replace("*", "").split(", ") == rows[place][:2]
