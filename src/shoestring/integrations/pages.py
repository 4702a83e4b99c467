"""A table as one HTML page that loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..html_table import table

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .35rem .7rem; text-align: left; border-bottom: 1px solid #8884; }
td { font-variant-numeric: tabular-nums; }
tr.no td { opacity: .6; }
"""


def table_page(title: str, what: str, cells: Sequence[Sequence[str]], note: str) -> str:
    """A page with a heading, a table and a note below."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1><p>{escape(what)}</p>"
        f"{table(cells)}<p>{escape(note)}</p></html>\n"
    )
