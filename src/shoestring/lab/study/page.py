"""One self-contained page: tables as HTML, everything else drawn by its script from its data."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files as resources
from posixpath import normpath
from typing import Any, NamedTuple
from urllib.parse import quote

from ... import files
from ..records.run import FILE
from .execute import FAILURE, Outcome
from .figures import series_name
from .results import Results, Row
from .tables import (
    HEADS,
    Table,
    columns_of,
    head,
    one_line,
    shown,
    tables,
    target_text,
    with_interval,
)

METRICS = ("accuracy", "bleu", "loss", "train_loss", "learning_rate")
"""Of evaluations, as curves."""


def page(results: Results, made: Sequence[Table] | None = None, runs: str = "../runs") -> str:
    """The page of a study's results; `runs` is the folder of its runs, seen from the page."""
    study = results.study
    scored = any("score" in row.quantities for row in results.rows)
    data = _data(results)
    sections = [
        section("tables", *(_html_table(t) for t in made or tables(results)), title="Results"),
        _pareto(results) if scored else None,
        _setting() if len(data["rows"]) > 1 else None,
        timeline_section() if data["profiles"] else None,
        _curves(data) if data["curves"] else None,
        _agreement(results),
        _runs(results, runs),
    ]
    return document(study.title, _facts(results), [s for s in sections if s is not None], data)


def document(
    title: str, facts: str, sections: Sequence[Section], data: Mapping[str, Any], *more: str
) -> str:
    """A page that loads nothing: what it shows, and the scripts that draw it, `more` included."""
    here = resources("shoestring.lab.study") / "page_files"
    scripts = ("plots.js", *more, "page.js")
    read = {n: (here / n).read_text(encoding="utf-8") for n in ("page.html", "page.css", *scripts)}
    # A "<" in the data could end the script it stands in.
    text = files.json_text(data, separators=(",", ":"), default=str).replace("<", "\\u003c")
    filled = {
        "@TITLE@": escape(title),
        "@STYLE@": read["page.css"],
        "@FACTS@": facts,
        "@LINKS@": _links(sections),
        "@BODY@": "\n".join(section.text for section in sections),
        "@DATA@": text,
        "@SCRIPT@": "".join(read[name] for name in scripts),
    }
    made = read["page.html"]
    for name in filled:  # split at all names first: what is filled in may contain one
        made = made.replace(name, f"\0{name}\0")
    return "".join(filled.get(part, part) for part in made.split("\0"))


NOTHING: Mapping[str, Any] = {
    **dict.fromkeys(("memory", "score", "predicted", "measured", "target", "profile")),
    **{"settings": {}, "texts": {}, "runs": []},
}
"""A row of which nothing is known."""


def _data(results: Results) -> dict[str, Any]:
    profiles: dict[str, int] = {}
    found: list[dict[str, Any]] = []
    rows = []
    for row in results.rows:
        place = None
        if row.profile is not None and row.profile.error is None:
            name = row.profile.folder.name
            if name not in profiles:
                profiles[name] = len(found)
                found.append(_profile(row.profile.end))
            place = profiles[name]
        rows.append(_row(results, row, place))
    rows += _searched(results)
    heads = {n: head(n) for n in results.varied}
    return {
        "title": results.study.title,
        "score_label": results.study.score_label,
        "varied": results.varied,
        "heads": {**HEADS, **heads, "score": results.study.score_label},
        "rows": rows,
        "profiles": found,
        "curves": {n: c for n, o in results.outcomes.items() if (c := _curve(o)) is not None},
    }


def _row(results: Results, row: Row, profile: int | None) -> dict[str, Any]:
    texts = {n: shown(n, row.quantities.get(n)) for n in columns_of(results)}
    texts["score"] = with_interval(row.score)
    said = results.targets_of(row)
    target = {"score": said.get("score"), "memory": said.get("counted_bytes")}
    if target["score"] is not None:
        texts["the report"] = target_text(said, "score")
    asked = (figure.series for figure in results.study.figures if figure.series)
    return {
        "settings": {n: shown(n, row.settings.get(n)) for n in results.varied},
        "series": series_name(row, next(asked, results.varied[:1])),
        "texts": texts,
        "memory": row.quantities.get("counted_bytes"),
        "score": row.quantities.get("score"),
        "predicted": row.quantities.get("predicted_bytes"),
        "measured": row.quantities.get("measured_bytes"),
        "target": {n: v for n, v in target.items() if v is not None} or None,
        "runs": list(results.runs_of(row)),
        "profile": profile,
    }


def _searched(results: Results) -> list[dict[str, Any]]:
    """Runs on the validation split: nothing but curves."""
    made = []
    for choice in results.choices:
        for tried in choice.candidates:
            runs = [job.name for job in tried.jobs if job.name in results.outcomes]
            values = {**choice.where, **tried.values}
            name = "search: " + ", ".join(f"{head(n)} {shown(n, v)}" for n, v in values.items())
            made += [{**NOTHING, "name": name, "runs": runs}] if runs else []
    return made


def _profile(end: Mapping[str, Any]) -> dict[str, Any]:
    return {"peak_bytes": end["peak_bytes"], **end["timeline"]}


def _curve(found: Outcome) -> dict[str, Any] | None:
    events = [e for e in found.events if e["event"] == "evaluation" and e.get("epoch") is not None]
    if not events:
        return None
    made: dict[str, Any] = {"label": f"seed {found.job.settings.get('seed', 0)}"}
    made["epoch"] = [event["epoch"] for event in events]
    for metric in METRICS:
        values = [event.get(metric) for event in events]
        if all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
            made[metric] = [float(f"{value:.5g}") for value in values]
    return made


class Section(NamedTuple):
    """A part of the page, and where a link to it leads."""

    name: str
    title: str
    text: str


def section(name: str, *parts: str, title: str) -> Section:
    """A heading, and parts of HTML below it."""
    lines = [f'<section id="{name}">', f"<h2>{escape(title)}</h2>", *parts, "</section>"]
    return Section(name, title, "\n".join(lines))


def _links(sections: Sequence[Section]) -> str:
    """A way past long tables for who has no pointer; to one section alone there is none."""
    links = "\n".join(f'<a href="#{s.name}">{escape(s.title)}</a>' for s in sections)
    return f'<nav aria-label="sections">\n{links}\n</nav>' if len(sections) > 1 else ""


def _facts(results: Results) -> str:
    study, runs = results.study, results.outcomes.values()
    failed = sum(run.error is not None for run in runs)
    hosts = sorted({one_line(_host(run)) for run in runs if run.error is None})
    facts = [f"{len(results.rows)} settings", f"{len(runs)} runs"]
    facts += [f"{failed} failed"] if failed else []
    facts += [f"{results.missing} still to run"] if results.missing else []
    lines = [
        f"<p>{escape(study.notes)}</p>" if study.notes else "",
        f"<p>{escape(' · '.join(facts))}</p>",
        f'<p class="faint">Targets: {escape(study.source)}</p>' if study.source else "",
        *(f'<p class="faint">{escape(host)}</p>' for host in hosts),
    ]
    return "\n".join(line for line in lines if line)


def _host(run: Outcome) -> str:
    """Device and versions; what differs from machine to machine only in name is left out."""
    host = run.start.get("host") or {}
    device = host.get("device_name") or host.get("device", "unknown device")
    versions = [f"{n} {host[n]}" for n in ("shoestring", "torch", "cuda", "python") if host.get(n)]
    return " · ".join([str(device), *versions])


def _box(label: str, classes: str = "scroll", table: str = "") -> str:
    """The start of a table that scrolls in a box of its own, by keys as well."""
    start = f'<table class="{table}">' if table else "<table>"
    return f'<div class="{classes}" tabindex="0" role="region" aria-label="{escape(label)}">{start}'


def _html_table(table: Table) -> str:
    heads = [*table.heads, *(["runs"] if table.sources else [])]
    lines = [
        f"<h3>{escape(table.title)}</h3>",
        _box(table.title),
        _cells(heads, "th"),
    ]
    for number, row in enumerate(table.cells):
        lines.append(_cells(row, links=table.sources[number] if table.sources else None))
    lines.append("</table></div>")
    lines += [f'<p class="faint">{escape(note)}</p>' for note in table.notes]
    return "\n".join(lines)


def _cells(texts: Iterable[str], tag: str = "td", links: Sequence[str] | None = None) -> str:
    made = "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)
    if links is not None:
        each = (f'<a href="#run-{escape(name)}">{i}</a>' for i, name in enumerate(links, start=1))
        made += f"<td>{' '.join(each)}</td>"
    row = f"<tr>{made}</tr>"
    return f"<thead>{row}</thead>" if tag == "th" else row


def _pareto(results: Results) -> Section:
    told = any("score" in results.targets_of(row) for row in results.rows)
    return section(
        "front",
        f'<p class="faint">{"Filled: this study. Open: the report. " if told else ""}'
        "Dashed: the Pareto front of what is shown. Arrow keys walk through the points; "
        "Enter, a click or a tap chooses one.</p>",
        '<div class="controls" id="filters"></div>',
        '<div id="pareto"></div>',
        '<div class="legend" id="pareto-series"></div>',
        '<div class="panel" id="pareto-said" aria-live="polite"></div>',
        '<p class="faint" id="pareto-count"></p>',
        title="Memory and " + results.study.score_label,
    )


def _setting() -> Section:
    choice = '<label class="wide">setting<select id="setting"></select></label>'
    return section("one", choice, title="One setting")


def timeline_section() -> Section:
    """The memory of a step at every instant, and what is live at its peak."""
    return section(
        "memory",
        '<p id="timeline-empty" hidden>This setting was not profiled.</p>',
        '<div id="timeline-box"><p id="timeline-title"></p><div id="timeline"></div>',
        '<div class="controls"><label class="wide" style="flex:1 1 14rem">instant'
        '<input type="range" id="instant" min="0" max="0" value="0"></label>'
        '<button type="button" id="to-peak">to the peak</button></div>',
        '<div class="panel" id="instant-said"></div></div>',
        '<div class="two" id="pie-box"><div><h3>The peak by role</h3>'
        '<svg id="pie" viewBox="0 0 200 200" style="max-width:16rem" role="img" '
        'aria-label="shares of the memory at the peak; the table has the numbers"></svg>'
        '<table class="wrap"><tbody id="pie-rows"></tbody></table></div>',
        "<div><h3>Largest modules at the peak</h3>"
        + _box("what is live at the peak", "scroll tall", "wrap")
        + _cells(["module", "kind", "size"], "th")
        + '<tbody id="live"></tbody></table></div></div></div>',
        title="Memory of one step",
    )


def _curves(data: Mapping[str, Any]) -> Section:
    there = {metric for curve in data["curves"].values() for metric in curve}
    options = "".join(
        f'<option value="{m}">{m.replace("_", " ")}</option>' for m in METRICS if m in there
    )
    return section(
        "training",
        f'<div class="controls"><label>curve<select id="metric">{options}</select></label></div>',
        '<div id="curves"></div>',
        '<div class="legend" id="curve-names"></div>',
        title="Curves of its runs",
    )


def _agreement(results: Results) -> Section | None:
    rows = [r for r in results.rows if {"predicted_bytes", "measured_bytes"} <= r.quantities.keys()]
    if not rows:
        return None
    names = results.varied or ("model",)
    lines = [_box("predicted and measured", "scroll tall")]
    heads = [head(n) for n in names]
    lines.append(_cells([*heads, "predicted (bytes)", "measured (bytes)", "difference"], "th"))
    for row in rows:
        predicted, measured = (row.quantities[f"{n}_bytes"] for n in ("predicted", "measured"))
        texts = [shown(n, row.settings.get(n)) for n in names]
        texts += [f"{predicted:,}", f"{measured:,}", f"{100 * (measured / predicted - 1):+.2f}%"]
        lines.append(_cells(texts))
    lines.append("</table></div>")
    return section(
        "prediction",
        '<div id="agreement"></div>',
        '<div class="panel" id="agreement-said" aria-live="polite">'
        "The step's tensors: predicted before anything is allocated, and measured.</div>",
        "\n".join(lines),
        title="Predicted and measured",
    )


def _runs(results: Results, folder: str) -> Section:
    """Every run with what it was given and where its records lie."""
    heads = ["run", results.study.score, "peak (MB)", "seconds", "revision", "settings"]
    lines = [_box("every run", "scroll tall", "runs"), _cells(heads, "th")]
    for name, run in results.outcomes.items():
        settings = ", ".join(f"{n} {v}" for n, v in run.job.settings.items() if n != "model")
        path = normpath(f"{folder}/{name}/{FILE if run.error is None else FAILURE}")
        at = quote(os.fsencode(path))
        first = f'<td><a href="{at}">{escape(name)}</a></td>'
        if run.error is not None:
            rest = _cells(["failed", "", "", "", f"{run.error} ({settings})"])
        else:
            peak = run.end.get("measured_peak_bytes") or run.end.get("peak_bytes")
            revision = str((run.start.get("host") or {}).get("git_revision") or "")
            known = (run.end.get(n) for n in results.study.score.split(" or "))
            score = next((value for value in known if value is not None), None)
            texts = ["" if score is None else f"{score:g}", shown("peak_bytes", peak)]
            texts += [shown("seconds", run.end.get("seconds")), revision[:10], settings]
            rest = _cells(texts)
        lines.append(rest.replace("<tr>", f'<tr id="run-{escape(name)}">{first}', 1))
    lines.append("</table></div>")
    return section("runs", "\n".join(lines), title="Every run")
