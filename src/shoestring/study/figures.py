"""Figures of a study as PNG and SVG, the same bytes for the same records."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import InputError
from .results import Results, Row
from .spec import Figure
from .tables import HEADS, SETTINGS, shown

# Okabe and Ito's colours, which people with any colour vision can tell apart, less the yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
STYLE: dict[str, Any] = {
    "svg.hashsalt": "shoestring",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "figure.figsize": (5.2, 3.4),
    "savefig.bbox": "tight",
    "savefig.dpi": 200,
}
PIE_KINDS = ("model", "optimizer", "activation")


def figures(results: Results) -> dict[str, bytes]:
    """File name → bytes, of every figure the study asks for; by default the front or the pies."""
    asked = results.study.figures or _default(results)
    made: dict[str, bytes] = {}
    for figure in asked:
        with _drawing() as make:
            draw = _pies if figure.kind == "pie" else _lines
            canvas = draw(make, results, figure)
            if canvas is None:
                continue
            for kind, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
                file = io.BytesIO()
                canvas.savefig(file, format=kind, metadata=metadata)
                made[f"{figure.name}.{kind}"] = file.getvalue()
    return made


def _default(results: Results) -> tuple[Figure, ...]:
    if any("score" in row.quantities for row in results.rows):
        return (Figure("front", kind="front", log_x=True),)
    return (Figure("pie", kind="pie"),)


@contextmanager
def _drawing() -> Iterator[Any]:
    """A way to make canvases, without the global state of pyplot."""
    try:
        from matplotlib import figure, style
    except ImportError:
        raise InputError(
            "figures are drawn by matplotlib, which is not installed",
            hint="pip install 'shoestring[plots]'",
        ) from None
    with style.context(["default", STYLE]):
        yield figure.Figure


def label_of(results: Results, name: str) -> str:
    """What an axis is called."""
    if name == "score":
        return results.study.score_label
    plain = name.rpartition(".")[2].replace("_", " ")
    return HEADS.get(name, SETTINGS.get(name, plain)).replace("counted", "memory, counted")


def _number(row: Row, name: str) -> float | None:
    value = row.value(name)
    if not isinstance(value, (int, float)):
        return None
    return value / 1e6 if name.endswith("_bytes") else float(value)


def series_of(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[Row]]:
    """The rows of each combination of values, in the order they come."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        key = ", ".join(_named(name, row.settings.get(name)) for name in names)
        found.setdefault(key, []).append(row)
    return found


def _named(name: str, value: Any) -> str:
    text = shown(name, value)
    if name == "density":
        return f"{text} nonzero"
    return f"{SETTINGS.get(name, name)} {text}" if isinstance(value, (int, float)) else text


def _lines(make: Any, results: Results, figure: Figure) -> Any:
    from matplotlib import ticker

    canvas = make()
    axes = canvas.subplots()
    drawn = 0
    for number, (name, rows) in enumerate(series_of(results.rows, figure.series).items()):
        style = {
            "color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)],
        }  # fmt: skip
        drawn += _series(axes, results, figure, name, rows, style)
    if not drawn:
        return None
    if figure.kind == "front":
        points = sorted(
            (_number(row, "counted_bytes") or 0.0, row.quantities["score"])
            for row in (results.rows[i] for i in results.front)
        )
        if points:
            best = {"color": "0.6", "lw": 1, "zorder": 0, "label": "Pareto-optimal"}
            axes.step(*zip(*points, strict=True), where="post", **best)
    if figure.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel(label_of(results, figure.x))
    axes.set_ylabel(label_of(results, figure.y))
    axes.set_title(figure.title or results.study.title, fontsize=10)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)
    return canvas


def _series(
    axes: Any, results: Results, figure: Figure, name: str, rows: Sequence[Row], style: Any
) -> int:
    """Our points with their intervals, and the source's as open ones; returns how many."""
    points = []
    for row in rows:
        x, y = _number(row, figure.x), _number(row, figure.y)
        if x is not None and y is not None:
            interval = row.quantities.get("interval") if figure.y == "score" else None
            points.append((x, y, interval or 0.0))
    others = []
    for row in rows:
        said = results.targets_of(row)
        given = {n: said.get(n, row.value(n)) for n in (figure.x, figure.y)}
        if (figure.y in said or figure.x in said) and all(
            isinstance(v, (int, float)) for v in given.values()
        ):
            scaled = [v / 1e6 if n.endswith("_bytes") else v for n, v in given.items()]
            others.append((*scaled, said.get("interval", 0.0) if figure.y == "score" else 0.0))
    points.sort()
    if points:
        xs, ys, errors = zip(*points, strict=True)
        bars = errors if any(errors) else None
        joined = "none" if figure.kind == "front" and not figure.series else "-"
        label = name or ("here" if others else None)
        axes.errorbar(xs, ys, yerr=bars, label=label, capsize=2, ms=4.5, lw=1.2, ls=joined, **style)
    others.sort()
    if others:
        xs, ys, errors = zip(*others, strict=True)
        axes.errorbar(
            xs, ys, yerr=errors if any(errors) else None, mfc="white", ms=4.5, lw=0.8, ls=":",
            capsize=2, alpha=0.8, label=f"{name} (the report)" if name else "the report", **style,
        )  # fmt: skip
    return len(points) + len(others)


def _pies(make: Any, results: Results, figure: Figure) -> Any:
    rows = [row for row in results.rows if "model_bytes" in row.quantities]
    if not rows:
        return None
    canvas = make(figsize=(3.4 * len(rows), 3.2))
    axes = canvas.subplots(1, len(rows), squeeze=False)
    for place, row in zip(axes[0], rows, strict=True):
        sizes = [row.quantities[f"{kind}_bytes"] for kind in PIE_KINDS]
        place.pie(
            sizes,
            colors=COLOURS[:3],
            startangle=90,
            counterclock=False,
            wedgeprops={"linewidth": 0.8, "edgecolor": "white"},
        )
        texts = [
            f"{kind} {shown('model_bytes', size)} MB ({100 * size / sum(sizes):.1f}%)"
            for kind, size in zip(PIE_KINDS, sizes, strict=True)
        ]
        place.legend(texts, loc="upper center", bbox_to_anchor=(0.5, 0.03), fontsize=8)
        names = results.varied or ("model",)
        title = ", ".join(shown(n, row.settings.get(n)) for n in names)
        place.set_title(
            f"{title}\n{shown('model_bytes', row.quantities['counted_bytes'])} MB", fontsize=9
        )
    canvas.suptitle(figure.title or None)
    return canvas
