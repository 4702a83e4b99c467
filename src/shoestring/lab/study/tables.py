"""Tables of a study, once as cells and then as Markdown or LaTeX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...techniques.registry import flags
from ...units import plural
from .results import Results, Row
from .statistics import Sample, at_equal_memory

HEADS = {
    "counted_bytes": "counted (MB)",
    "measured_bytes": "measured (MB)",
    "predicted_bytes": "predicted (MB)",
    "model_bytes": "model (MB)",
    "optimizer_bytes": "optimizer (MB)",
    "activation_bytes": "activations (MB)",
    "reduction": "reduction",
    "model_reduction": "model reduction",
    "optimizer_reduction": "optimizer reduction",
    "activation_reduction": "activation reduction",
    "measured_reduction": "measured reduction",
    "flops": "GFLOPs",
    "flops_ratio": "FLOPs ratio",
    "score_loss": "loss to baseline",
    "seconds": "seconds",
    "n": "n",
}


def setting_label(name: str) -> str:
    """A setting's name in tables."""
    flag = flags().get(name)
    label = None if flag is None else flag.label
    return label or {"lr": "learning rate"}.get(name, name)


@dataclass(frozen=True)
class Table:
    """Texts in rows and columns; `sources` are the runs behind each row."""

    name: str
    title: str
    heads: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    sources: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """With a heading, and notes below."""
        lines = [f"## {_text(self.title)}", "", _line(self.heads), _line(["---"] * len(self.heads))]
        lines += [_line(row) for row in self.cells]
        return "\n".join(lines + [f"\n{_text(note)}" for note in self.notes]) + "\n"

    def latex(self) -> str:
        """For booktabs."""
        return "\n".join(
            [
                f"% {self.name}",
                rf"\begin{{tabular}}{{{'l' * len(self.heads)}}}",
                r"\toprule",
                _tex_line(self.heads),
                r"\midrule",
                *map(_tex_line, self.cells),
                r"\bottomrule",
                r"\end{tabular}",
                *(f"% {_tex(note)}" for note in self.notes),
                "",
            ]
        )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_text(cell) for cell in cells) + " |"


def _text(words: str) -> str:
    """In one line, and none of it HTML or Markdown: a name may come from anywhere."""
    return "".join(_MARKDOWN.get(sign, sign) for sign in one_line(words))


def one_line(words: str) -> str:
    """Without line ends, and with an escape for what no reader of a table could see."""
    kept = " ".join(words.split())
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in kept
    )


_MARKDOWN = {
    **{sign: "\\" + sign for sign in "\\`*[]|~$"},
    **{"<": "&lt;", "&": "&amp;"},
}


def _tex_line(cells: Sequence[str]) -> str:
    """At its start a star or a bracket would be an argument of the line before."""
    guard = "{}" if cells and cells[0][:1] in ("*", "[") else ""
    return guard + " & ".join(map(_tex, cells)) + r" \\"


def _tex(text: str) -> str:
    return "".join(_TEX.get(sign, sign) for sign in one_line(text))


_TEX = {
    **{sign: "\\" + sign for sign in "&%$#_{}"},
    **{"±": r"$\pm$", "×": r"$\times$", "≤": r"$\le$", "≥": r"$\ge$", "–": "--"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"$<$", ">": r"$>$"},
}


def shown(name: str, value: Any) -> str:
    """A quantity or setting as a table shows it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return one_line(str(value))
    if name.endswith("_bytes"):
        return f"{value / 1e6:.2f}" if value < 1e7 else f"{value / 1e6:.1f}"
    if name.endswith("reduction"):
        return f"{value:.1f}×"
    if name == "flops":
        return f"{value / 1e9:.1f}"
    if name == "flops_ratio":
        return f"{value:.3f}"
    if name in ("score", "interval", "score_loss"):
        return f"{value:.2f}"
    if name in flags() and flags()[name].percent:
        return f"{100 * value:g}%"
    if name == "seconds":
        return f"{value:.0f}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def with_interval(score: Sample) -> str:
    """Mean ± half of its 95% interval (n)."""
    if score.mean is None:
        return "–"
    interval = "" if score.interval is None else f" ± {score.interval:.2f}"
    return f"{score.mean:.2f}{interval} (n = {score.n})"


def target_text(targets: Mapping[str, Any], name: str) -> str:
    """The source's value of a quantity: a number, or a bound."""
    if name == "score" and "score" in targets:
        interval = f" ± {targets['interval']:.2f}" if "interval" in targets else ""
        return f"{targets['score']:.2f}{interval}"
    if name in targets:
        return shown(name, targets[name])
    for prefix, sign in (("max_", "≤ "), ("min_", "≥ ")):
        if prefix + name in targets:
            return sign + shown(name, targets[prefix + name])
    return "–"


def columns_of(results: Results) -> list[str]:
    """The quantities the main table shows: those asked for, or those there are."""
    if results.study.columns is not None:
        return list(results.study.columns)
    likely = ("counted_bytes", "measured_bytes", "reduction", "flops_ratio", "score")
    found = [n for n in likely if any(n in row.quantities for row in results.rows)]
    again = any(row.quantities.get("flops_ratio", 1) > 1.0005 for row in results.rows)
    return [n for n in found if n != "flops_ratio" or again]


def head(setting: str) -> str:
    """A setting's name in tables."""
    return setting_label(setting).rpartition(".")[2].replace("_", " ")


def main_table(results: Results) -> Table:
    """Every row with its quantities, beside the source's where it has any."""
    study = results.study
    columns = columns_of(results)
    settings = results.varied or ("model",)
    targets = [results.targets_of(row) for row in results.rows]
    texts = [[target_text(t, c) for c in columns] for t in targets]
    beside = [any(row[i] != "–" for row in texts) for i in range(len(columns))]
    heads = [head(n) for n in settings]
    for column, has in zip(columns, beside, strict=True):
        heads.append(study.score_label if column == "score" else HEADS.get(column, column))
        heads += ["the report" if study.source else "asked for"] if has else []
    cells: list[tuple[str, ...]] = []
    for row, said in zip(results.rows, texts, strict=True):
        cell = [shown(n, row.settings.get(n)) for n in settings]
        for column, text, has in zip(columns, said, beside, strict=True):
            value = row.quantities.get(column)
            cell += [_score(row) if column == "score" else shown(column, value)]
            cell += [text] if has else []
        cells.append(tuple(cell))
    notes = _intervals(results, targets) if "score" in columns else []
    notes += _marked(results.rows) if "score" in columns else []
    if "flops_ratio" in columns and any(
        r.quantities.get("flops_ratio", 1) < 1 for r in results.rows
    ):
        notes.append("FLOPs are counted at nonzeros, as the report does; kernels that run do more.")
    notes += _state(results)
    sources = tuple(map(results.runs_of, results.rows))
    return Table("table", study.title, tuple(heads), tuple(cells), sources, tuple(notes))


def _intervals(results: Results, targets: Sequence[Mapping[str, Any]]) -> list[str]:
    """Explains the signs, in our column and in the source's."""
    ours = "Mean ± half of its 95% interval over n runs, by Student's t below n = 10"
    notes = [f"{ours} ({results.study.score})."]
    if any("interval" in said for said in targets):
        notes.append("Behind ± in the report's column: 1.96 standard errors, as it computes them.")
    return notes


def _state(results: Results) -> list[str]:
    """Notes that the numbers do not show."""
    notes = list(results.remarks)
    if results.missing:
        verb = "has" if results.missing == 1 else "have"
        notes.append(f"{plural(results.missing, 'run')} {verb} not finished.")
    if results.failed:
        notes.append(f"{plural(results.failed, 'run')} failed.")
    return notes + [f"Passed over: {why}." for why in results.passed_over]


def front_table(results: Results) -> Table | None:
    """The Pareto-optimal settings by counted memory and score, most memory first."""
    if sum("score" in row.quantities for row in results.rows) < 2 or not results.front:
        return None
    rows = [results.rows[i] for i in reversed(results.front)]
    settings = results.varied or ("model",)
    heads = (*map(head, settings), "counted (MB)", results.study.score_label)
    cells = tuple(
        (
            *(shown(n, row.settings.get(n)) for n in settings),
            shown("counted_bytes", row.quantities["counted_bytes"]),
            _score(row),
        )
        for row in rows
    )
    sources, notes = tuple(map(results.runs_of, rows)), tuple(_marked(rows))
    return Table("front", "Pareto-optimal settings", heads, cells, sources, notes)


def _score(row: Row) -> str:
    return with_interval(row.score) + " *" * bool(row.trained and row.score.n)


def _marked(rows: Sequence[Row]) -> list[str]:
    """Explains the mark after a score, if one has it."""
    ways = dict.fromkeys(
        ", ".join(f"{n} = {shown(n, v)}" for n, v in row.trained.items())
        for row in rows
        if row.trained and row.score.n
    )
    how = "; or ".join(ways)
    said = f"* trained by a fast equivalent ({how}); memory is of the real setting."
    return [said] if ways else []


def family_table(results: Results, label: str = "family") -> Table | None:
    """Families of settings (sparse, narrow, shallow): the best of each within equal memory."""
    families: dict[str, list[Row]] = {}
    for row in results.rows:
        if label in row.settings and {"counted_bytes", "score"} <= row.quantities.keys():
            families.setdefault(str(row.settings[label]), []).append(row)
    if len(families) < 2:
        return None
    points = {
        name: [(row.quantities["counted_bytes"], row.quantities["score"]) for row in rows]
        for name, rows in families.items()
    }
    cells, sources = [], []
    for memory, best in at_equal_memory(points):
        found = {n: None if i is None else families[n][i] for n, i in best.items()}
        scores = {n: r.quantities["score"] for n, r in found.items() if r is not None}
        winner = max(scores, key=lambda n: scores[n])
        cells.append(
            (
                shown("counted_bytes", memory),
                *("–" if r is None else with_interval(r.score) for r in found.values()),
                winner,
            )
        )
        sources.append(tuple(n for r in found.values() if r for n in results.runs_of(r)))
    heads = ("within (MB)", *families, "best")
    return Table(
        "equal-memory", "The best within equal memory", heads, tuple(cells), tuple(sources)
    )


def search_table(results: Results) -> Table | None:
    """The choice of every search, beside the source's choice, and its score."""
    if not results.choices:
        return None
    places = dict.fromkeys(n for c in results.choices for n in c.where)
    names = dict.fromkeys(n for c in results.choices for n in c.values)
    heads, cells, sources = [head(n) for n in places], [], []
    targets = [results.targets_where(choice.where) for choice in results.choices]
    beside = any(n in said for said in targets for n in names)
    for name in names:
        heads += [head(name), *(["the report"] if beside else [])]
    for choice, said in zip(results.choices, targets, strict=True):
        cell = [shown(n, choice.where.get(n)) for n in places]
        for name in names:
            mine = choice.values.get(name)
            cell += [shown(name, mine if choice.is_made else None)]
            cell += [shown(name, None if mine is None else said.get(name))] if beside else []
        best = next(c for c in choice.candidates if c.values == choice.values)
        jobs = [job for c in ((best,) if choice.is_made else choice.candidates) for job in c.jobs]
        going = f"{choice.ended} of {len(jobs)} runs have ended"
        cells.append((*cell, with_interval(best.score) if choice.is_made else going))
        sources.append(tuple(job.name for job in jobs if job.name in results.outcomes))
    title = "Chosen on the validation split"
    heads.append(f"validation {results.study.score_label}")
    notes = () if results.rows else tuple(_state(results))
    return Table("search", title, tuple(heads), tuple(cells), tuple(sources), notes)


def tables(results: Results) -> list[Table]:
    """All there is something for."""
    made = (
        main_table(results) if results.rows else None,
        front_table(results),
        family_table(results),
        search_table(results),
    )
    return [table for table in made if table is not None]
