"""The benchmarks of plans run in a small form, and see what they are there to see."""

from argparse import Namespace

import pytest

import plan_holds
import plan_speed


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
