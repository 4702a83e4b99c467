"""Progress of a study on stderr: runs done, failed and under way, and the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...errors import InputError
from ..records.run import FILE, read
from ..runs.display import LINE_SECONDS, duration
from .execute import Outcome
from .expand import StudyJob


class Progress:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, folder_of: Callable[[StudyJob], Path]) -> None:
        self._folder_of = folder_of
        self.total = self.done = self.failed = 0
        self._began = time.monotonic()
        self._made = 0.0
        """Runs that ended since, without the parts of them that were there before."""
        self._there: dict[str, float] = {}
        """How far the runs under way had come when they were first seen."""
        self._next_line = self._began + LINE_SECONDS
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def ended(self, found: Outcome) -> None:
        """One more run is there; a failed one says why at once."""
        name = found.job.name
        self._made += 1 - self._there.pop(name, 0.0)
        self.done += 1
        text = f"{self.done}/{self.total} {name}"
        if found.error is not None:
            self.failed += 1
            text += f" failed: {found.error}"
        self._say(text)

    def tick(self, running: Sequence[StudyJob]) -> None:
        """Show where the runs stand."""
        now = time.monotonic()
        for job in running:
            if job.name not in self._there:
                self._there[job.name] = self._fraction(job)
        if self._bar is None and now < self._next_line:
            return
        parts = [self._fraction(job) for job in running]
        text = f"{len(running)} running" + (f" · {self.failed} failed" if self.failed else "")
        left = self._seconds_left(running, parts, now - self._began)
        text += "" if left is None else f" · {duration(left)} left"
        if self._bar is None:
            self._next_line = now + LINE_SECONDS
            self._say(f"{self.done}/{self.total} runs · {text}")
        else:
            done = self.done + sum(parts)
            self._bar.update(self._task, completed=done, total=self.total, description=text)

    def _fraction(self, job: StudyJob) -> float:
        """Of a run's updates, as its last evaluation says."""
        file = self._folder_of(job) / FILE
        try:
            events = read(file) if file.exists() else []
        except InputError:  # while its last line is being written
            return 0.0
        last = next((e["step"] for e in reversed(events) if "step" in e), 0)
        return last / events[0].get("updates", 1) if events else 0.0

    def _seconds_left(
        self, running: Sequence[StudyJob], parts: Sequence[float], seconds: float
    ) -> float | None:
        """At the pace so far, whatever number of runs at a time and their starts come to."""
        made = self._made + sum(parts) - sum(self._there[job.name] for job in running)
        if made < 0.02:
            return None
        return max(self.total - self.done - sum(parts), 0.0) * seconds / made

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)
