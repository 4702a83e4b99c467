"""Grids → jobs, and searches → choices; pure functions of the study and of what has ended."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from ...techniques.registry import neutral_flags, registered
from ..runs.defaults import usual_batch
from .spec import MOST_RUNS, PLACES, Study, StudySearch, Values
from .statistics import Sample, sample

JOBS = ("train", "profile", "measure")


@dataclass(frozen=True)
class StudyJob:
    """One run: a training, a profile, or a few updates to measure their peak."""

    kind: str
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Of its folder: the same settings, in whatever study, are the same run."""
        neutral = neutral_flags()  # what changes no bit does not make a run another one
        kept = {
            name: value
            for name, value in without_wholes(self.settings).items()
            if name not in PLACES and (name not in neutral or value != neutral[name])
        }
        text = json.dumps([self.kind, kept], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        kind = self.settings.get("split", "test") if self.kind == "train" else self.kind
        seed = f"-seed{self.settings.get('seed', 0)}" if self.kind == "train" else ""
        model = re.sub(r"[^\w.-]", ".", str(self.settings["model"]))
        return f"{model}-{kind}{seed}-{digest}"


@dataclass(frozen=True)
class RowJobs:
    """One setting of the study and the runs that say something about it."""

    settings: Mapping[str, Any]
    """As a table shows them: what the runs stand for, and labels."""
    trained: Mapping[str, Any]
    """Differences in the runs themselves, where faster equivalents replace them."""
    trials: tuple[StudyJob, ...]
    profile: StudyJob | None
    measure: StudyJob | None

    @property
    def jobs(self) -> tuple[StudyJob, ...]:
        """All of them."""
        return (*self.trials, *(job for job in (self.profile, self.measure) if job is not None))


@dataclass(frozen=True)
class SearchCandidate:
    """Values that were tried, and how good they were."""

    values: Values
    score: Sample
    failed: int
    jobs: tuple[StudyJob, ...]


@dataclass(frozen=True)
class SearchChoice:
    """The choice of a search for one combination of settings."""

    where: Values
    values: Values
    candidates: tuple[SearchCandidate, ...]
    search: StudySearch
    ended: int
    """Trials that have; before all have, nothing is chosen yet."""

    @property
    def is_made(self) -> bool:
        """Whether all trials have ended."""
        return self.ended == sum(len(c.jobs) for c in self.candidates)

    def is_for(self, point: Mapping[str, Any]) -> bool:
        """Whether these settings are the combination, not one that has more of the names."""
        return _where(self.search, point) == self.where


@dataclass(frozen=True)
class FedChoice:
    """The choice of another study's search for these settings."""

    study: str
    where: Values
    values: Values


@dataclass(frozen=True)
class Expansion:
    """All that is known by now: the rows only when every search has ended."""

    jobs: tuple[StudyJob, ...]
    rows: tuple[RowJobs, ...]
    choices: tuple[SearchChoice, ...]
    total: int
    """Jobs there will be in all."""


Score = Callable[[StudyJob], float | None]
"""Of a job that ended: NaN where it failed, None where it has not ended."""


def expand(study: Study, score: Score, fed: Sequence[FedChoice] = ()) -> Expansion:
    """The jobs up to the first search that has not ended, or all of them with the rows."""
    points = _points(study, fed)
    settings = [point.settings for point in points]
    _check_baseline(study, map(_shown, settings))
    jobs: dict[str, StudyJob] = {}
    choices: list[SearchChoice] = []
    waiting = False
    later = 0
    for search in study.searches:
        for where in _combinations(search, settings):
            base = _trainable(study.base)
            here = {**base, **where}
            shared = {**base, **_fed(here, fed), **_apply(here, choices), **where, **search.using}
            candidates = [
                (values, _trials({**shared, **values, "split": "validation"}, search.seeds))
                for values in search_values(search)
            ]
            if waiting:
                later += sum(len(trials) for _, trials in candidates)
                continue
            jobs.update((job.name, job) for _, trials in candidates for job in trials)
            choices.append(_choose(search, where, candidates, score))
        waiting = waiting or any(score(job) is None for job in jobs.values())
    rows = [
        _row(
            study,
            point,
            _fed(point.settings, fed) | ({} if waiting else _apply(point.settings, choices)),
        )
        for point in points
    ]
    row_jobs = {job.name: job for row in rows for job in row.jobs}
    total = len({**jobs, **row_jobs}) + later
    if waiting:
        return Expansion(tuple(jobs.values()), (), tuple(choices), total)
    _check_baseline(study, [row.settings for row in rows], chosen=True)
    return Expansion(tuple({**jobs, **row_jobs}.values()), tuple(rows), tuple(choices), total)


def without_wholes(settings: Mapping[str, Any]) -> Values:
    """The settings without techniques whose part of a minibatch is all of it: nothing is cut."""
    data = settings.get("data")
    usual = usual_batch(str(data), str(settings["model"])) if data else None
    known = {"batch": usual, **settings}
    idle: set[str] = set()
    for kind in registered().values():
        parts = [flag for flag in kind.flags if flag.part_of is not None]
        if any(settings.get(f.name) == known.get(f.part_of or "") is not None for f in parts):
            idle |= {flag.name for flag in kind.flags}
    return {name: value for name, value in settings.items() if name not in idle}


def values_of(study: Study) -> dict[str, list[Any]]:
    """Every value that a setting has in some run, or may get from a search."""
    held: list[Mapping[str, Any]] = [neutral_flags(), *({"kind": kind} for kind in JOBS)]
    for point in _points(study):
        held += [_trainable(point.settings), _shown(point.settings)]
        held += [{"seed": seed} for seed in point.seeds]
    for search in study.searches:
        held += [{"split": "validation"}, *({"seed": seed} for seed in search.seeds)]
        held += [search.using, *search_values(search)]
    found: dict[str, list[Any]] = {}
    for values in held:
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    return found


def product(grid: Mapping[str, Any]) -> list[Values]:
    """Every combination of the values that are lists, the last one moving first."""
    names = list(grid)
    values = [v if isinstance(v, list) else [v] for v in grid.values()]
    _check_count(1, grid)
    return [dict(zip(names, point, strict=True)) for point in itertools.product(*values)]


def search_values(search: StudySearch) -> list[Values]:
    """All that a search tries."""
    return [*product(search.over), *map(dict, search.also)]


def _check_count(seeds: int, grid: Mapping[str, Any]) -> None:
    """InputError for more runs than anybody makes."""
    count = seeds * math.prod(len(v) if isinstance(v, list) else 1 for v in grid.values())
    if count > MOST_RUNS:
        raise InputError(f"a grid of {count:,} runs is more than {MOST_RUNS:,}")


def matches(where: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether the settings have these values (or one of a list of them); 1 and 1.0 are one.

    A missing setting means unused: without a precision it is FP32.
    """
    known = {**neutral_flags(), **settings}
    return all(
        name in known and known[name] in (value if isinstance(value, list) else [value])
        for name, value in where.items()
    )


def _check_baseline(
    study: Study, rows: Iterable[Mapping[str, Any]], *, chosen: bool = False
) -> None:
    """InputError if no row is it; before a search has ended, by what is not searched for."""
    if study.baseline is None:
        return
    open_ = set() if chosen else {name for search in study.searches for name in search.over}
    wanted = {name: v for name, v in study.baseline.items() if name not in open_}
    if not any(matches(wanted, row) for row in rows):
        raise InputError(
            f"no row is the baseline {dict(study.baseline)}", hint="add it to a [[grid]]"
        )


def _trainable(point: Mapping[str, Any]) -> Values:
    return {n: v for n, v in point.items() if n not in ("labels", "stands_for")}


def _combinations(search: StudySearch, settings: Iterable[Values]) -> list[Values]:
    found: dict[str, Values] = {}
    for point in settings:
        where = _where(search, point)
        if matches(search.only, point):
            found[json.dumps(where, sort_keys=True)] = where
    return list(found.values())


def _where(search: StudySearch, point: Mapping[str, Any]) -> Values:
    """Which of the search's combinations a point is."""
    return {name: point[name] for name in search.per if name in point}


@dataclass(frozen=True)
class _Point:
    """A row of the grids, before anything is chosen for it."""

    settings: Values
    own: frozenset[str]
    """Names that its grid sets: a search chooses for what [base] says, not for these."""
    seeds: list[int]


def _points(study: Study, fed: Iterable[FedChoice] = ()) -> list[_Point]:
    """Merge rows that two grids share."""
    found: dict[str, _Point] = {}
    searched = {name for search in study.searches for name in search.over}
    searched |= {name for choice in fed for name in choice.values}
    for grid in study.grids:
        seeds = {**study.base, **grid}.get("seed", study.seeds)
        own = frozenset(grid) & searched
        _check_count(len(seeds) if isinstance(seeds, list) else 1, {**grid, "seed": None})
        for values in product({**grid, "seed": None}):
            whole = {n: v for n, v in {**study.base, **values}.items() if n != "seed"}
            one = {**neutral_flags(), **without_wholes(whole)}
            text = json.dumps([told_once(one), sorted(own)], default=str)
            point = found.setdefault(text, _Point(whole, own, []))
            new = [seeds] if isinstance(seeds, int) else seeds
            point.seeds.extend(seed for seed in new if seed not in point.seeds)
    return list(found.values())


def told_once(value: Any) -> Any:
    """1 for 1.0, and names in order."""
    if isinstance(value, Mapping):
        return {name: told_once(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return [told_once(held) for held in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _trials(settings: Values, seeds: Sequence[int]) -> tuple[StudyJob, ...]:
    if "seed" in settings:
        return (StudyJob("train", settings),)
    return tuple(StudyJob("train", {**settings, "seed": seed}) for seed in seeds)


def _choose(
    search: StudySearch,
    where: Values,
    candidates: list[tuple[Values, tuple[StudyJob, ...]]],
    score: Score,
) -> SearchChoice:
    """The best mean; values with a failed trial only where all have one, the first of equals."""
    tried = []
    for values, jobs in candidates:
        scores = [score(job) for job in jobs]
        ended = [s for s in scores if s is not None and not math.isnan(s)]
        failed = sum(s is not None and math.isnan(s) for s in scores)
        tried.append(SearchCandidate(values, sample(ended), failed, jobs))
    best = max(tried, key=lambda c: (c.score.n > 0, -c.failed, c.score.mean or 0.0))
    return SearchChoice(
        where, best.values, tuple(tried), search, sum(c.score.n + c.failed for c in tried)
    )


def _fed(point: Mapping[str, Any], fed: Iterable[FedChoice]) -> Values:
    """Choices of other studies for these settings."""
    found: Values = {}
    for choice in fed:
        if matches(choice.where, point):
            found.update(choice.values)
    return found


def _apply(point: Mapping[str, Any], choices: Iterable[SearchChoice]) -> Values:
    found: Values = {}
    for choice in choices:
        if choice.is_for(point):
            found.update(choice.values)
    return found


def _shown(point: Mapping[str, Any]) -> Values:
    """The settings of a row as a table shows them: what its runs stand for, and labels."""
    real = point.get("stands_for", {})
    off = {name for name, value in real.items() if value is False}  # as if it were not given
    counted = {**_trainable(point), **real}
    return {n: v for n, v in counted.items() if n not in off} | point.get("labels", {})


def _row(study: Study, point: _Point, chosen: Values) -> RowJobs:
    whole = {**point.settings, **{n: v for n, v in chosen.items() if n not in point.own}}
    trained, real = _trainable(whole), whole.get("stands_for", {})
    counted = {**trained, **real}
    if study.kind == "profile":
        return RowJobs(_shown(whole), {}, (), StudyJob("profile", counted), None)
    memory = {n: v for n, v in counted.items() if n not in ("lr", "epochs", "eval_every")}
    flags = not {"plan", "budget"} & counted.keys()  # else the runs themselves say what they count
    return RowJobs(
        settings=_shown(whole),
        trained={n: trained.get(n) for n in real},
        trials=_trials(trained, point.seeds),
        profile=StudyJob("profile", memory) if study.profile and flags else None,
        measure=StudyJob("measure", memory) if real and study.measure else None,
    )
