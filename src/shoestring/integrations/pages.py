"""Tables and a picture as one HTML page that loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..html_table import table
from ..planning.prices import price_rows
from ..planning.result import BudgetPlan
from ..units import format_size

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .35rem .7rem; text-align: left; border-bottom: 1px solid #8884; }
td { font-variant-numeric: tabular-nums; }
tr.no td { opacity: .6; }
.scroll { overflow-x: auto; }
h1 { line-height: 1.2; overflow-wrap: anywhere; }
p { white-space: pre-line; }
svg { max-width: 100%; height: auto; }
@media (max-width: 40rem) { /* on a phone each row is a card, each cell a line */
  tr { display: block; padding: .5rem 0; border-bottom: 1px solid #8884; }
  tr:has(th) { display: none; }
  td { display: grid; grid-template-columns: 7.5rem 1fr; padding: .15rem 0; border: 0; }
  td::before { content: attr(data-label); opacity: .7; }
}
"""


def table_page(
    title: str,
    what: str,
    cells: Sequence[Sequence[str]],
    note: str,
    *more: tuple[str, Sequence[Sequence[str]]],
    picture: str = "",
) -> str:
    """A page with a heading, a picture, a table and a note; then more tables under headings."""
    below = "".join(f"<h2>{escape(head)}</h2>{_wide(rows)}" for head, rows in more)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1><p>{escape(what)}</p>"
        f"{picture}{_wide(cells)}<p>{escape(note)}</p>{below}</html>\n"
    )


def _wide(cells: Sequence[Sequence[str]]) -> str:
    """A table that scrolls in its own box on a phone, by keys as well; sizes are not broken."""
    whole = [
        [c.replace(" ", "\N{NO-BREAK SPACE}") if len(c) <= 20 else c for c in r] for r in cells
    ]
    return f'<div class="scroll" tabindex="0">{table(whole)}</div>'


def plan_page(model: str, plan: BudgetPlan) -> str:
    """A plan as a picture, why each part is there, and what other budgets cost and buy."""
    choices = [(c.part, c.setting, c.kind, c.why) for c in plan.choices]
    nothing = [("", "", "", "a plain step fits")]
    prices = [("budget", "step", "change", "plan"), *price_rows(plan)]
    return table_page(
        f"{model} in {format_size(plan.budget_bytes)}",
        plan.short() or "plain",
        [("technique", "setting", "kind", "why"), *(choices or nothing)],
        plan.summary,
        *([("With more or less memory", prices)] if plan.prices else []),
        picture=plan.plot().svg,
    )
