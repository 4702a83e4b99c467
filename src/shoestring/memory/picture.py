"""Memory over a step as a drawing: SVG by hand, so that a notebook needs no plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..errors import InputError
from ..files import write
from ..units import format_size
from .timeline import ROLES, Timeline

WIDTH, HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 12, 58, 34

MOST_POINTS = 400
"""A longer timeline is thinned; of neighbors the one with most bytes stays."""

_STYLE = """
.shoestring { --paper:#fff; --ink:#1b1f24; --line:#d0d7de; --plain:#8c959f; --planned:#0969da;
  --budget:#cf222e; --model:#0072b2; --buffer:#7a8794; --input:#b58900; --gradient:#d55e00;
  --optimizer_state:#cc79a7; --forward_activation:#009e73; --backward_activation:#56b4e9;
  --transient:#e69f00; --workspace:#8a63d2; max-width:100%; height:auto }
@media (prefers-color-scheme: dark) { .shoestring { --paper:#0d1117; --ink:#e6edf3; --line:#30363d;
  --plain:#9aa5b1; --planned:#58a6ff; --budget:#ff7b72; --model:#3d9bd8; --buffer:#8b949e;
  --input:#d4b13f; --gradient:#f0803c; --optimizer_state:#dd94bb; --forward_activation:#2fbf94;
  --backward_activation:#7cc8f2; --transient:#f2b744; --workspace:#b197f0 } }
.shoestring text { fill:var(--ink); font:13px system-ui,sans-serif }
.shoestring .title { font-weight:600; font-size:14px } .shoestring .grid { stroke:var(--line) }
.shoestring .budget { stroke:var(--budget); stroke-width:2; stroke-dasharray:7 4 }
""".strip()


@dataclass(frozen=True)
class Picture:
    """A drawing as SVG text; notebooks show it, and `save` writes it."""

    svg: str = field(repr=False)

    def save(self, file: str | Path) -> None:
        """Write an SVG file."""
        check_name(file)
        try:
            write(file, self.svg.encode())
        except OSError as error:
            raise InputError(f"cannot write {file}: {error.strerror}") from None

    def _repr_html_(self) -> str:
        return self.svg


def check_name(file: str | Path | None) -> None:
    """Refuse another kind of picture, before any work is done for it."""
    if file is not None and Path(file).suffix.lower() != ".svg":
        raise InputError(f"pictures are SVG files, {file} is not", hint="a name such as memory.svg")


@dataclass(frozen=True)
class Curve:
    """Live bytes over one step, from its start to its end."""

    label: str
    nbytes: Sequence[int]
    color: str
    """A name of the style sheet: plain, planned, or a role."""


def thinned(totals: np.ndarray, most: int = MOST_POINTS) -> tuple[int, ...]:
    """At most so many values; each is the largest of its neighbors, so the peak stays."""
    return tuple(int(totals[part].max()) for part in _slices(len(totals), most))


def repeated(totals: np.ndarray, times: int) -> np.ndarray:
    """The curve of parts that run one after another, each like the one that is given."""
    return np.tile(thinned(totals, max(MOST_POINTS // times, 1)), times) if times > 1 else totals


def _slices(count: int, most: int = MOST_POINTS) -> list[slice]:
    """Instants in at most so many parts of equal length, so that none is drawn wider."""
    parts = min(count, most)
    ends = [count * i // parts for i in range(parts + 1)] if parts else [0]
    return [slice(*pair) for pair in pairwise(ends)]


def draw_curves(
    curves: Sequence[Curve], title: str, *, budget_bytes: int | None = None, note: str = ""
) -> Picture:
    """Steps over one another, each from its own start to its own end, below a budget."""
    shown = [curve for curve in curves if curve.nbytes]
    tops = [max(curve.nbytes) for curve in shown] + ([budget_bytes] if budget_bytes else [])
    frame = _Frame(max(tops, default=1))
    parts = frame.axes("operations of one training step, first to last")
    names = [(curve.label, curve.color) for curve in shown]
    for curve in shown:
        values = np.asarray(curve.nbytes)
        d = frame.outline(values)
        parts.append(
            f'<path d="{d}L{frame.x(1):.1f} {frame.y(0):.1f}L{frame.x(0):.1f} {frame.y(0):.1f}Z" '
            f'style="fill:var(--{curve.color});fill-opacity:.22"/>'
            f'<path d="{d}" style="fill:none;stroke:var(--{curve.color});stroke-width:2"/>'
        )
    if budget_bytes:
        y = frame.y(budget_bytes)
        parts.append(f'<path class="budget" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        names.append((f"budget {format_size(budget_bytes)}", "budget"))
    return _picture(title, names, parts, note)


def draw_timeline(timeline: Timeline, title: str) -> Picture:
    """Live bytes at each instant by role, stacked, with the peak marked."""
    totals = timeline.totals
    frame = _Frame(int(totals.max(initial=1)))
    parts = frame.axes("operations of one training step, first to last")
    table = timeline.bytes_by_role
    slices = _slices(len(totals))
    # Whole instants, so that the roles still add up.
    table = table[[part.start + int(totals[part].argmax()) for part in slices]]
    below = np.zeros(len(table), dtype=np.int64)
    names = []
    for column, role in enumerate(ROLES):
        if not table[:, column].any():
            continue
        above = below + table[:, column]
        edge = frame.outline(below[::-1], backwards=True).replace("M", "L", 1)
        parts.append(f'<path d="{frame.outline(above)}{edge}Z" style="fill:var(--{role.value})"/>')
        below = above
        names.append((role.value.replace("_", " "), role.value))
    if len(totals):
        peak = next(i for i, part in enumerate(slices) if timeline.peak_instant < part.stop)
        x = frame.x((peak + 0.5) / len(slices))
        parts.append(
            f'<path d="M{x:.1f} {_TOP}V{HEIGHT - _BOTTOM}" '
            'style="stroke:var(--ink);stroke-dasharray:5 3"/>'
        )
    return _picture(title, names, parts)


class _Frame:
    """Axes from 0 to the most bytes, and from the start to the end of a step."""

    def __init__(self, most: int) -> None:
        power = 1000 ** max(min(int(math.log10(max(most, 1)) // 3), 3), 0)
        self.unit = {1: "B", 10**3: "KB", 10**6: "MB", 10**9: "GB"}[power]
        self._power = power
        step = _round_step(most / power / 5)
        self.ticks = [step * i for i in range(int(most * 1.04 / power / step) + 1)]
        self._most = most * 1.04

    def x(self, share: float) -> float:
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, nbytes: float) -> float:
        return HEIGHT - _BOTTOM - nbytes / self._most * (HEIGHT - _TOP - _BOTTOM)

    def outline(self, values: np.ndarray, *, backwards: bool = False) -> str:
        """The upper edge of bars, one for each value."""
        count = max(len(values), 1)
        made: list[str] = []
        for i, value in enumerate(values.tolist()):
            ends = (i / count, (i + 1) / count)
            first, last = (1 - ends[0], 1 - ends[1]) if backwards else ends
            y = self.y(value)
            made.append(
                f"{'L' if made else 'M'}{self.x(first):.1f} {y:.1f}L{self.x(last):.1f} {y:.1f}"
            )
        return "".join(made)

    def axes(self, label: str) -> list[str]:
        parts = []
        for tick in self.ticks:
            y = self.y(tick * self._power)
            parts.append(
                f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>'
                f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g} {self.unit}'
                "</text>"
            )
        x = (_LEFT + WIDTH - _RIGHT) / 2
        parts.append(f'<text x="{x}" y="{HEIGHT - 10}" text-anchor="middle">{label}</text>')
        return parts


def _round_step(size: float) -> float:
    power = 10.0 ** math.floor(math.log10(size)) if size > 0 else 1.0
    return next(power * n for n in (1, 2, 2.5, 5, 10) if power * n >= size)


def _picture(
    title: str, names: Sequence[tuple[str, str]], parts: Sequence[str], note: str = ""
) -> Picture:
    legend, x, y = [], _LEFT, 42
    for name, color in names:
        wide = 34 + 7.0 * len(name)
        if x + wide > WIDTH and x > _LEFT:
            x, y = _LEFT, y + 17
        legend.append(
            f'<rect x="{x}" y="{y - 10}" width="11" height="11" rx="2" '
            f'style="fill:var(--{color})"/><text x="{x + 16}" y="{y}">{escape(name)}</text>'
        )
        x += int(wide)
    down = y - 42  # a legend of two lines moves the plot
    told = "; ".join([title, *(name for name, _ in names), *([note] if note else [])])
    return Picture(
        '<svg xmlns="http://www.w3.org/2000/svg" class="shoestring" '
        f'viewBox="0 0 {WIDTH} {HEIGHT + down}" '
        f'width="{WIDTH}" height="{HEIGHT + down}" role="img" aria-label="{escape(told)}">'
        f"<style>{_STYLE}</style>"
        f'<rect width="{WIDTH}" height="{HEIGHT + down}" rx="6" style="fill:var(--paper)"/>'
        f'<text class="title" x="{_LEFT}" y="20">{escape(title)}</text>'
        f'<g transform="translate(0 {down})">{"".join(parts)}</g>{"".join(legend)}</svg>\n'
    )
