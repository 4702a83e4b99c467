"""`shoestring plan`: what it prints where, its exit status, and one line for every mistake."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import shoestring as ss
from shoestring.cli.main import main

MODEL = ("wrn-10-0.5", "--batch", "16")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the command line in this process: status, stdout, stderr without progress."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shoestring", "plan", *arguments])
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main() replaces it
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        lines = [line for line in captured.err.splitlines() if not line.startswith("planning ")]
        return int(left.value.code or 0), captured.out, "\n".join(lines)

    return call


def test_a_plan_as_json_and_as_a_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    status, out, err = run(*MODEL, "--budget", "7.6 MB", "--json", "-o", str(file))
    assert (status, err) == (0, "")
    made = json.loads(out)
    assert made["budget_bytes"] == 7_600_000
    assert made["predicted"]["peak_bytes"] <= 7_600_000 * (1 - made["margin"])
    assert made["predicted"]["peak_bytes"] < made["plain"]["peak_bytes"]
    assert made["kind"] == "lossless" and {c["kind"] for c in made["choices"]} == {"lossless"}
    assert ss.Plan.load(file).to_dict() == made["plan"]
    assert file.read_text().startswith("# lossless, for 7.6 MB: predicted ")


def test_a_plan_for_people(run: Run) -> None:
    status, out, _ = run(*MODEL, "--budget", "7.6 MB")
    assert status == 0
    assert "lossless, for 7.6 MB: predicted" in out and "  checkpointing  " in out


def test_the_front_is_printed_and_plotted(run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "front.svg"
    arguments = (*MODEL, "--accounting", "fundamental", "--allow", "lossless", "--budget", "1 GB")
    status, out, _ = run(*arguments, "--front", "--plot", str(picture))
    assert status == 0
    lines = out.splitlines()
    assert lines[0].split()[:2] == ["peak", "step"] and "lossless" in lines[1]
    assert picture.read_text().startswith("<?xml")
    status, out, _ = run(*arguments, "--front", "--plot", str(picture), "--json")
    front = json.loads(out)["front"]
    assert len(front) > 2 and all(point["exact"] for point in front)
    assert front == sorted(front, key=lambda point: point["peak_bytes"])


@pytest.mark.slow
def test_too_small_a_budget(run: Run) -> None:
    status, out, err = run(*MODEL, "--budget", "10 KB")
    assert (status, out) == (1, "")
    error, hint = err.splitlines()
    assert error.startswith("BudgetError: no plan fits 10.0 KB; the smallest found is ")
    assert "allow 'activation_bits,bn-microbatch,sparsity' (about " in hint
    size = error.partition("smallest found is ")[2].partition(" (")[0]
    assert run(*MODEL, "--budget", size)[0] == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--budget", "6M"), "SizeError: cannot read '6M'"),
        (
            ("--budget", "6 MB", "--allow", "luck"),
            "InputError: unknown `allow` option 'luck'",
        ),
        (("--budget", "6 MB", "--device", "tpu"), "InputError: unknown device 'tpu'"),
        (("--budget", "6 MB", "--optimizer", "none"), "InputError: a plan is for training"),
        (("--budget", "6 MB", "-o", "/no/p.toml"), "InputError: cannot write the plan /no/p.toml"),
        (("--budget", "6 MB", "-o", "/tmp"), "InputError: cannot write the plan /tmp: it is a"),
        ((), "InputError: Missing option '--budget'"),
    ],
)
def test_a_wrong_call_is_one_line_and_a_hint(
    run: Run, arguments: tuple[str, ...], message: str
) -> None:
    status, out, err = run(*MODEL, *arguments)
    assert (status, out) == (2, "")
    error, hint = err.splitlines()
    assert error.startswith(message) and hint.startswith("hint: ")
