"""Reports of a study that was really run: every number comes from its records."""

import html.parser
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from studies import FAILED, JOBS, records

from shoestring.errors import InputError
from shoestring.lab.study.report import report
from shoestring.lab.study.results import load_results

pytestmark = pytest.mark.slow


class Page(html.parser.HTMLParser):
    """Tags, identifiers, links, texts of cells and the data of a page."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.cells, self.open, self.data = [], [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.open.append((tag, given))
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given[n] for n in ("href", "src") if n in given]

    def handle_data(self, data):
        tag, given = self.open[-1] if self.open else ("", {})
        if tag == "script" and given.get("id") == "data":
            self.data += data
        elif tag in ("td", "th"):
            self.cells.append(data)


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    return report(tiny, tmp_path_factory.mktemp("report"), budget="1 MB")


def ends(tiny, part):
    return [e[-1] for name, e in records(tiny).items() if part in name and e[-1]["event"] == "end"]


def test_rows_are_the_means_of_the_records(tiny, made):
    rows = {(r.settings["precision"], r.settings["lr"]): r for r in made.results.rows}
    plain = rows["fp32", 0.05]
    scores = [e["best_accuracy"] for e in ends(tiny, "-test-") if e["epoch"] == 2]
    mine = [run.end["best_accuracy"] for run in plain.runs]
    assert len(mine) == 2 and set(mine) <= set(scores)
    assert plain.score.mean == pytest.approx(statistics.mean(mine))
    assert plain.score.interval == pytest.approx(12.7062 * statistics.stdev(mine) / 2**0.5)
    assert plain.quantities["measured_bytes"] == max(
        run.end["measured_peak_bytes"] for run in plain.runs
    )
    counted = plain.quantities["counted_bytes"]
    assert counted in [end["peak_bytes"] for end in ends(tiny, "-profile-")]
    assert counted == plain.runs[0].end["predicted"]["fundamental_peak_bytes"]

    (chosen,) = made.results.choices
    best = max(chosen.candidates, key=lambda c: c.score.mean)
    fast = rows["bf16", best.values["lr"]]
    (measured,) = ends(tiny, "-measure-")
    assert fast.quantities["measured_bytes"] == measured["measured_peak_bytes"]
    assert fast.quantities["measured_bytes"] < min(r.end["measured_peak_bytes"] for r in fast.runs)
    assert rows["fp32", 1e30].score.n == 0 and rows["fp32", 1e30].quantities["failed"] == 2
    assert made.best is fast, "the only one within the budget"


def test_tables_say_n_and_what_is_not_the_real_thing(made):
    text = (made.folder / "tables.md").read_text()
    assert "(n = 2) \\* | 90.00 ± 0.50 |" in text
    assert "trained by a fast equivalent (simulated = yes)" in text
    assert f"{FAILED} runs failed." in text and "not ended" not in text
    assert "Pareto-optimal settings" in text and "The best within equal memory" in text
    assert "Chosen on the validation split" in text
    latex = (made.folder / "tables.tex").read_text()
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 4
    shown = [line for line in latex.splitlines() if not line.startswith("%")]
    assert any(r"$\pm$" in line for line in shown) and "±" not in "".join(shown)


def test_everything_is_the_same_bytes_again(tiny, made, tmp_path):
    """In another process, with other hashes."""
    done = subprocess.run(
        [sys.executable, "-m", "shoestring", "report", tiny, "--out", tmp_path, "--json"],
        env={**os.environ, "PYTHONHASHSEED": "5", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    files = json.loads(done.stdout)["files"]
    assert set(files) == {
        "tables.md", "tables.tex", "index.html",
        *(f"{n}.{kind}" for n in ("front", "pies") for kind in ("svg", "png")),
    }  # fmt: skip
    for name in files:
        assert (tmp_path / name).read_bytes() == (made.folder / name).read_bytes(), name


def test_the_page_needs_nothing_from_outside(tiny, made):
    text = (made.folder / "index.html").read_text()
    page = Page(text)
    runs = os.path.relpath(tiny / "runs", made.folder)  # they lie apart
    outside = [link for link in page.links if not link.startswith(("#", f"{runs}/"))]
    assert not outside and not re.search(r"https?://(?!www\.w3\.org/)|@import|url\(", text)
    assert len(page.ids) == len(set(page.ids))
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in page.ids, link
        else:
            assert (made.folder / link).is_file(), link
    assert sum(name.startswith("run-") for name in page.ids) == JOBS
    assert page.cells.count("failed") == FAILED
    assert "A tiny &lt;study&gt;" in text and "<study>" not in text


def test_the_page_holds_the_records_numbers(tiny, made):
    data = json.loads(Page((made.folder / "index.html").read_text()).data)
    found = [row for row in data["rows"] if "name" not in row]
    assert len(data["rows"]) - len(found) == 2, "the values of the search"
    for row, mine in zip(found, made.results.rows, strict=True):
        assert row["score"] == mine.score.mean
        assert row["memory"] == mine.quantities.get("counted_bytes")
        for name in row["runs"]:
            assert (tiny / "runs" / name).is_dir()
    for profile in data["profiles"]:
        totals = [sum(column) for column in zip(*profile["bytes"].values(), strict=True)]
        assert max(totals) == totals[profile["peak"]] == profile["peak_bytes"]
        live = sum(size for *_, size in profile["live"]) + profile["live_rest_bytes"]
        assert live == profile["peak_bytes"]
    for name, curve in data["curves"].items():
        events = [e for e in records(tiny)[name] if e["event"] == "evaluation"]
        assert curve["accuracy"] == [pytest.approx(e["accuracy"], rel=1e-4) for e in events]


def test_runs_without_a_study_are_reported_too(tiny, tmp_path):
    results = load_results(tiny / "runs")
    assert {row.score.n for row in results.rows} >= {2}
    assert "lr" in results.varied
    with pytest.raises(InputError, match="there are no runs"):
        report(tmp_path)


def test_a_study_that_has_not_begun_is_reported(tmp_path):
    spec = Path(__file__).parents[3] / "studies" / "cifar10.toml"
    (tmp_path / "study.toml").write_bytes(spec.read_bytes())
    made = report(tmp_path)
    assert made.results.missing > len(made.results.rows)
    assert f"{made.results.missing} runs have not finished" in made.text
    assert (tmp_path / "report" / "cifar10.png").exists()
    search = '[[search]]\nover = {"sparsity.fraction_multiplier" = [1.0, 2.0]}\n'
    (tmp_path / "study.toml").write_text(spec.read_text() + search)
    assert report(tmp_path).results.rows == (), "there are none before the search has ended"


def test_the_tables_of_results_come_from_their_records(tmp_path):
    """What is shown as found is what the records say, by today's code."""
    results = Path(__file__).parents[3] / "results"
    assert any(results.rglob("runs/*/records.jsonl"))
    for spec in results.rglob("study.toml"):
        folder = tmp_path / spec.parent.name
        shutil.copytree(spec.parent, folder, ignore=shutil.ignore_patterns("report"))
        report(folder)
        for name in ("tables.md", "tables.tex", "index.html"):
            made = (folder / "report" / name).read_bytes()
            assert made == (spec.parent / "report" / name).read_bytes(), spec.parent / name
