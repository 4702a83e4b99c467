"""The pages in headless Chromium: what is rendered, what keys do, how fast a large study opens.

Needs `chromium` on the PATH, or the variable SHOESTRING_CHROMIUM.
"""

import html
import json
import os
import re
import shutil
import subprocess

import pytest
from studies import TINY, made_up

from shoestring.lab.study.expand import expand
from shoestring.lab.study.page import page
from shoestring.lab.study.profile_page import write_profile
from shoestring.lab.study.report import report
from shoestring.lab.study.results import load_results
from shoestring.lab.study.spec import load

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FOUND = [os.environ.get("SHOESTRING_CHROMIUM"), *map(shutil.which, NAMES)]
CHROMIUM = next(filter(None, FOUND), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: none on the PATH"),
]

BEFORE = "<script>window.errors = []; onerror = (message) => errors.push(String(message));</script>"
AFTER = """<script>
const key = (node, name) =>
  node.dispatchEvent(new KeyboardEvent("keydown", {key: name, bubbles: true}));
const bytes = () =>
  [...document.querySelectorAll("#pie-rows [data-bytes]")].map((n) => Number(n.dataset.bytes));
const found = {};
try { (() => { %s })(); } catch (error) { errors.push(String(error)); }
found.errors = errors;
found.wide = document.documentElement.scrollWidth - innerWidth;
found.ready = document.documentElement.dataset.ready;
found.milliseconds = performance.now();
const said = document.createElement("pre");
said.id = "found";
said.textContent = JSON.stringify(found);
document.body.append(said);
</script></body>"""


def rendered(path, tmp_path, script="", width=1200):
    """What the script found in the page, opened from the disk without a network."""
    text = path.read_text()
    copy = tmp_path / "opened.html"
    copy.write_text(text.replace("<head>", "<head>" + BEFORE, 1).replace("</body>", AFTER % script))
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900",
         f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", copy.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stderr[-2000:]
    found = json.loads(html.unescape(match[1]))
    assert found["errors"] == [] and found["ready"] == "yes"
    assert found["wide"] <= 0, "nothing sticks out at the side"
    return found


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    return report(tiny, tmp_path_factory.mktemp("report"))


@pytest.mark.parametrize("width", [1200, 500])
def test_what_is_drawn_is_what_was_recorded(made, tmp_path, width):
    script = """
    found.points = document.querySelectorAll("#pareto .point:not(.target)").length;
    found.targets = document.querySelectorAll("#pareto .point.target").length;
    found.peak = document.getElementById("peak-label").textContent;
    found.pie = bytes();
    found.said = document.getElementById("instant-said").textContent;
    found.curves = [...document.querySelectorAll("#curves [data-run]")].map((n) => n.dataset.run);
    found.live = document.querySelectorAll("#live tr").length;
    """
    found = rendered(made.folder / "index.html", tmp_path, script, width)
    row = made.results.rows[0]
    assert found["points"] == sum(r.score.n > 0 for r in made.results.rows) == 2
    assert found["targets"] == 1
    assert sum(found["pie"]) == row.quantities["counted_bytes"]
    assert found["peak"] == f"peak {row.quantities['counted_bytes'] / 1e6:.1f} MB"
    assert found["peak"].removeprefix("peak ") in found["said"]
    assert found["curves"] == [run.folder.name for run in row.runs]
    assert found["live"] == len(row.profile.end["timeline"]["live"])


def test_a_target_is_drawn_before_its_runs_are_there(made, tiny, tmp_path):
    folder = tmp_path / "study"
    shutil.copytree(tiny, folder)
    (told,) = (r for r in made.results.rows if "score" in made.results.targets_of(r))
    for run in told.runs:
        shutil.rmtree(folder / "runs" / run.folder.name)
    script = """
    found.points = document.querySelectorAll("#pareto .point:not(.target)").length;
    found.targets = document.querySelectorAll("#pareto .point.target").length;
    """
    page = report(folder, tmp_path / "report").folder / "index.html"
    found = rendered(page, tmp_path, script)
    assert (found["points"], found["targets"]) == (1, 1)


def test_a_search_has_its_curves_before_and_after_it_has_ended(made, tiny, tmp_path):
    script = """
    const setting = document.getElementById("setting");
    const options = setting ? [...setting.options] : [];
    found.settings = options.map((option) => option.textContent);
    const searched = options.find((option) => option.textContent.startsWith("search: "));
    if (searched) { setting.value = searched.value; setting.dispatchEvent(new Event("change")); }
    found.curves = [...document.querySelectorAll("#curves [data-run]")].map((n) => n.dataset.run);
    """
    (choice,) = made.results.choices
    first, second = ([job.name for job in tried.jobs] for tried in choice.candidates)
    found = rendered(made.folder / "index.html", tmp_path, script)
    assert found["settings"][-2:] == [
        "search: precision bf16, learning rate 0.02",
        "search: precision bf16, learning rate 0.1",
    ]
    assert found["curves"] == first
    folder = tmp_path / "study"
    shutil.copytree(tiny, folder)
    for name in second:
        shutil.rmtree(folder / "runs" / name)
    during = report(folder, tmp_path / "report")
    assert during.results.rows == () and "1 of 2 runs have ended" in during.text
    assert rendered(during.folder / "index.html", tmp_path, script)["curves"] == first


def test_keys_filters_and_the_slider(made, tmp_path):
    script = """
    const points = [...document.querySelectorAll("#pareto .point:not(.target)")];
    points[0].focus();
    found.first = document.getElementById("pareto-said").textContent;
    key(points[0], "ArrowRight");
    found.second = document.getElementById("pareto-said").textContent;
    found.focused = document.activeElement === points[1];
    key(points[0], "Enter");
    found.chosen = document.getElementById("setting").value;
    const filter = document.querySelector("#filters select[data-setting=precision]");
    filter.value = "bf16";
    filter.dispatchEvent(new Event("change"));
    found.hidden = document.querySelectorAll("#pareto .point.off").length;
    found.count = document.getElementById("pareto-count").textContent;
    const slider = document.getElementById("instant");
    slider.value = 0;
    slider.dispatchEvent(new Event("input"));
    found.start = slider.getAttribute("aria-valuetext");
    document.getElementById("to-peak").click();
    found.peak = slider.value;
    """
    found = rendered(made.folder / "index.html", tmp_path, script)
    assert "bf16" in found["first"] and "fp32" in found["second"] and found["focused"]
    assert found["chosen"] == "1", "the row of the point that was chosen"
    assert found["hidden"] == 1 and found["count"] == "1 of 2 settings"
    assert found["start"].startswith("instant 1 of ")
    assert int(found["peak"]) == made.results.rows[1].profile.end["timeline"]["peak"]


def test_tab_reaches_what_a_filter_leaves_and_enter_keeps_the_focus(made, tmp_path):
    script = """
    const reached = (box) => [...document.querySelectorAll(`#${box} .point[tabindex="0"]`)]
      .filter((n) => getComputedStyle(n).display !== "none")
      .map((n) => n.getAttribute("aria-label"));
    found.first = reached("pareto");
    const filter = document.querySelector("#filters select[data-setting=precision]");
    filter.value = "fp32";
    filter.dispatchEvent(new Event("change"));
    found.left = reached("pareto");
    const points = [...document.querySelectorAll("#agreement .point")];
    points[0].focus();
    key(points[0], "ArrowRight");
    key(points[1], "Enter");
    found.kept = document.activeElement === points[1] && points[1].isConnected;
    found.agreed = reached("agreement").length;
    redraw();
    const again = [...document.querySelectorAll("#agreement .point")];
    found.restored = again[1] !== points[1] && document.activeElement === again[1];
    """
    found = rendered(made.folder / "index.html", tmp_path, script)
    assert len(found["first"]) == 1 and "bf16" in found["first"][0]
    assert len(found["left"]) == 1 and "fp32" in found["left"][0]
    assert found["kept"] and found["agreed"] == 1 and found["restored"]


def test_what_is_shown_is_the_chosen_setting_though_rows_share_a_profile(made, tmp_path):
    script = """
    const shown = () => [document.getElementById("timeline-title").textContent,
      [...document.querySelectorAll("#pareto .chosen:not(.target)")].map((n) => n.dataset.row)];
    found.before = shown();
    choose(2);
    found.after = shown();
    found.legend = [...document.querySelectorAll("#instant-said .legend .swatch")]
      .map((n) => n.style.background);
    found.drawn = [...document.querySelectorAll("#timeline path[data-role]")]
      .map((n) => n.style.fill);
    """
    found = rendered(made.folder / "index.html", tmp_path, script)
    assert "learning rate 0.05" in found["before"][0] and found["before"][1] == ["0"]
    assert "learning rate 1e+30" in found["after"][0] and found["after"][1] == []
    assert found["legend"] == found["drawn"], "every color is explained, at every instant"


def test_a_tap_near_a_point_chooses_it(made, tmp_path):
    script = """
    const tap = (x, y) => {
      const point = document.querySelector("#pareto .point:not(.target)");
      const box = point.getBoundingClientRect();
      point.ownerSVGElement.dispatchEvent(new MouseEvent("click",
        {clientX: box.x + box.width / 2 + x, clientY: box.y + box.height / 2 + y, bubbles: true}));
      return document.getElementById("setting").value;
    };
    found.far = tap(60, 0);
    found.near = tap(12, 10);
    """
    found = rendered(made.folder / "index.html", tmp_path, script, 500)
    assert found["far"] == "0" and found["near"] == "1"


def test_ticks_are_different_and_whole_where_asked(made, tmp_path):
    script = """
    found.fine = ticks(91.2301, 91.2309, 5, false).map(round);
    found.whole = ticks(0, 2, 10, false, true);
    found.narrow = ticks(2.1, 2.6, 5, true);
    found.decades = ticks(0.9, 110, 5, true);
    """
    found = rendered(made.folder / "index.html", tmp_path, script)
    assert len(set(found["fine"])) == len(found["fine"]) > 2
    assert found["whole"] == [0, 1, 2]
    assert len(found["narrow"]) > 2, "a log axis without a 1, 2 or 5 on it"
    assert found["decades"] == [1, 2, 5, 10, 20, 50, 100]


def test_points_of_different_series_look_different(tmp_path):
    rows = [
        ({"density": i / 100, "precision": precision}, {"counted_bytes": i * 1e6, "score": 90.0})
        for i in range(1, 15)
        for precision in ("fp16", "fp32")
    ]
    found = made_up(rows, {"series": ["density", "precision"]})
    (tmp_path / "page.html").write_text(page(found))
    script = """
    const look = (n) => n.getAttribute("d") + n.style.fill;
    found.points = [...document.querySelectorAll("#pareto .point")]
      .sort((a, b) => a.dataset.row - b.dataset.row).map(look);
    found.legend = [...document.querySelectorAll("#pareto-series .swatch path")].map(look);
    found.names = [...document.querySelectorAll("#pareto-series > span")].map((n) => n.textContent);
    """
    seen = rendered(tmp_path / "page.html", tmp_path, script)
    assert len(set(seen["points"])) == 28 and seen["legend"] == seen["points"]
    assert seen["names"][:2] == ["1% nonzero, fp16", "1% nonzero, fp32"]


def test_every_setting_has_a_filter_and_one_point_a_front(tmp_path):
    rows = [({"density": i / 100}, {"counted_bytes": i * 1e6, "score": 90.0}) for i in range(1, 41)]
    (tmp_path / "page.html").write_text(page(made_up(rows, {})))
    script = """
    const filter = document.querySelector("#filters select[data-setting=density]");
    found.values = [...filter.options].map((n) => n.value);
    filter.value = "40%";
    filter.dispatchEvent(new Event("change"));
    found.count = document.getElementById("pareto-count").textContent;
    found.front = document.querySelector("#pareto .front").getBBox().width;
    """
    found = rendered(tmp_path / "page.html", tmp_path, script)
    assert found["values"] == ["all", *(f"{i}%" for i in range(1, 41))]
    assert found["count"] == "1 of 40 settings" and found["front"] > 10


def profiled(path):
    """The profile of a small network, and its page."""
    from shoestring.lab.target import resolve
    from shoestring.step.profiling import profile

    target = resolve("wrn-10-1", batch=4)
    result = profile(target.model, target.batch, loss=target.loss, optimizer="sgd")
    settings = {"model": "wrn-10-1", "batch": 4, "batch_unit": "images", "microbatch": None}
    settings |= {"density": None, "precision": "fp32", "checkpoint": "none", "optimizer": "sgd"}
    write_profile(path, settings, result)
    return result


def test_the_page_of_a_profile(tmp_path):
    result = profiled(tmp_path / "profile.html")
    script = """
    found.paths = document.querySelectorAll("#timeline path[data-role]").length;
    found.pie = bytes();
    """
    found = rendered(tmp_path / "profile.html", tmp_path, script, 500)
    assert sum(found["pie"]) == result.peak_bytes
    assert found["paths"] == int((result.timeline.bytes_by_role.sum(axis=0) > 0).sum())


def test_of_a_thinned_timeline_instants_stand_at_their_numbers(tmp_path, monkeypatch):
    whole = profiled(tmp_path / "profile.html").timeline
    count, peak = len(whole.labels), whole.peak_instant
    monkeypatch.setattr("shoestring.lab.study.timelines.MOST_INSTANTS", count * 4 // 5)
    profiled(tmp_path / "profile.html")
    script = """
    const svg = document.querySelector("#timeline svg"), box = svg.getBoundingClientRect();
    const [, , wide] = svg.getAttribute("viewBox").split(" ").map(Number);
    const x = Number(svg.querySelector(".peak").getAttribute("x1"));
    found.at = (x - 72) / (wide - 72 - 14);
    found.cursor = Number(svg.querySelector(".cursor").getAttribute("x1")) === x;
    found.end = svg.querySelector("[data-role]").getBBox().x +
      svg.querySelector("[data-role]").getBBox().width;
    found.right = wide - 14;
    const slider = document.getElementById("instant");
    found.slider = slider.value / slider.max;
    slider.value = 0;
    slider.dispatchEvent(new Event("input"));
    svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + x * box.width / wide}));
    found.said = document.getElementById("instant-said").textContent;
    """
    found = rendered(tmp_path / "profile.html", tmp_path, script)
    assert found["at"] == pytest.approx((peak + 0.5) / count, abs=1e-4) and found["cursor"]
    assert found["slider"] == pytest.approx(found["at"], abs=0.01)
    assert found["end"] == pytest.approx(found["right"], abs=0.1), "as the axis"
    assert found["said"].startswith(f"instant {peak + 1} of {count}: ")


def five_hundred(folder, tiny):
    """100 settings, 5 seeds, 200 evaluations each, made from one real run's records."""
    folder.mkdir()
    file = folder / "study.toml"
    base = TINY[: TINY.index("[[search]]")].replace("trials = 2", "trials = 5")
    rates = ", ".join(f"{0.001 * i:.3f}" for i in range(1, 26))
    grid = f"[[grid]]\nlr = [{rates}]\ndensity = [1.0, 0.5, 0.3, 0.1]\n"
    file.write_text(base.replace('baseline = {precision = "fp32", lr = 0.05}', "") + grid)
    run = next(iter(sorted(tiny.glob("runs/*test-seed0*/records.jsonl"))))
    profile = next(iter(sorted(tiny.glob("runs/*profile*/records.jsonl")))).read_text()
    start, evaluation, *_, end = map(json.loads, run.read_text().splitlines())
    for number, job in enumerate(expand(load(file), lambda job: None).jobs):
        out = folder / "runs" / job.name
        out.mkdir(parents=True)
        if job.kind == "profile":
            (out / "records.jsonl").write_text(profile)
            continue
        curve = [
            {**evaluation, "epoch": epoch, "accuracy": 90 + (number * epoch % 97) / 20}
            for epoch in range(1, 201)
        ]
        events = [start, *curve, {**end, "best_accuracy": max(e["accuracy"] for e in curve)}]
        (out / "records.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_five_hundred_runs_open_in_two_seconds(tiny, tmp_path):
    five_hundred(tmp_path / "large", tiny)
    results = load_results(tmp_path / "large")
    assert len(results.rows) == 100 and sum(row.score.n for row in results.rows) == 500
    (tmp_path / "large.html").write_text(page(results))
    script = """
    found.points = document.querySelectorAll("#pareto .point").length;
    const stops = [...document.querySelectorAll("a[href], select, input, button, [tabindex='0']")];
    found.stops = stops.map((n) => n.getAttribute("href")).slice(0, 9);
    found.sections = [...document.querySelectorAll("main > section")].map((n) => `#${n.id}`);
    """
    found = rendered(tmp_path / "large.html", tmp_path, script)
    assert found["points"] == 100
    links = ["#content", *found["sections"]]
    assert found["stops"][: len(links)] == links, "a few keys lead to every section"
    assert "#front" in links and "#runs" in links
    assert found["milliseconds"] < 2000
    print(f"{(tmp_path / 'large.html').stat().st_size:,} bytes, {found['milliseconds']:.0f} ms")
