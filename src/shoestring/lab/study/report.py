"""`shoestring report`: records → tables, figures and the page; the same bytes every time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import files
from ...errors import InputError
from ...units import format_size, parse_size
from .figures import figures
from .overview import Overview, folders, overview
from .page import page
from .results import Results, Row, load_results
from .tables import shown, tables, with_interval


@dataclass(frozen=True)
class Report:
    """The files that were written, and the text in them."""

    results: Results
    folder: Path
    text: str
    files: tuple[str, ...]
    budget_bytes: int | None = None
    best: Row | None = None

    def as_dict(self) -> dict[str, Any]:
        """Rows with their settings and quantities, for `--json`."""
        return {
            "folder": str(self.folder),
            "files": list(self.files),
            "rows": [
                {
                    "settings": dict(row.settings),
                    **row.quantities,
                    "pareto_optimal": number in self.results.front,
                    "runs": list(self.results.runs_of(row)),
                }
                for number, row in enumerate(self.results.rows)
            ],
            "chosen": [{**c.where, **c.values} for c in self.results.choices if c.is_made],
            "failed": self.results.failed,
            "missing": self.results.missing,
            "passed_over": list(self.results.passed_over),
            "best": None if self.best is None else dict(self.best.settings),
        }

    def __str__(self) -> str:
        parts = [self.text]
        if self.budget_bytes is not None:
            parts.append(f"Best within {format_size(self.budget_bytes)}: {self._best()}\n")
        return "\n".join([*parts, f"{len(self.files)} files in {self.folder}"])

    def _best(self) -> str:
        if self.best is None:
            return "nothing that was trained fits"
        settings = self.best.settings
        said = ", ".join(f"{n} {shown(n, settings.get(n))}" for n in self.results.varied)
        size = format_size(int(self.best.quantities["counted_bytes"]))
        return f"{said}: {size}, {with_interval(self.best.score)}"


def report_all(folder: str | Path) -> Overview:
    """The reports of every study that a folder with an overview names, and its page."""
    where = Path(folder)
    for name in folders(where):
        report(where / name)
    return overview(where)


def report(
    folder: str | Path, out: str | Path | None = None, *, budget: str | None = None
) -> Report:
    """Write tables.md, tables.tex, the figures and index.html; by default into FOLDER/report."""
    results = load_results(folder)
    budget_bytes = None if budget is None else parse_size(budget)
    made = tables(results)
    where = Path(out or Path(folder) / "report")
    runs = Path(os.path.relpath(Path(folder) / results.place, where)).as_posix()
    contents: dict[str, bytes] = {
        "tables.md": "\n".join(table.markdown() for table in made).encode(),
        "tables.tex": "\n".join(table.latex() for table in made).encode(),
        **figures(results),
        "index.html": page(results, made, runs).encode(errors="backslashreplace"),
    }
    try:
        where.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            files.write(where / name, content)
    except OSError as error:
        raise InputError(
            f"cannot write to {where}: {error.strerror}", hint="name another folder with --out"
        ) from None
    best = None if budget_bytes is None else results.best_within(budget_bytes)
    text = contents["tables.md"].decode()
    return Report(results, where, text, tuple(contents), budget_bytes, best)
