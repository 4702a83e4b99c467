"""`shoestring study`: a file → all its runs, in a folder that says what is done."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ... import files
from ...errors import InputError, TrainingStopped
from ..runs.folder import check_place, run_folder, writing
from . import cluster, feed, local
from .display import Progress
from .execute import FAILURE, Outcome, Place, outcome
from .expand import Expansion, StudyJob, expand, matches, values_of
from .spec import SPEC, Study, load

RUNS = "runs"


class Folder:
    """A study's folder: its file, and one folder for each run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, Outcome] = {}
        self._feed: feed.StudyFeed | None = None

    def of(self, job: StudyJob) -> Path:
        """Where a job's records lie."""
        return self.path / RUNS / job.name

    @property
    def feed(self) -> feed.StudyFeed | None:
        """Choices of other studies for this one; each is read once."""
        self._feed = self._feed or feed.of_folder(self.path)
        return self._feed

    def expansion(self, study: Study) -> Expansion:
        """All that is known of its jobs by now."""
        fed = self.feed
        return expand(study, self.score(study), () if fed is None else fed.choices)

    def outcome(self, job: StudyJob) -> Outcome | None:
        """How it ended; what has ended once is not read again."""
        if job.name not in self._known:
            found = outcome(job, self.of(job))
            if found is None:
                return None
            self._known[job.name] = found
        return self._known[job.name]

    def score(self, study: Study) -> Callable[[StudyJob], float | None]:
        """The score of a job that ended, NaN where it failed or has none."""

        def score(job: StudyJob) -> float | None:
            found = self.outcome(job)
            if found is None:
                return None
            value = None if found.error is not None else score_of(found, study.score)
            return math.nan if value is None else float(value)

        return score


def check_score(name: str, ended: Sequence[Outcome]) -> None:
    """InputError if none of the runs that came to their end has the study's score."""
    if ended and not any(name in run.end for run in ended):
        there = (n for n, v in ended[0].end.items() if isinstance(v, (int, float)))
        raise InputError(
            f"no run has the study's score, {name!r}",
            hint=f"score = … in its file, one of {', '.join(there)}; then go on with --resume",
        )


def score_of(found: Outcome, name: str) -> float | None:
    """Of a run that came to its end; None where it has none."""
    value = found.end.get(name)
    if value is not None and not isinstance(value, (int, float)):
        raise InputError(
            f"{name!r}, the study's score, is not a number in {found.folder}",
            hint="score = … in its file, such as best_accuracy",
        )
    return value


@dataclass(frozen=True)
class Summary:
    """The outcome of a study."""

    folder: str
    runs: int
    """That have ended."""
    failed: int
    left: int = 0
    """Left out, and not there yet."""

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)

    def __str__(self) -> str:
        failed = f", {self.failed} of them failed" if self.failed else ""
        left = f"; {self.left} are still to be run" if self.left else ""
        return f"{self.runs} runs in {self.folder}{failed}{left}"


def run_study(
    file: str | Path,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    retry_failed: bool = False,
    workers: int = 1,
    ray: str | None = None,
    gpus: float = 0.0,
    only: Mapping[str, Any] | None = None,
    place: Place | None = None,
) -> Summary:
    """Make every run of the study that is not there yet; stages of a search come one by one.

    `only` takes settings: runs with other values are left for another time or machine.
    """
    study = load(file)
    place = replace(place or Place(), threads=study.threads)
    if place.run_seconds is None:
        place = replace(place, run_seconds=study.run_seconds)
    if workers < 1:
        raise InputError(f"--workers {workers} is below 1")
    folder = Folder(Path(out or Path("runs") / study.name))
    fed = folder.feed or feed.gathered(study, folder.path, lambda s, at: Folder(at).expansion(s))
    expand(study, lambda job: None, fed.choices)  # mistakes end here, before anything is written
    _check_chosen(study, only or {})
    check_place(folder.path)
    if ray is not None:
        cluster.check(ray)
    with _held(folder, study, resume):
        if study.after and folder.feed is None:
            fed.save(folder.path)
        if retry_failed:
            for job in _chosen(_expansion(study, folder).jobs, only or {}):
                (folder.of(job) / FAILURE).unlink(missing_ok=True)
        with Progress(folder.of) as progress:
            while pending := _pending(study, folder, progress, only or {}):
                _run(pending, study, folder, place, workers, ray, gpus, progress)
        expansion = _expansion(study, folder)
        ended = [found for job in expansion.jobs if (found := folder.outcome(job)) is not None]
    failed = sum(found.error is not None for found in ended)
    return Summary(str(folder.path), len(ended), failed, expansion.total - len(ended))


def _expansion(study: Study, folder: Folder) -> Expansion:
    return folder.expansion(study)


def _pending(
    study: Study, folder: Folder, progress: Progress, chosen: Mapping[str, Any]
) -> list[StudyJob]:
    """The jobs of this stage that are still to be done."""
    expansion = _expansion(study, folder)
    ended = [found for job in expansion.jobs if (found := folder.outcome(job)) is not None]
    progress.total, progress.done = expansion.total, len(ended)
    progress.failed = sum(found.error is not None for found in ended)
    pending = [job for job in expansion.jobs if folder.outcome(job) is None]
    kept = [job for job in _chosen(expansion.jobs, chosen) if folder.outcome(job) is None]
    progress.total -= len(pending) - len(kept)
    return kept


def _chosen(jobs: Sequence[StudyJob], chosen: Mapping[str, Any]) -> Sequence[StudyJob]:
    """Those with the settings of `--only`."""
    return [j for j in jobs if matches(chosen, {**j.settings, "kind": j.kind})]


def _check_chosen(study: Study, chosen: Mapping[str, Any]) -> None:
    """InputError for what `--only` asks of no run, now or after a search."""
    known = values_of(study)
    for name, value in chosen.items():
        if name not in known:
            hint = ", ".join(sorted(known))
            raise InputError(f"--only {name}: no run has such a setting", hint=hint)
        for one in value if isinstance(value, list) else [value]:
            if one not in known[name]:
                hint = ", ".join(dict.fromkeys(map(str, known[name])))
                raise InputError(f"--only {name}={one}: no run has it", hint=hint)


def _run(
    jobs: list[StudyJob], study: Study, folder: Folder, place: Place, workers: int, ray: str | None,
    gpus: float, progress: Progress,
) -> None:  # fmt: skip
    def ended(job: StudyJob) -> None:
        found = folder.outcome(job)
        assert found is not None
        progress.ended(found)
        if study.searches and job.kind == "train" and found.error is None:
            check_score(study.score, [found])  # before others are chosen by it

    try:
        with writing(folder.path):  # a failure that cannot be written down
            if ray is not None:
                cluster.run(jobs, folder.of, place, ray, gpus, ended, progress.tick)
            else:
                local.run(jobs, folder.of, place, workers, ended, progress.tick)
    except local.Stopped as stopped:
        raise TrainingStopped(
            f"stopped by {stopped} after {progress.done} of {progress.total} runs",
            hint="go on with --resume",
            exit_status=128 + stopped.number,
        ) from None


@contextmanager
def _held(folder: Folder, study: Study, resume: bool) -> Any:
    """The folder, for one study at a time; its own copy of the file says what the runs are."""
    with run_folder(folder.path, resume=True):
        spec = folder.path / SPEC
        if spec.exists() and not resume:
            raise InputError(
                f"{folder.path} holds a study already",
                hint="go on with --resume, or name another --out",
            )
        try:
            files.remove_partial(folder.path)
            (folder.path / RUNS).mkdir(exist_ok=True)
            files.write(spec, study.text.encode())
        except OSError as error:
            raise InputError(
                f"cannot write to {folder.path}: {error.strerror}",
                hint="make room, or name another --out",
            ) from None
        yield
