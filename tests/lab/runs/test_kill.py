"""Killed at random moments and resumed, twenty times: not a bit of the result may differ."""

import contextlib
import gc
import json
import multiprocessing
import os
import random
import sys
import time
from dataclasses import replace

import pytest
import torch
from test_loop import ALL, assert_same, final

from shoestring import Microbatching
from shoestring.lab.records.run import read, strip_times
from shoestring.lab.runs import snapshot

KILLS = 20
PRELOADED = ["torch._dynamo", "sklearn.datasets", "shoestring.lab.runs.command", "shoestring.cli.main"]


def command(out, plan, log):
    """`shoestring train …` as a process of its own runs it."""
    gc.freeze()
    torch.set_num_threads(1)
    sys.argv = [
        *("shoestring", "train", "tiny_nets:tiny_residual", "--data", "digits"),
        *("--plan", plan, "--batch", "40", "--epochs", "2", "--lr", "0.05", "--device", "cpu"),
        *("--snapshot-every", "3", "--no-predict", "--out", out, "--resume"),
    ]
    from shoestring.cli.main import main

    with open(log, "a") as file, contextlib.redirect_stderr(file), contextlib.redirect_stdout(file):
        main()


@pytest.fixture(scope="module")
def started():
    """Starts processes from one that has imported everything: a start takes milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    warm = context.Process(target=int)  # so that the time of a run is not that of the imports
    warm.start()
    warm.join()

    def start(*arguments):
        process = context.Process(target=command, args=[str(a) for a in arguments])
        process.start()
        return process

    return start


@pytest.mark.slow
def test_twenty_kills_change_nothing(tmp_path, started):
    """Sparse, rewired, FP16, recomputed microbatches; kills fall on saves and on records too."""
    plan = tmp_path / "plan.toml"
    ALL.but(Microbatching(20)).save(plan)
    log = tmp_path / "log"
    whole = started(tmp_path / "whole", plan, log)
    began = time.monotonic()
    whole.join()
    seconds = time.monotonic() - began
    assert whole.exitcode == 0, log.read_text()

    chance, window = random.Random(7), seconds / 3
    kills, left = 0, set()
    while kills < KILLS or len(left) < 5:
        process = started(tmp_path / "killed", plan, log)
        process.join(chance.uniform(0, window))
        if process.exitcode is None:
            process.kill()
            process.join()
            kills += 1
            newest = [path.name for path in snapshot.found(tmp_path / "killed")[-1:]]
            if str(newest) in left:  # killed before it got on: others may get further
                window *= 1.1
            left.add(str(newest))
        else:  # it got to the end before its time: from the start again
            assert process.exitcode == 0, log.read_text()
            for path in (tmp_path / "killed").iterdir():
                path.unlink()
    last = started(tmp_path / "killed", plan, log)
    last.join()
    assert last.exitcode == 0, log.read_text()

    assert_same(final(tmp_path / "whole"), final(tmp_path / "killed"))
    records = [strip_times(read(tmp_path / name)) for name in ("whole", "killed")]
    assert json.dumps(records[0]) == json.dumps(records[1])
    assert final(tmp_path / "whole")["step"]["techniques"]["sparsity"]["rewirings"] >= 5
    names = sorted(os.listdir(tmp_path / "killed"))
    assert [n.partition("-")[0] for n in names] == ["records.jsonl", *["snapshot"] * 2]
