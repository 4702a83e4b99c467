"""A study that takes seconds, and how tests run it."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

from shoestring.lab.records.run import FILE, read, strip_times
from shoestring.lab.study.command import run_study
from shoestring.lab.study.execute import Place
from shoestring.lab.study.local import PRELOADED
from shoestring.lab.study.results import Results, Row
from shoestring.lab.study.spec import from_values
from shoestring.lab.study.statistics import Sample

TINY = """
title = "A tiny <study>"
source = "made up"
trials = 2
baseline = {precision = "fp32", lr = 0.05}

[base]
model = "tiny_nets:tiny_linear"
data = "digits"
batch = 200
epochs = 2
snapshot_every = 3

[[search]]
per = ["precision"]
only = {precision = "bf16"}
over = {lr = [0.02, 0.1]}
seeds = [7]
using = {epochs = 1}

[[grid]]
precision = "fp32"
lr = 0.05
labels = {family = "wide"}

[[grid]]
precision = "bf16"
simulated = true
microbatch = 50
stands_for = {simulated = false}
labels = {family = "narrow"}

[[grid]]
precision = "fp32"
lr = 1e30
labels = {family = "wide"}

[[target]]
where = {precision = "bf16"}
score = 90.0
interval = 0.5
counted_bytes = 1_000_000
lr = 0.1

[[figure]]
name = "front"
kind = "front"
series = "family"
log_x = true

[[figure]]
name = "pies"
kind = "pie"
"""
JOBS = 2 + 3 * 2 + 2 + 1
"""Candidates, trials, profiles (two rows share one) and a measurement."""
FAILED = 2
ONE = """
[base]
model = "tiny_nets:tiny_linear"
data = "digits"
batch = 200
epochs = 1
"""


def made_up(
    rows: list[tuple[dict[str, Any], dict[str, float]]], figure: dict[str, Any], **more: Any
) -> Results:
    """What a study with this figure would have found: labels and quantities of each row."""
    grid = {"model": "m", "data": "digits", "labels": rows[0][0]}
    given = {"grid": [grid], "figure": [{"name": "figure", **figure}], **more}
    empty = Sample(0, None, None)
    made = tuple(Row(settings, {}, (), None, None, empty, found) for settings, found in rows)
    return Results(from_values(given, "", "made up"), made, (), {}, 0)


def context() -> Any:
    """Processes start from one that has imported everything."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOADED)
    return made


def study_process(file: Path, out: Path, log: Path, workers: int = 1) -> None:
    """The study as a process of its own runs it, with a log of what it says."""
    handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(handle, 2)
    run_study(file, out, resume=True, workers=workers, place=Place(device="cpu"))


def records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Run → what must be equal whenever it is made again."""
    files = sorted(folder.glob(f"runs/*/{FILE}"))
    return {path.parent.name: strip_times(read(path)) for path in files}


def ended(folder: Path) -> int:
    """Runs that have come to their end."""
    return sum(bool(e) and e[-1]["event"] == "end" for e in records(folder).values())
