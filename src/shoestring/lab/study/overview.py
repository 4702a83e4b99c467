"""One line for every table and figure of a source: what was run of it, and what came out.

A folder with `overview.toml` names them and the study folders beside it. `shoestring report FOLDER`
makes the reports of all of these and `report.md`, from records alone.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import files
from ...errors import InputError
from .expand import matches
from .kinds import check, known
from .results import Results, Row, load_results
from .spec import MOST_BYTES, Values
from .tables import Table, shown, target_text, with_interval

OVERVIEW = "overview.toml"
PAGE = "report.md"
_FILE = {
    **dict.fromkeys(("title", "notes"), str),
    **dict.fromkeys(("item", "agreement"), list[dict]),
    "folders": list[str],
}
_ITEM = {
    **dict.fromkeys(("name", "what", "command", "status", "how", "folder"), str),
    "show": list[dict],
}
_SHOW = {"where": dict, **dict.fromkeys(("quantity", "words", "says", "folder"), str)}
_AGREEMENT = {**dict.fromkeys(("claim", "agrees", "folder"), str), "show": list[dict]}
_NEEDED = {"item": ("name", "status"), "agreement": ("claim", "agrees")}
STATUS = ("faithful", "departs", "in part", "not run")


@dataclass(frozen=True)
class Overview:
    """The files that were written."""

    folder: Path
    text: str
    folders: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"folder": str(self.folder), "files": [PAGE], "reports": list(self.folders)}

    def __str__(self) -> str:
        return f"{self.text}\n{PAGE} and {len(self.folders)} reports in {self.folder}"


def is_overview(folder: Path) -> bool:
    """Whether a folder names studies to be reported together."""
    return (folder / OVERVIEW).is_file()


def folders(folder: Path) -> tuple[str, ...]:
    """The study folders that are there, by name."""
    return tuple(name for name in _named(_read(folder)) if (folder / name).is_dir())


def _named(given: Values) -> dict[str, None]:
    """All folders that a file names, each once."""
    tables = [*given.get("item", []), *given.get("agreement", [])]
    shows = [show for table in tables for show in table.get("show", [])]
    named = [table["folder"] for table in [*tables, *shows] if "folder" in table]
    return dict.fromkeys([*named, *given.get("folders", [])])


def overview(folder: Path) -> Overview:
    """Write the page of all; the reports of the folders are made before."""
    given = _read(folder)
    results: dict[str, Results] = {}

    def results_of(name: str) -> Results | None:
        if name not in results and (folder / name).is_dir():
            results[name] = load_results(folder / name)
        return results.get(name)

    cells = [_line(item, results_of) for item in given.get("item", [])]
    heads = ("the report's", "what", "our command", "n", "ours", "the report", "faithful?")
    parts = [Table("overview", given.get("title", folder.name), heads, tuple(cells)).markdown()]
    if given.get("notes"):
        parts.insert(0, _wrapped(given["notes"]))
    if given.get("agreement"):
        head = ("the report concludes", "ours", "the report", "agrees?")
        rows = []
        for one in given["agreement"]:
            _, ours, theirs = _found(one, results_of)
            rows.append((one["claim"], ours, theirs, one["agrees"]))
        title = "Where we agree with it, and where not"
        parts.append(Table("agreement", title, head, tuple(rows)).markdown())
    text = "\n".join(parts)
    files.write(folder / PAGE, text.encode())
    return Overview(folder, text, folders(folder))


def _read(folder: Path) -> Values:
    path = folder / OVERVIEW
    try:
        given = tomllib.loads(files.read(path, MOST_BYTES).decode())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not TOML: {error}") from None
    known(given, _FILE, OVERVIEW)
    check(given, _FILE, OVERVIEW)
    for table, kinds in (("item", _ITEM), ("agreement", _AGREEMENT)):
        for one in given.get(table, []):
            known(one, kinds, f"[[{table}]]")
            check(one, kinds, f"[[{table}]]")
            if missing := next((n for n in _NEEDED[table] if n not in one), None):
                raise InputError(f"{path}: [[{table}]] has no {missing}")
            for show in one.get("show", []):
                known(show, _SHOW, "show")
                check(show, _SHOW, "show")
    for item in given.get("item", []):
        if item["status"] not in STATUS:
            raise InputError(f"{path}: status {item['status']!r}", hint=", ".join(STATUS))
    for name in _named(given):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise InputError(f"{path}: {name!r} is not a folder inside of it")
    return given


ResultsOf = Callable[[str], Results | None]


def _line(item: Mapping[str, Any], results_of: ResultsOf) -> tuple[str, ...]:
    counts, ours, theirs = _found(item, results_of)
    status = item["status"] + (f": {item['how']}" if item.get("how") else "")
    what, command = item.get("what", ""), item.get("command", "–")
    return item["name"], what, command, counts, ours, theirs, status


def _found(table: Mapping[str, Any], results_of: ResultsOf) -> tuple[str, str, str]:
    """How many runs are behind what is shown, our values, and the source's."""
    counts: dict[str, None] = {}
    ours, theirs = [], []
    for one in table.get("show", []):
        results = results_of(one.get("folder") or table.get("folder", ""))
        row = None if results is None else _row(results, one.get("where", {}))
        words = f"{one['words']}: " if one.get("words") else ""
        name = one.get("quantity", "score")
        mine, said = _values(results, row, name)
        if row is not None and name in ("score", "score_loss"):
            counts[str(row.score.n)] = None
        ours.append(words + mine)
        if (text := one.get("says") or said) != "–":
            theirs.append(words + text)
    return ", ".join(counts) or "–", "; ".join(ours) or "–", "; ".join(theirs) or "–"


def _row(results: Results, where: Mapping[str, Any]) -> Row | None:
    found = [row for row in results.rows if matches(where, row.settings)]
    return found[0] if found else None


def _values(results: Results | None, row: Row | None, name: str) -> tuple[str, str]:
    """Ours and theirs, as tables show them."""
    if results is None or row is None:
        return "not run", "–"
    said = target_text(results.targets_of(row), name)
    unit = " MB" if name.endswith("_bytes") else ""
    if said != "–":
        said += unit
    if name == "score":
        return (with_interval(row.score) if row.score.n else "not run"), said
    value = row.quantities.get(name)
    return ("not run" if value is None else shown(name, value) + unit), said


def _wrapped(text: str) -> str:
    return text.strip() + "\n"
