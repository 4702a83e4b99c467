"""Rows of text as an HTML table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def table(cells: Sequence[Sequence[str]]) -> str:
    """The first line is the heading; a line that says "no" is dim."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in cells[0])
    lines = [f"<tr>{head}</tr>"]
    for line in cells[1:]:
        kind = ' class="no"' if "no" in line else ""
        named = zip(cells[0], line, strict=False)
        row = "".join(f'<td data-label="{escape(n)}">{escape(cell)}</td>' for n, cell in named)
        lines.append(f"<tr{kind}>{row}</tr>")
    return f"<table>{''.join(lines)}</table>"


def caption(text: str, cells: Sequence[Sequence[str]]) -> str:
    """A paragraph above a table, as notebooks show it."""
    return f"<p>{escape(text)}</p>{table(cells)}"
