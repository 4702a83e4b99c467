"""Runs that no study made: which of them are trials of one setting."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...techniques.registry import registered
from ..records.run import FILE, Event, read
from .execute import FAILURE, Outcome, failure
from .expand import StudyJob
from .spec import SCORES, Values

OTHERS = ("seed", "evaluation_batch")
"""Settings of a recorded run that do not make it another row."""


@dataclass(frozen=True)
class Group:
    """Trials of one setting."""

    flags: Values
    others: Values
    """Settings of techniques that have no flag."""
    runs: list[Outcome]

    @property
    def score(self) -> str | None:
        """The field of the last events that says how good they are."""
        ends = [run.end for run in self.runs if run.error is None]
        return next((n for n in SCORES if any(end.get(n) is not None for end in ends)), None)


@dataclass(frozen=True)
class Loose:
    """The contents of a folder."""

    groups: tuple[Group, ...]
    outcomes: Mapping[str, Outcome]
    unfinished: int
    passed_over: tuple[str, ...]

    @property
    def telling(self) -> tuple[str, ...]:
        """The settings without a flag in which groups with the same flags differ."""
        alike: dict[str, list[Values]] = {}
        for group in self.groups:
            alike.setdefault(repr(sorted(group.flags.items())), []).append(group.others)
        names = dict.fromkeys(name for group in self.groups for name in group.others)
        return tuple(n for n in names if any(_differ(n, held) for held in alike.values()))


def _differ(name: str, rows: Sequence[Values]) -> bool:
    return len({repr(row.get(name)) for row in rows}) > 1


def collect(where: Path) -> Loose:
    """All runs somewhere below a folder; those with equal settings but for the seed are a group."""
    # Unlike a glob, it passes over folders that cannot be read, or that go while it looks.
    walked = os.walk(where)
    folders = sorted(Path(at) for at, _, names in walked if {FILE, FAILURE} & set(names))
    ours = "a folder of shoestring study or shoestring train"
    if not folders:
        raise InputError(f"there are no runs in {where}", hint=ours)
    groups: dict[str, Group] = {}
    outcomes: dict[str, Outcome] = {}
    passed_over: list[str] = []
    unfinished = 0
    for folder in folders:
        try:
            flags, others, found = _run(folder)
        except InputError as error:
            passed_over.append(error.message.removeprefix(f"{where}/"))
            continue
        if found is None:
            unfinished += 1
            continue
        if flags or found.error is not None:  # else a profile
            outcomes[str(folder.relative_to(where))] = found
        if flags:
            kept = {n: v for n, v in flags.items() if n not in OTHERS}
            key = repr([sorted(kept.items()), sorted(others.items())])
            group = groups.setdefault(key, Group(kept, others, []))
            ended = [run for run in group.runs if run.error is None]
            first = {run.job.settings.get("seed"): run.folder for run in ended}
            seed = flags.get("seed")
            if seed in first and found.error is None:  # a repeated run is not another trial
                names = (str(f.relative_to(where)) for f in (folder, first[seed]))
                passed_over.append("{} has the settings and the seed of {}".format(*names))
            else:
                group.runs.append(found)
    if all(found.error is not None for found in outcomes.values()):
        why = f": {passed_over[0]}" if passed_over else ""
        going = outcomes or unfinished
        raise InputError(
            f"no run in {where} has ended{why}", hint="go on with --resume" if going else ours
        )
    return Loose(tuple(groups.values()), outcomes, unfinished, tuple(passed_over))


def _run(folder: Path) -> tuple[Values, Values, Outcome | None]:
    """Settings as flags, those without one, and how it ended; a profile has no settings."""
    error = failure(folder)
    events: list[Event] = []
    flags, others = Values(), Values()
    try:
        events = read(folder / FILE)
        flags, others = flat_settings(events[0]["settings"]) if events else (flags, others)
    except InputError:
        if error is None:
            raise
    except (LookupError, TypeError, AttributeError):
        raise InputError(f"{folder / FILE} is not of shoestring train") from None
    job = StudyJob("train", flags)
    if error is not None:
        return flags, others, Outcome(job, folder, tuple(events), error)
    ended = bool(events) and events[-1]["event"] == "end"
    return flags, others, Outcome(job, folder, tuple(events)) if ended else None


def flat_settings(settings: Mapping[str, Any]) -> tuple[Values, Values]:
    """A record's settings with the plan's as the flags of the command line, and those without one.

    There are none of a technique that changes no bit, and the plan's seeds are not settings.
    """
    if "plan" not in settings:
        return {}, {}
    plan, batch = settings["plan"], settings.get("batch")
    flags = {n: v for n, v in settings.items() if n not in ("plan", "learning_rate")}
    flags["lr"] = settings["learning_rate"]
    known = registered()
    for name, kind in known.items():
        flags |= kind.to_flags(plan.get(name, {}), batch)
    others: Values = {}
    for name, given in plan.items():
        kind = known[name]
        if not kind.from_dict(given).is_neutral_for(batch):
            named = {**kind.defaults(), **given}
            told = kind.told_by_flags()
            others |= {f"{name}.{n}": v for n, v in named.items() if n not in told}
    return {n: tuple(v) if isinstance(v, list) else v for n, v in flags.items()}, others
