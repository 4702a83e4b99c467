"""Figures of a study as PNG and SVG, the same bytes for the same records."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ...errors import InputError, needs_extra
from ...techniques.registry import flags
from .results import Results, Row
from .spec import Figure
from .statistics import pareto_front
from .tables import HEADS, head, setting_label, shown

# Okabe and Ito's colors, which people with any color vision can tell apart, less the yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vP<>"
LINES = ("-", "--", "-.")
"""No two of the three lengths have a divisor in common: 168 series differ. Dotted: the source."""
LEGEND_ROWS = 14
"""So many stand beside the axes before a second column begins."""
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
    with needs_extra("lab", "matplotlib", "a report with figures"):
        from matplotlib import figure, style
    with style.context(["default", STYLE]):
        yield figure.Figure


def label_of(results: Results, name: str) -> str:
    """The label of an axis."""
    if name == "score":
        return results.study.score_label
    return HEADS.get(name, head(name)).replace("counted", "memory, counted")


def _words(rows: Sequence[Row], name: str) -> list[str]:
    """The values of an axis with text on it, in the order they come; none where it has numbers."""
    values = [row.value(name) for row in rows]
    if not any(isinstance(value, (str, bool)) for value in values):
        return []
    return list(dict.fromkeys(shown(name, value) for value in values))


def _number(name: str, value: Any) -> float | None:
    if not isinstance(value, (int, float)):
        return None
    return value / 1e6 if name.endswith("_bytes") else float(value)


def series_of(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[Row]]:
    """The rows of each combination of values, in the order they come."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(series_name(row, names), []).append(row)
    return found


def series_name(row: Row, names: Sequence[str]) -> str:
    """The legend entry for the series of a row."""
    return ", ".join(_named(name, row.settings.get(name)) for name in names)


def _named(name: str, value: Any) -> str:
    text = shown(name, value)
    flag = flags().get(name)
    if flag is not None and flag.percent:
        return f"{text} {setting_label(name).removesuffix('s')}"
    return text if isinstance(value, str) else f"{setting_label(name)} {text}"


def _lines(make: Any, results: Results, figure: Figure) -> Any:
    from matplotlib import ticker

    if _words(results.rows, figure.y):
        raise InputError(
            f"figure {figure.name!r}: y has to be a number, and {figure.y} is text",
            hint=f'x = "{figure.y}", or series = "{figure.y}"',
        )
    words = _words(results.rows, figure.x)
    canvas = make()
    axes = canvas.subplots()
    drawn = 0
    joined = not words and (figure.kind != "front" or bool(figure.series))
    for number, (name, rows) in enumerate(series_of(results.rows, figure.series).items()):
        ours, others = _points(results, figure, rows)
        style = {
            "color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)],
        }  # fmt: skip
        line = LINES[number % len(LINES)] if joined else "none"
        _series(axes, ours, name or ("here" if others else None), ls=line, lw=1.2, **style)
        dots = "none" if words else ":"
        open_ones = {"mfc": "white", "ls": dots, "lw": 0.8, "alpha": 0.8, **style}
        _series(axes, others, f"{name} (the report)" if name else "the report", **open_ones)
        drawn += len(ours) + len(others)
    if figure.kind == "front":
        _front(axes, _points(results, figure, results.rows)[0], figure)
    if not drawn:
        return None
    if words:
        axes.set_xticks(range(len(words)), words, rotation=30, ha="right")
    elif figure.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel(label_of(results, figure.x))
    axes.set_ylabel(label_of(results, figure.y))
    axes.set_title(figure.title or results.study.title, fontsize=10)
    if count := len(axes.get_legend_handles_labels()[1]):
        beside = {"loc": "upper left", "bbox_to_anchor": (1.01, 1)}
        axes.legend(fontsize=8, ncols=math.ceil(count / LEGEND_ROWS), **beside)
    return canvas


Place = tuple[float, float, float]
"""x, y and half of an interval, or 0."""


def _points(
    results: Results, figure: Figure, rows: Sequence[Row]
) -> tuple[list[Place], list[Place]]:
    """Where our rows stand, and where the source's do; each by rising x."""
    ours, others = [], []
    words = _words(results.rows, figure.x)
    for row in rows:
        mine = {name: row.value(name) for name in (figure.x, figure.y, "interval")}
        said = results.targets_of(row)
        ours.append(_place(figure, mine, words))
        if figure.x in said or figure.y in said:
            others.append(_place(figure, {**mine, "interval": None, **said}, words))
    return sorted(filter(None, ours)), sorted(filter(None, others))


def _place(figure: Figure, values: Mapping[str, Any], words: Sequence[str]) -> Place | None:
    x, y = (_number(name, values[name]) for name in (figure.x, figure.y))
    if words:
        text = shown(figure.x, values[figure.x])
        x = float(words.index(text)) if text in words else None
    if x is None or y is None:
        return None
    return x, y, (values["interval"] or 0.0) if figure.y == "score" else 0.0


def _front(axes: Any, points: Sequence[Place], figure: Figure) -> None:
    """Rings round the points that no other one beats on these axes, and steps between them."""
    right, up = (_better(figure, name) for name in (figure.x, figure.y))
    best = pareto_front([(-right * x, up * y) for x, y, _ in points])
    if best:
        xs, ys, _ = zip(*(points[i] for i in best), strict=True)
        ring = {"marker": "o", "ms": 9, "mfc": "none", "color": "0.6", "lw": 1, "zorder": 0}
        axes.step(xs, ys, where="post", label="Pareto-optimal", **ring)


def _better(figure: Figure, name: str) -> int:
    """1 where more of it is better, -1 where less is."""
    if name.endswith("_bytes") or name in ("seconds", "flops_ratio", "score_loss"):
        return -1
    if name.endswith("reduction") or name == "score":
        return 1
    raise InputError(
        f"figure {figure.name!r}: neither less nor more of {name} is better: there is no front",
        hint='kind = "line", or axes such as counted_bytes and score',
    )


def _series(axes: Any, points: Sequence[Place], name: str | None, **style: Any) -> None:
    if points:
        xs, ys, errors = zip(*points, strict=True)
        bars = errors if any(errors) else None
        axes.errorbar(xs, ys, yerr=bars, label=name, capsize=2, ms=4.5, **style)


def _pies(make: Any, results: Results, figure: Figure) -> Any:
    rows = [row for row in results.rows if "model_bytes" in row.quantities]
    if not rows:
        return None
    across = min(len(rows), max(4, math.isqrt(len(rows))))
    down = math.ceil(len(rows) / across)
    canvas = make(figsize=(3.4 * across, 3.2 * down), layout="constrained")
    canvas.get_layout_engine().set(h_pad=0.15)  # inches, between a legend and the next title
    places = canvas.subplots(down, across, squeeze=False).flatten()
    for place in places[len(rows) :]:
        place.remove()
    for place, row in zip(places, rows, strict=False):
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
        title = textwrap.fill(", ".join(shown(n, row.settings.get(n)) for n in names), 40)
        place.set_title(
            f"{title}\n{shown('model_bytes', row.quantities['counted_bytes'])} MB", fontsize=9
        )
    canvas.suptitle(figure.title or None)
    return canvas
