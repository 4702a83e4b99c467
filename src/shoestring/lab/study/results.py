"""A study's folder → rows: one setting each, with everything its runs say about it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...techniques.registry import flags, neutral_flags
from ..target import flagged_plan
from . import feed
from .command import RUNS, Folder, check_score, score_of
from .execute import Outcome
from .expand import SearchChoice, matches, told_once
from .loose import collect
from .spec import SCORES, SPEC, Study, StudyTarget, Values, from_values, load
from .statistics import Sample, best_within, pareto_front, sample


@dataclass(frozen=True)
class Row:
    """One setting: its trials, and the profile and measurement of what it stands for."""

    settings: Mapping[str, Any]
    trained: Mapping[str, Any]
    """Differences in the runs themselves; empty where they are exact."""
    runs: tuple[Outcome, ...]
    profile: Outcome | None
    measured: Outcome | None
    score: Sample
    quantities: Mapping[str, float] = field(default_factory=dict)
    """Everything a table or figure can show, by name."""

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """All runs behind the row's numbers."""
        return (*self.runs, *(o for o in (self.profile, self.measured) if o is not None))

    def value(self, name: str) -> Any:
        """A quantity or else a setting; None where there is neither."""
        return self.quantities.get(name, self.settings.get(name))


@dataclass(frozen=True)
class Results:
    """The results of a study."""

    study: Study
    rows: tuple[Row, ...]
    choices: tuple[SearchChoice, ...]
    outcomes: Mapping[str, Outcome]
    """Of every run, by its name."""
    missing: int
    """Runs that have not ended yet."""
    passed_over: tuple[str, ...] = ()
    """Files that cannot be read, and why."""
    remarks: tuple[str, ...] = ()
    """Of where its settings come from."""
    place: str = RUNS
    """Where in the folder the names of runs begin."""

    @property
    def failed(self) -> int:
        """Runs that ended with an error."""
        return sum(found.error is not None for found in self.outcomes.values())

    @property
    def varied(self) -> tuple[str, ...]:
        """The settings that differ between rows, in the order of the file."""
        names = dict.fromkeys(name for row in self.rows for name in row.settings)
        rows = [{**neutral_flags(), **row.settings} for row in self.rows]
        return tuple(n for n in names if len({repr(told_once(r.get(n))) for r in rows}) > 1)

    @property
    def front(self) -> tuple[int, ...]:
        """The rows that no other one of the same data beats in memory and score."""
        known = [i for i, row in enumerate(self.rows) if _point(row) is not None]
        found: list[int] = []
        for data in dict.fromkeys(self.rows[i].settings.get("data") for i in known):
            alike = [i for i in known if self.rows[i].settings.get("data") == data]
            best = pareto_front([_point(self.rows[i]) or (0.0, 0.0) for i in alike])
            found += [alike[i] for i in best]
        return tuple(found)

    def best_within(self, budget_bytes: int) -> Row | None:
        """The row with the best score whose counted memory fits."""
        rows = [row for row in self.rows if _point(row) is not None]
        if len(data := {row.settings.get("data") for row in rows}) > 1:
            names = ", ".join(sorted(map(str, data)))
            raise InputError(
                f"--budget: no setting is the best for {names} together",
                hint="report a folder with runs of one of them",
            )
        best = best_within([_point(row) or (0.0, 0.0) for row in rows], budget_bytes)
        return None if best is None else rows[best]

    def runs_of(self, row: Row) -> tuple[str, ...]:
        """The names of all runs behind a row, as `outcomes` has them."""
        names = {found.folder: name for name, found in self.outcomes.items()}
        return tuple(names[found.folder] for found in row.outcomes)

    def targets_of(self, row: Row) -> dict[str, Any]:
        """Published values for the row's settings."""
        return self._targets(row.settings, self.study.targets)

    def _targets(self, settings: Mapping[str, Any], among: Iterable[StudyTarget]) -> dict[str, Any]:
        found: Values = {}
        for target in among:
            if matches(target.where, settings):
                found.update(target.quantities)
        return found

    def targets_where(self, where: Mapping[str, Any]) -> dict[str, Any]:
        """Published choices for a search with these settings."""
        return self._targets(where, (t for t in self.study.targets if t.where))


def _point(row: Row) -> tuple[float, float] | None:
    memory, score = row.quantities.get("counted_bytes"), row.quantities.get("score")
    return None if memory is None or score is None else (memory, score)


def load_results(path: str | Path) -> Results:
    """Of a study's folder, or of any folder with runs of `shoestring train` somewhere below it."""
    where = Path(path)
    if not (where / SPEC).exists():
        return _loose(where)
    study, folder = load(where / SPEC, where.absolute().name), Folder(where)
    expansion = folder.expansion(study)
    outcomes = {j.name: o for j in expansion.jobs if (o := folder.outcome(j)) is not None}
    partly = [
        name
        for name, found in outcomes.items()
        if found.job.kind == "profile" and found.error is None and not found.end.keys() >= _COUNTED
    ]
    for name in partly:
        del outcomes[name]
    rows = [
        _row(
            study.score,
            made.settings,
            made.trained,
            [outcomes[job.name] for job in made.trials if job.name in outcomes],
            outcomes.get(made.profile.name) if made.profile else None,
            outcomes.get(made.measure.name) if made.measure else None,
        )
        for made in expansion.rows
    ]
    check_score(study.score, [run for row in rows for run in row.runs if run.error is None])
    return Results(
        study,
        tuple(_relative(rows, study.baseline)),
        expansion.choices,
        outcomes,
        expansion.total - len(outcomes) - len(partly),
        tuple(f"{RUNS}/{name} is a profile that lacks something" for name in partly),
        remarks=tuple(feed.said(folder.feed)),
    )


def _loose(where: Path) -> Results:
    """Runs without a study, as one that has a row for each setting they have."""
    found = collect(where)
    scores = {group.score for group in found.groups}
    known = [name for name in SCORES if name in scores] or ["best_accuracy"]
    given = {
        "base": {"model": "-", "data": "-"},
        "score": " or ".join(known),
        "score_label": " or ".join(SCORES[name] for name in known),
    }
    study = from_values(given, "", where.absolute().name)
    rows = []
    for group in found.groups:
        more = {n: group.others[n] for n in found.telling if n in group.others}
        rows.append(_row(group.score or "", {**group.flags, **more}, {}, group.runs, None, None))
    held, left, over = found.outcomes, found.unfinished, found.passed_over
    return Results(study, tuple(rows), (), held, left, over, place=".")


def _row(
    score: str,
    settings: Mapping[str, Any],
    trained: Mapping[str, Any],
    runs: Sequence[Outcome],
    profile: Outcome | None,
    measured: Outcome | None,
) -> Row:
    ended = [run for run in runs if run.error is None]
    scored = [run for run in ended if score_of(run, score) is not None]
    found = sample([float(run.end[score]) for run in scored])
    made: dict[str, float] = {"n": found.n, "failed": len(runs) - len(ended)}
    if found.mean is not None and math.isfinite(found.mean):
        made["score"] = found.mean
        known = [run.end["seconds"] for run in scored if "seconds" in run.end]
        made |= {"seconds": math.fsum(known) / len(known)} if known else {}
    if "score" in made and found.interval is not None:
        made["interval"] = found.interval
    if profile is not None and profile.error is None:
        made |= _counted(profile.end) | _work(profile)
    real = [measured] if measured is not None and measured.error is None else []
    peaks = real or ([] if trained else ended)
    made |= _largest("measured_bytes", (run.end.get("measured_peak_bytes") for run in peaks))
    predicted = [run.end.get("predicted", {}) for run in peaks]
    made |= _largest("predicted_bytes", (p.get("step_peak_bytes") for p in predicted))
    if "counted_bytes" not in made:
        made |= _largest("counted_bytes", (p.get("fundamental_peak_bytes") for p in predicted))
    return Row(settings, trained, tuple(runs), profile, measured, found, made)


def _largest(name: str, values: Iterable[int | None]) -> dict[str, float]:
    known = [value for value in values if value]
    return {name: max(known)} if known else {}


_COUNTED = frozenset(
    "peak_bytes model_bytes gradient_bytes optimizer_state_bytes workspace_bytes forward_flops "
    "backward_flops recompute_flops timeline".split()
)
"""The fields of a profile's record that the page draws."""


def _counted(end: Mapping[str, Any]) -> dict[str, float]:
    """The report's three kinds of memory at the peak, and work.

    The ratio is to the row's own work without recomputation; a study's baseline replaces it.
    """
    optimizer = end["gradient_bytes"] + end["optimizer_state_bytes"]
    flops = end["forward_flops"] + end["backward_flops"]
    activation = end["peak_bytes"] - end["model_bytes"] - optimizer - end["workspace_bytes"]
    return {
        "counted_bytes": end["peak_bytes"],
        "model_bytes": end["model_bytes"],
        "optimizer_bytes": optimizer,
        "activation_bytes": activation,
        "flops_ratio": (flops + end["recompute_flops"]) / flops if flops else 1.0,
    }


def _work(profile: Outcome) -> dict[str, float]:
    """FLOPs of a whole minibatch: what is counted is one pass, of a microbatch where it is cut."""
    end, settings = profile.end, profile.job.settings
    batch = end.get("batch")
    if not batch:
        return {}
    given = {name: settings[name] for name in flags() if name in settings}
    passes = batch / (flagged_plan(str(settings["model"]), given).at_once or batch)
    flops = end["forward_flops"] + end["backward_flops"] + end["recompute_flops"]
    return {"flops": flops * max(passes, 1.0)}


def _relative(rows: Sequence[Row], baseline: Mapping[str, Any] | None) -> list[Row]:
    """Reductions and losses, relative to the first row that has the baseline's settings."""
    if baseline is None or not rows:  # none before every search has ended
        return list(rows)
    base = next(row for row in rows if matches(baseline, row.settings))
    made = []
    for row in rows:
        more: dict[str, float] = {}
        for kind in ("counted", "model", "optimizer", "activation", "measured"):
            mine, its = (r.quantities.get(f"{kind}_bytes") for r in (row, base))
            if mine and its:
                more["reduction" if kind == "counted" else f"{kind}_reduction"] = its / mine
        work, its = (r.quantities.get("flops") for r in (row, base))
        if work and its:
            more["flops_ratio"] = work / its
        if "score" in row.quantities and "score" in base.quantities:
            more["score_loss"] = base.quantities["score"] - row.quantities["score"]
        made.append(Row(**{**vars(row), "quantities": {**row.quantities, **more}}))
    return made
