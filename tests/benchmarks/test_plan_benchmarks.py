"""The benchmarks of plans run in a small form, and see what they are there to see."""

import shlex
import sys
from argparse import Namespace
from pathlib import Path

import pytest

import on_gpu
import plan_holds
import plan_speed
from card_models import SUBJECTS
from shoestring.lab.study.spec import load


@pytest.mark.slow
def test_plans_hold_for_one_model_of_the_benchmark() -> None:
    arguments = Namespace(device="cpu", budgets=2, allow=None)
    case = plan_holds.built_in("wrn-10-1", 20)()
    rows = list(plan_holds.rows_of("wrn-10-1", case, arguments))
    assert [row["holds"] for row in rows] == [True, True]
    assert rows[0]["certified"] is True and rows[0]["kind"] == "lossless"
    assert rows[1]["budget_bytes"] < rows[0]["budget_bytes"]
    assert "yes" in plan_holds.line(rows[0])
    broken = {**rows[0], "holds": False}
    assert "NO" in plan_holds.line(broken)


@pytest.mark.slow
def test_a_plan_is_timed_beside_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    subject = plan_speed.gpt2(True, 8, False)
    arguments = Namespace(device="cpu", steps=1, allow="lossless")
    run = plan_speed.Run(subject, arguments)
    run.plain()
    run.ours(int(0.95 * run.rows[0]["peak_bytes"]))
    run.every_layer()
    plain, ours, every = run.rows
    assert ours["peak_bytes"] <= 0.95 * plain["peak_bytes"]
    assert every["peak_bytes"] < plain["peak_bytes"]
    assert ours["kind"] == "lossless" and all(row["step_seconds"] > 0 for row in run.rows)
    assert capsys.readouterr().out.count("ms") == 3


def test_all_that_waits_for_a_gpu_is_there() -> None:
    trained = set()
    for job in on_gpu.JOBS:
        for script, *arguments in map(shlex.split, job.commands):
            assert script == "-m" or (on_gpu.HERE / script).is_file()
            if "study" in arguments:
                load(on_gpu.HERE.parent / arguments[arguments.index("study") + 1])
            if script == "card.py":
                trained.add(arguments[0])
    assert trained == set(SUBJECTS)


def test_jobs_run_at_once_and_end_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = (
        on_gpu.Job("quick", ("-m this", "-m this")), on_gpu.Job("long", ("-m this",), False, 60),
        on_gpu.Job("training", ("-m this",), hours=True),
    )  # fmt: skip
    monkeypatch.setattr(on_gpu, "JOBS", jobs)
    monkeypatch.setattr(sys, "argv", ["on_gpu", "--out", str(tmp_path), "--seconds", "3"])
    on_gpu.main()
    printed = capsys.readouterr().out
    assert "quick: ended with 0" in printed and "long: stopped" in printed
    assert "training" not in printed
    assert (tmp_path / "quick.log").read_text().count("Namespaces are one honking") == 2
