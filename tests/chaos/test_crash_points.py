"""The process ends before, inside or after each file operation: nothing is lost or half-written."""

import errno
import os
import shutil
import sys
import time
import traceback
from random import Random

import pytest
from faulty_os import ENDED, Faulty
from test_loop import ALL, run

from chaos import COUNTS, SEED, asked, ended_in_time, same_run, same_text
from shoestring import Plan
from shoestring.errors import ShoestringError
from shoestring.lab.runs.loop import train
from shoestring.lab.runs.text_settings import text_settings_for
from shoestring.lab.study.report import report
from shoestring.lab.tasks.prepared import save as save_prepared
from tiny_texts import SMALL, small_text


def images(folder):
    """Sparse, rewired, FP16, recomputed; two snapshots and two evaluations."""
    run(folder, ALL, resume=True, every=5, batch=16)


def text(folder):
    """With vocabularies, weights to average, and translations."""
    import torch

    given = {"updates": 6, "batch": 300, "learning_rate": 3e-3, "warmup": 2, "average": 2}
    train(
        text_settings_for(SMALL, "number_words", small_text(), plan=Plan(), beam=1, **given),
        small_text(), folder, device=torch.device("cpu"), resume=True, snapshot_every=3,
        predict=False,
    )  # fmt: skip


def prepared(folder):
    """A text through BPE; what a killed one left does not matter."""
    if not folder.exists():
        save_prepared(small_text(), folder)


WORK = {"images": (images, same_run), "text": (text, same_run), "prepare": (prepared, same_text)}


def in_fork(work, faulty):
    """The exit status of a process that does the work on a faulty system."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with open(os.devnull, "w") as quiet, faulty:
                sys.stderr = sys.stdout = quiet
                work()
            status = 0
        except ShoestringError:
            status = 2
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    status = []

    def ended(seconds):
        until = time.monotonic() + seconds
        while not status and time.monotonic() < until:
            gone, how = os.waitpid(child, os.WNOHANG)
            status.extend([os.waitstatus_to_exitcode(how)] if gone else [])
            time.sleep(0.005)
        return bool(status)

    if ended_in_time(child, ended):
        return status[0]
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise AssertionError("a hang")


def points_of(work, folder):
    """Every operation of a whole run, with each moment at which it can be cut short."""
    counting = Faulty()
    with counting:
        work(folder)
    moments = {"write": ("before", "inside", "after")}
    return [
        (at, when)
        for at, kind in enumerate(counting.kinds, start=1)
        for when in moments.get(kind, ("before", "after"))
    ]


def crash(kind, tmp_path, most):
    """At so many points; then on to the end, and compared."""
    work, compare = WORK[kind]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    points = points_of(work, whole)
    points = Random(f"{kind} {SEED}").sample(points, min(most, len(points)))
    for at, when in points:
        shutil.rmtree(broken, ignore_errors=True)
        status = in_fork(lambda: work(broken), Faulty(at, when))
        if status == 0:  # a process does not open everything that the first run here did
            continue
        assert status == ENDED, (at, when, status)
        COUNTS["crash points"] += 1
        COUNTS[f"crash points: {kind}"] += 1
        work(broken)
        compare(whole, broken)


def full(kind, number, tmp_path, most):
    """From some operation on none succeeds (a full or read-only disk); then there is room again."""
    work, compare = WORK[kind]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    count = max(at for at, _ in points_of(work, whole))
    places = range(1, count + 1)
    chosen = (
        places
        if most is None
        else Random(f"{kind} {number} {SEED}").sample(places, min(most, count))
    )
    for at in chosen:
        shutil.rmtree(broken, ignore_errors=True)
        status = in_fork(lambda: work(broken), Faulty(at, error=number))
        assert status in (0, 2), (at, status)  # 2: in one line; 0: what failed was not needed
        COUNTS["full and read-only disks"] += 1
        work(broken)
        compare(whole, broken)


def test_a_few_crash_points(tmp_path):
    crash("prepare", tmp_path, most=4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WORK)
def test_every_crash_point(kind, tmp_path):
    crash(kind, tmp_path, most=asked("POINTS", 6))


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("kind", WORK)
def test_every_disk(kind, number, tmp_path):
    full(kind, number, tmp_path, most=asked("DISKS", 1))


@pytest.mark.slow
def test_files_are_old_or_new(tmp_path):
    """Plans, pages and tables: whatever the moment, each file is one of the two."""
    run(tmp_path / "runs" / "one", epochs=1)
    path = tmp_path / "plan.toml"

    def write(plan):
        plan.save(path)
        report(tmp_path / "runs", tmp_path / "report")

    write(Plan())
    old = {p.name: p.read_bytes() for p in [path, *(tmp_path / "report").iterdir()]}
    run(tmp_path / "runs" / "two", epochs=1, seed=1)
    shutil.copytree(tmp_path, tmp_path.parent / "before")
    points = points_of(lambda _: write(ALL), tmp_path)
    new = {p.name: p.read_bytes() for p in [path, *(tmp_path / "report").iterdir()]}
    assert old["plan.toml"] != new["plan.toml"] and old["tables.md"] != new["tables.md"]
    for at, when in Random(SEED).sample(points, min(asked("POINTS", 3), 30, len(points))):
        shutil.rmtree(tmp_path)
        shutil.copytree(tmp_path.parent / "before", tmp_path)
        if in_fork(lambda: write(ALL), Faulty(at, when)) != ENDED:
            continue
        COUNTS["crash points"] += 1
        COUNTS["crash points: plan and report"] += 1
        for name in old:
            file = path if name == "plan.toml" else tmp_path / "report" / name
            assert file.read_bytes() in (old[name], new[name]), name
