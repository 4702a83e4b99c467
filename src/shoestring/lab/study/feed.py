"""Choices of one study's searches, for the studies after it.

A file says `after = ["learning-rates"]`: the study's folder beside its own, of that name. What was
chosen there is kept in the folder, so that its runs and its report stay the same wherever it goes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import files
from ...errors import InputError
from .expand import Expansion, FedChoice
from .spec import SPEC, Study, load

CHOICES = "choices.json"


@dataclass(frozen=True)
class StudyFeed:
    """The choices a study begins with, and the studies that were not there."""

    choices: tuple[FedChoice, ...] = ()
    missing: tuple[str, ...] = ()

    def save(self, folder: Path) -> None:
        """Beside the study's file."""
        held = [{"study": c.study, "where": c.where, "values": c.values} for c in self.choices]
        text = files.json_text({"choices": held, "missing": list(self.missing)}, indent=1)
        files.write(folder / CHOICES, text.encode() + b"\n")


def of_folder(folder: Path) -> StudyFeed | None:
    """The settings a study's folder began with; None where it has not begun."""
    if not (folder / CHOICES).exists():
        return None
    try:
        held = json.loads(files.read(folder / CHOICES, 10**7))
        choices = tuple(
            FedChoice(str(c["study"]), _table(c["where"]), _table(c["values"]))
            for c in held["choices"]
        )
        return StudyFeed(choices, tuple(map(str, held["missing"])))
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        raise InputError(f"{folder / CHOICES} is not of shoestring study") from None


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError
    return dict(value)


def gathered(
    study: Study, folder: Path, expansion: Callable[[Study, Path], Expansion]
) -> StudyFeed:
    """From the folders beside this one; InputError where a search there has not ended.

    A study that is not there at all chose nothing: the defaults of the data stay, which are what
    the report chose, and that is said.
    """
    choices: list[FedChoice] = []
    missing = []
    for name in study.after:
        there = folder.absolute().parent / name
        if not (there / SPEC).exists():
            print(f"{there} is not there: its settings stay as the data's defaults have them",
                  file=sys.stderr)  # fmt: skip
            missing.append(name)
            continue
        found = expansion(load(there / SPEC, name), there)
        unmade = sum(not choice.is_made for choice in found.choices)
        if unmade or not found.choices:
            raise InputError(
                f"{there} has not chosen yet: {unmade} of its searches have not ended",
                hint="finish it first, or take it out of `after`",
            )
        choices += [FedChoice(name, c.where, c.values) for c in found.choices]
    return StudyFeed(tuple(choices), tuple(missing))


def said(feed: StudyFeed | None) -> Sequence[str]:
    """Notes for a report."""
    if feed is None:
        return []
    fed = dict.fromkeys(choice.study for choice in feed.choices)
    notes = [f"Settings chosen by the searches of {', '.join(fed)}."] if fed else []
    if feed.missing:
        notes.append(
            f"The searches of {', '.join(feed.missing)} were not run: what they choose is as the "
            "report chose it."
        )
    return notes
