"""`train`: settings → a finished run in a folder, with records and snapshots. Fits one screen."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from ...errors import InputError, ShoestringError, TrainingStopped, first_line
from ...progress import asked_to_end
from ..records.run import (FILE, Event, Records, Unwritten, provenance, read)
from ..tasks import ImageTask, TextTask
from ..tasks.images import DEVICE_LIMIT_BYTES
from . import snapshot
from .board import Board, check_board
from .display import Display
from .folder import check_place, run_folder, writing
from ...step.group import (ShardingName, from_all, is_lost, largest, on_first, rank, ranks)
from .settings import AnySettings
from .trainer import STATE, Trainer

ASK_EVERY = 10
"""Updates between two questions to all ranks: the answer waits for the GPU."""

SNAPSHOT_SECONDS = 60.0
"""Between two snapshots; one takes a tenth of a second."""


def train(
    settings: AnySettings,
    task: ImageTask | TextTask,
    out: str | Path,
    *,
    device: torch.device,
    resume: bool = False,
    snapshot_every: int | None = None,
    stop_after: int | None = None,
    tensorboard: bool = False,
    parallel: ShardingName | None = None,
    device_limit_bytes: int = DEVICE_LIMIT_BYTES,
    predict: bool = True,
    budget: dict[str, Any] | None = None,
) -> Event:
    """Train to the end, or go on to it; returns the last event, with the summary.

    `snapshot_every` and `stop_after` count updates; by default there is a snapshot every minute.
    `budget` is what the plan was made for, for the records. With several ranks all call it, and
    rank 0 alone reads and writes the folder.
    """
    folder = Path(out)
    with ExitStack() as held:
        there = on_first(lambda: _hold(held, folder, resume))
        over = on_first(lambda: _ended(folder, settings)) if resume and there else None
        if over is not None:
            return over
        state = on_first(lambda: _latest(folder)) if resume else None
        check_board(tensorboard)
        trainer = Trainer(
            settings,
            task,
            device,
            predict=predict and state is None,
            parallel=parallel,
            device_limit_bytes=device_limit_bytes,
        )
        saved = time.monotonic()
        last = min(trainer.updates, stop_after or trainer.updates)
        asked = held.enter_context(asked_to_end())
        begins = state is None
        if state is not None:
            on_first(lambda: trainer.job.check(folder))
            trainer.load_state_dict(state)
        else:  # what cannot be trained leaves nothing behind
            with _users_model(trainer):
                trainer.advance()
        if not there:
            on_first(lambda: held.enter_context(run_folder(folder, resume=resume)))
        with (
            _records(folder, trainer, state, budget) as records,
            Board(folder, tensorboard and rank() == 0) as board,
            Display(trainer) as display,
        ):
            while begins or trainer.done < last:
                if not begins:
                    with _users_model(trainer):
                        trainer.advance()
                begins = False
                ended = trainer.at_end_of_epoch and trainer.epoch % settings.evaluate_every == 0
                if ended or trainer.done == trainer.updates:
                    _check(trainer, folder)
                    with _users_model(trainer):
                        found = trainer.evaluate()
                    event = records.write("evaluation", **found)
                    display.evaluated(event)
                    board.evaluated(event)
                elif display.due():
                    if ranks() == 1:  # the others do not know that it is time
                        _check(trainer, folder)
                    display.show()
                if trainer.keeps_weights:
                    _check(trainer, folder)
                    _keep_weights(folder, trainer)
                ending = _agreed(asked[0] if asked else 0, trainer)
                if snapshot_every is None:
                    due = _agreed(int(time.monotonic() - saved >= SNAPSHOT_SECONDS), trainer)
                else:
                    due = trainer.done % snapshot_every == 0
                if due or ending or trainer.done == last:
                    _check(trainer, folder)
                    _save(folder, trainer, records)
                    saved = time.monotonic()
                if ending:
                    raise _stopped_by(ending, trainer, folder)
            return _finish(trainer, records, folder)


def _hold(held: ExitStack, folder: Path, resume: bool) -> bool:
    """Hold the folder if it is there; nothing is written before the first update."""
    if folder.is_dir():
        held.enter_context(run_folder(folder, resume=resume, make=False))
        return True
    check_place(folder)
    return False


@contextmanager
def _users_model(trainer: Trainer) -> Iterator[None]:
    """An error raised by a user's model ends the run in one line, before or after its start."""
    began, number = trainer.done > 0, trainer.done + 1
    kind = TrainingStopped if began else InputError
    try:
        yield
    except ShoestringError:
        raise
    except torch.OutOfMemoryError as error:
        raise kind(
            f"out of memory in update {number:,}: {first_line(error)}",
            hint="a smaller --microbatch, a --budget, or another device",
        ) from error
    except (Exception, SystemExit) as error:
        if ":" not in trainer.settings.model or is_lost(error):  # a defect of ours: in full
            raise
        raise kind(
            f"{trainer.settings.model} raised {type(error).__name__} in update {number:,}: "
            f"{first_line(error)}",
            hint="it must run on every microbatch, forward and backward, and in evaluation mode",
        ) from error


def _ended(folder: Path, settings: AnySettings) -> Event | None:
    """The last event of a run that is finished, with its snapshots or without.

    InputError if it began with other settings: its records would be lost to another run.
    """
    if not (folder / FILE).exists():
        return None
    events = read(folder, whole=False)
    if not events:
        return None
    settings.check_same(events[0].get("settings", {}))
    if events[-1]["event"] != "end":
        return None
    print(f"the run in {folder} is finished", file=sys.stderr)
    return {**events[-1], "folder": str(folder)}


def _latest(folder: Path) -> dict[str, Any] | None:
    state, damaged = snapshot.load_latest(folder, keys=STATE)
    for what in damaged:
        print(f"warning: {what}; going on from the one before", file=sys.stderr)
    if state is None:
        print(f"no snapshot in {folder}: starting from the beginning", file=sys.stderr)
    return state


@contextmanager
def _records(
    folder: Path, trainer: Trainer, state: dict[str, Any] | None, budget: dict[str, Any] | None
) -> Iterator[Records]:
    """Write the first event, or drop those after the state to go on from."""
    host = {**provenance(trainer.device), "ranks": ranks(), "parallel": trainer.parallel}
    with Records(folder) if rank() == 0 else Unwritten() as records:
        if state is not None:
            records.truncate(state["records_bytes"])
            records.write("resume", step=trainer.done, host=host)
        else:
            records.truncate(0)
            on_first(writing(folder)(lambda: trainer.job.begin(folder)))
            about = {} if trainer.job.notes is None else {"data": trainer.job.notes}
            records.write(
                "start",
                settings=trainer.settings.as_dict(),
                budget=budget,
                parameters=trainer.parameters,
                updates=trainer.updates,
                predicted=trainer.predicted,
                **about,
                host=host,
            )
        yield records


def _save(folder: Path, trainer: Trainer, records: Records) -> None:
    state = {**trainer.state_dict(), "records_bytes": records.size_bytes}
    on_first(lambda: snapshot.save(folder, trainer.done, state))


def _keep_weights(folder: Path, trainer: Trainer) -> None:
    state = {"model": trainer.step.state_dict().get("model")}  # under fsdp rank 0 alone has it
    keep = trainer.job.weights_kept
    on_first(lambda: snapshot.save(folder, trainer.done, state, kind="weights", keep=keep))


def _check(trainer: Trainer, folder: Path) -> None:
    """Stop before a broken state is evaluated or saved."""
    what = next((what for what in from_all(trainer.trouble()) if what is not None), None)
    if what is None:
        return
    held = snapshot.found(folder)
    rate = trainer.step.optimizer.param_groups[0]["lr"]
    kept = f"the last good snapshot is {held[-1].name}" if held else "there is no snapshot yet"
    raise TrainingStopped(
        f"{what} (learning rate {rate:g}); {kept}",
        hint="a smaller --lr, or --precision fp32 where it was a 16-bit one, in another --out",
    )


def _finish(trainer: Trainer, records: Records, folder: Path) -> Event:
    measured = {
        "step": trainer.done,
        "epoch": trainer.epoch,
        **trainer.scores(),
        **trainer.step.counts,
        "predicted": trainer.predicted,
        "measured_peak_bytes": trainer.measured_peak_bytes,
        "seconds": round(trainer.total_seconds, 3),
    }
    if trainer.done < trainer.updates:
        return {"event": "stopped", "folder": str(folder), **measured}
    end = records.write("end", **measured, **trainer.finish(folder))
    return {**end, "folder": str(folder)}


def _agreed(number: int, trainer: Trainer) -> int:
    """The largest number of any rank, 0 where they are not asked: all do the same thing next."""
    if ranks() == 1:
        return number
    if trainer.device.type == "cuda" and trainer.done % ASK_EVERY:
        return 0
    return largest(number)


def _stopped_by(number: int, trainer: Trainer, folder: Path) -> TrainingStopped:
    return TrainingStopped(
        f"stopped by {signal.Signals(number).name} after update {trainer.done:,} of "
        f"{trainer.updates:,}; everything is in {folder}",
        hint="go on with --resume",
        exit_status=128 + number,
    )
