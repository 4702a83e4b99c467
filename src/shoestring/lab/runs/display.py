"""Progress of a run on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from ..records.run import Event
from ...units import format_size
from ...step.group import rank

if TYPE_CHECKING:
    from .trainer import Trainer

TERMINAL_SECONDS = 0.5
LINE_SECONDS = 15.0


class Display:
    """Loss, score, time left and measured peak; asking for the loss waits for the device."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._first_done, self._started = trainer.done, time.monotonic()
        self._score = ""
        self._bar: Any = None
        self._silent = rank() > 0
        on_terminal = sys.stderr.isatty() and not self._silent
        self._interval = TERMINAL_SECONDS if on_terminal else LINE_SECONDS
        self._next = self._started + self._interval

    def __enter__(self) -> Display:
        if sys.stderr.isatty() and not self._silent:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._trainer.updates, epoch="")
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def due(self) -> bool:
        """Whether it is time to show something; on rank 0 only."""
        return not self._silent and time.monotonic() >= self._next

    def evaluated(self, event: Event) -> None:
        """A line for every evaluation, in both kinds."""
        self._score = self._trainer.job.shown(event)
        self._say(
            f"epoch {event['epoch']}/{self._trainer.epochs} · "
            f"loss {event['train_loss']:.4f} · {self._score} · {self._rest()}"
        )
        self._next = time.monotonic() + self._interval

    def show(self) -> None:
        """The state between evaluations."""
        trainer = self._trainer
        self._next = time.monotonic() + self._interval
        parts = [f"loss {trainer.train_loss():.4f}", self._score, self._rest()]
        text = " · ".join(part for part in parts if part)
        epoch = f"{trainer.epoch}/{trainer.epochs}"
        if self._bar is not None:
            self._bar.update(self._task, completed=trainer.done, description=text, epoch=epoch)
        else:
            self._say(f"epoch {epoch} · update {trainer.done:,}/{trainer.updates:,} · {text}")

    def _rest(self) -> str:
        trainer = self._trainer
        rate = (time.monotonic() - self._started) / max(trainer.done - self._first_done, 1)
        left = rate * (trainer.updates - trainer.done)
        shown = f"{duration(left)} left · {1e3 * rate:.1f} ms/update"
        if trainer.measured_peak_bytes:
            shown += f" · peak {format_size(trainer.measured_peak_bytes)}"
        return shown

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif not self._silent:
            print(text, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """For people: 45 s, 3:20 min, 2:05 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
