"""What all attacks share: how many, commands as processes, and what must be equal in the end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos_child import begun, run_command
from test_loop import ALL, assert_same, final

from shoestring import Microbatching
from shoestring.lab.records.run import read, strip_times
from shoestring.lab.runs import snapshot
from shoestring.lab.tasks.prepared import load, save
from tiny_texts import SMALL, small_text

COUNTS: Counter[str] = Counter()
"""What was tried, and what broke; printed at the end."""
SEED = int(os.environ.get("SEED", "0"))
HANG_SECONDS = 60.0
"""Of the process's own time (`OwnTime`): more is a hang."""
PRELOADED = [
    *("torch._dynamo", "sklearn.datasets", "shoestring.lab.runs.command", "shoestring.cli.main"),
    *("shoestring.lab.study.local", "shoestring.lab.study.report", "matplotlib.figure"),
    *("sacrebleu", "shoestring.lab.runs.text_job", "shoestring.lab.runs.image_job"),
]


def asked(name: str, default: int) -> int:
    """How often, as the environment says (`make chaos KILLS=1000`)."""
    return int(os.environ.get(name) or default)


def start(arguments: list[Any], log: Path) -> Any:
    """A process from a server that has imported everything: it starts in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    given = ([str(a) for a in arguments], str(log))
    process = context.Process(target=run_command, args=given)
    process.start()
    return process


class OwnTime:
    """Seconds since it was made, without those in which a process waited for a busy CPU.

    Others may use the machine. The kernel counts how long a thread that could run did not
    (/proc/PID/schedstat); asleep, blocked or running it has its time. Of a process with children
    the one that waited longest counts. Where the kernel does not say, it is the clock's time.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self._last = pid, time.monotonic()
        self._delays = _delays(pid)
        self.seconds = 0.0

    def look(self) -> float:
        """The seconds up to now; to be asked often."""
        now, delays = time.monotonic(), _delays(self._pid)
        waited = max((d - self._delays.get(pid, 0.0) for pid, d in delays.items()), default=0.0)
        self.seconds += max(now - self._last - waited, 0.0)
        self._last, self._delays = now, delays
        return self.seconds


def _delays(pid: int) -> dict[int, float]:
    """Seconds that a process and those it started have waited for a CPU so far."""
    found: dict[int, float] = {}
    for one in (pid, *_children(pid)):
        with contextlib.suppress(OSError, IndexError, ValueError):
            found[one] = int(Path(f"/proc/{one}/schedstat").read_text().split()[1]) / 1e9
    return found


def _children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            found += [child, *_children(child)]
    return found


def ended_in_time(pid: int, wait: Callable[[float], bool]) -> bool:
    """Whether `wait` (up to so many seconds) says that it ended before it counts as a hang."""
    own = OwnTime(pid)
    while not wait(0.05):
        if own.look() > HANG_SECONDS:
            COUNTS["hangs"] += 1
            return False
    COUNTS["longest, seconds of its own"] = max(
        COUNTS["longest, seconds of its own"], round(own.look())
    )
    return True


def until(true: Callable[[], bool], process: Any) -> bool:
    """Wait for it, or until the process ended or it counts as a hang; whether it came true."""

    def waited(seconds: float) -> bool:
        if true() or process.exitcode is not None:
            return True
        time.sleep(seconds)
        return False

    return ended_in_time(process.pid, waited) and true()


def own_seconds(process: Any, seconds: float, log: Path) -> None:
    """Let the command run for so long, from when it began; signals before that are not its own."""
    until(lambda: os.path.exists(begun(str(log), process.pid)), process)
    own = OwnTime(process.pid)
    while process.exitcode is None and own.look() < seconds:
        process.join(0.02)


def finished(process: Any, log: Path) -> int:
    """Wait for its end; a hang is counted, and ended."""

    def ended(seconds: float) -> bool:
        process.join(seconds)
        return process.exitcode is not None

    if not ended_in_time(process.pid, ended):
        process.kill()
        process.join()
    if "Traceback (most recent call last)" in log.read_text(errors="replace"):
        COUNTS["tracebacks"] += 1
        raise AssertionError(log.read_text(errors="replace")[-3000:])
    return process.exitcode


@dataclass(frozen=True)
class Case:
    """A command that writes a folder, what must be in it at last, and how far it has come."""

    name: str
    arguments: Callable[[Path], list[Any]]
    compare: Callable[[Path, Path], None]
    reached: Callable[[Path], int]


def same_run(one: Path, other: Path) -> None:
    """Weights, optimizer, random streams and records, to the bit."""
    assert_same(final(one), final(other))
    records = [strip_times(read(folder)) for folder in (one, other)]
    assert repr(records[0]) == repr(records[1])
    names = [sorted(path.name.partition("-")[0] for path in f.iterdir()) for f in (one, other)]
    assert names[0] == names[1], names


def last_step(folder: Path) -> int:
    """Updates in the newest snapshot, which must be whole; every other one too."""
    found = snapshot.found(folder) if folder.is_dir() else []
    for path in found:
        snapshot.load(path)
    assert len(found) <= 3, found
    return snapshot._step(found[-1]) if found else 0


def same_text(one: Path, other: Path) -> None:
    """Every file of a prepared text but the archive, which has times in it, and all arrays."""
    load(one), load(other)
    for path in one.iterdir():
        if path.suffix != ".npz":
            assert path.read_bytes() == (other / path.name).read_bytes()
    sides = [load(folder).train for folder in (one, other)]
    for mine, theirs in zip(*sides, strict=True):
        assert (mine.numbers == theirs.numbers).all() and (mine.starts == theirs.starts).all()


def cases(place: Path) -> dict[str, Case]:
    """All kinds of tasks, small; `place` gets their inputs."""
    plan = place / "plan.toml"
    ALL.but(Microbatching(20)).save(plan)
    text = place / "text"
    if not text.exists():
        save(small_text(), text)
    raw = place / "raw"
    if not raw.exists():
        raw.mkdir()
        for part, count in (("train", 60), ("valid", 5), ("test", 5)):
            for language, word in (("de", "ein Haus am See"), ("en", "a house by the lake")):
                lines = "".join(f"{word} {n % 7} x{n}\n" for n in range(count))
                (raw / f"{part}.{language}").write_text(lines)
    study = place / "study.toml"
    study.write_text(STUDY)
    common = ["--device", "cpu", "--no-predict", "--resume"]
    digits = ["--data", "digits", "--lr", "0.05", *common]

    def image(model: str, *more: Any) -> Callable[[Path], list[Any]]:
        return lambda out: ["train", model, *digits, *more, "--out", out]

    return {
        "sparse, rewired, FP16, recomputed images": Case(
            "all",
            image("tiny_nets:tiny_residual", "--plan", plan, "--batch", "120", "--epochs", "2",
                  "--snapshot-every", "3"),
            same_run, last_step,
        ),
        "plain images": Case(
            "plain",
            image("tiny_nets:tiny_linear", "--batch", "100", "--epochs", "4",
                  "--snapshot-every", "1"),
            same_run, last_step,
        ),
        "text": Case(
            "text",
            lambda out: ["train", SMALL, "--data", text, "--updates", "10", "--batch", "300",
                         "--lr", "0.003", "--warmup", "5", "--average", "2", "--beam", "1",
                         "--snapshot-every", "2", *common, "--out", out],
            same_run, last_step,
        ),
        "prepared text": Case(
            "prepare",
            lambda out: ["prepare", raw, "--merges", "20", "--out", out],
            same_text, lambda folder: int(folder.is_dir()),
        ),
        "study": Case(
            "study",
            lambda out: ["study", study, "--resume", "--workers", "2", "--device", "cpu",
                         "--out", out],
            same_study, lambda folder: len(list(folder.glob("runs/*/snapshot*"))) * 0,
        ),
    }  # fmt: skip


STUDY = """
trials = 2
profile = false
[base]
model = "tiny_nets:tiny_linear"
data = "digits"
batch = 100
epochs = 2
snapshot_every = 2
[[grid]]
lr = [0.01, 0.05]
"""


def same_study(one: Path, other: Path) -> None:
    """The records of every run."""
    held = [
        {path.name: strip_times(read(path)) for path in sorted((folder / "runs").iterdir())}
        for folder in (one, other)
    ]
    assert held[0] == held[1] and len(held[0]) == 4


def wipe(folder: Path) -> None:
    """All of it, also beside what a killed process left."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def seconds_of(case: Case, folder: Path, log: Path) -> float:
    """An undisturbed run, to compare with, and how long it took."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    warm = context.Process(target=int)  # the time of a run is not that of the imports
    warm.start()
    warm.join()
    began = time.monotonic()
    assert finished(start(case.arguments(folder), log), log) == 0, log.read_text()
    return time.monotonic() - began
