"""Signals at any moment, clocks that jump, and several processes in one folder."""

import contextlib
import datetime
import os
import signal
import textwrap
import time
from random import Random

import pytest
from test_loop import ALL, run

import shoestring.lab.records.run as records_module
from chaos import (
    COUNTS,
    SEED,
    asked,
    cases,
    finished,
    own_seconds,
    seconds_of,
    start,
    until,
    wipe,
)
from shoestring.lab.runs.folder import run_folder
from tiers import slow_but

HUNG = """
    import time, torch
    from torch import nn

    class Hung(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(192, 10), 0

        def forward(self, x):
            self.calls += 1
            while self.calls > 3:
                {hang}
            return self.linear(nn.functional.avg_pool2d(x, 4).flatten(1))
"""
HANGS = {
    "in Python": "pass",
    "asleep": "time.sleep(3600)",
    "in C": "torch.ones(2000, 2000).matrix_power(999)",
}


@pytest.fixture
def hung(tmp_path, monkeypatch):
    """A module with a model whose fourth update never ends."""

    def make(how):
        (tmp_path / "hung_model.py").write_text(textwrap.dedent(HUNG).format(hang=HANGS[how]))
        monkeypatch.chdir(tmp_path)
        common = ("--data", "digits", "--device", "cpu", "--batch", "100", "--no-predict")
        return ["train", "hung_model:Hung", *common, "--snapshot-every", "1", "--out", "run"]

    return make


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("in C", signal.SIGINT),
        *(
            pytest.param(how, number, marks=pytest.mark.slow)
            for how in HANGS
            for number in (signal.SIGINT, signal.SIGTERM)
            if (how, number) != ("in C", signal.SIGINT)
        ),
    ],
)
def test_a_second_signal_ends_a_hung_update(hung, tmp_path, how, number):
    log = tmp_path / "log"
    process = start(hung(how), log)
    saved = "run/snapshot*-00000000[23]-*"
    assert until(lambda: len(list(tmp_path.glob(saved))) == 2, process), log.read_text()
    os.kill(process.pid, number)
    own_seconds(process, 0.5, log)
    assert process.is_alive()  # it waits for the update's end, to save it
    os.kill(process.pid, number)
    until(lambda: False, process)
    COUNTS["hung updates that a second signal ended"] += process.exitcode == 128 + number
    assert process.exitcode == 128 + number, log.read_text()
    assert "second signal" in log.read_text()
    with run_folder(tmp_path / "run", resume=True):  # nobody holds it any more
        pass


def signals(kind, count, tmp_path):
    """One signal at a random moment: it ends in good order, and goes on to the same end."""
    case = cases(tmp_path)[kind]
    log, whole, ended = tmp_path / "log", tmp_path / "whole", tmp_path / "ended"
    window, chance = seconds_of(case, whole, log), Random(f"signals {kind} {SEED}")
    done = 0
    while done < count:
        process = start(case.arguments(ended), log)
        own_seconds(process, chance.uniform(0.05, window), log)
        if process.exitcode is None:
            number = chance.choice((signal.SIGINT, signal.SIGTERM))
            with contextlib.suppress(ProcessLookupError):  # it may end between the two lines
                os.kill(process.pid, number)
            status = finished(process, log)
            assert status in (0, 128 + number, -number), (status, log.read_text()[-2000:])
            COUNTS["signals at random moments"] += 1
            done += 1
            if status != 0:
                continue
        assert finished(process, log) == 0
        case.compare(whole, ended)
        wipe(ended)
        window *= 0.9
    assert finished(start(case.arguments(ended), log), log) == 0
    case.compare(whole, ended)


def test_a_few_signals(tmp_path):
    signals("plain images", 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain images", "text"])
def test_many_signals(kind, tmp_path):
    signals(kind, asked("SIGNALS", 1), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain images", "text"])
def test_four_processes_in_one_folder(kind, tmp_path):
    """All begin at once: one writes, the others are refused or find it finished."""
    case = cases(tmp_path)[kind]
    seconds_of(case, tmp_path / "whole", tmp_path / "log")
    for number in range(asked("SHARED", 1)):
        logs = [tmp_path / f"log-{number}-{n}" for n in range(4)]
        out = tmp_path / f"shared-{number}"
        processes = [start(case.arguments(out), log) for log in logs]
        ends = [finished(p, log) for p, log in zip(processes, logs, strict=True)]
        COUNTS["processes that began in one folder at once"] += 4
        assert ends.count(0) >= 1 and set(ends) <= {0, 2}, ends
        for status, log in zip(ends, logs, strict=True):
            said = log.read_text()
            assert status == 0 or "another run is writing" in said or "holds a run" in said, said
        case.compare(tmp_path / "whole", out)


@pytest.mark.parametrize("years", slow_but(1, [-30, 30]))
def test_a_clock_that_jumps(tmp_path, monkeypatch, years):
    """While it runs, and between a stop and going on."""
    from chaos import same_run

    run(tmp_path / "whole", ALL)
    real, calls = time.time, [0]

    def jumping():
        calls[0] += 1
        return real() + (years * 31_557_600 if calls[0] % 2 else 0)

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(jumping(), tz)

    class Module:
        datetime, UTC = Clock, datetime.UTC

    monkeypatch.setattr(time, "time", jumping)
    monkeypatch.setattr(records_module, "datetime", Module)
    run(tmp_path / "jumped", ALL, stop_after=5)
    run(tmp_path / "jumped", ALL, resume=True)
    COUNTS["clock jumps"] += calls[0]
    assert calls[0]
    same_run(tmp_path / "whole", tmp_path / "jumped")
