"""The sample project of examples/memory_in_ci, passing and failing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shoestring as ss
from cli.calling import call
from pytest_shoestring import Peak

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "examples" / "memory_in_ci"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(SAMPLE, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.delitem(sys.modules, "models", raising=False)
    return tmp_path / "project"


def widen(project: Path) -> None:
    """The pull request that needs more memory."""
    file = project / "models.py"
    file.write_text(file.read_text().replace("512", "2048"))
    sys.modules.pop("models", None)


@pytest.mark.slow
def test_the_plugin_passes_and_fails(project: Path) -> None:
    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "pytest_shoestring"],
            env={
                **os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # installed, it comes by its entry point
            },
            cwd=project,
            capture_output=True,
            text=True,
        )  # fmt: skip

    done = run()
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
    widen(project)
    done = run()
    assert done.returncode == 1 and "<peak of" in done.stdout and "'80 MB'" in done.stdout


def test_the_command_line_passes_and_fails(project: Path) -> None:
    first = call("check", "memory.toml", "--update")
    assert first.status == 0 and "classifier: " in first.out, first.err
    assert json.loads(Path("memory.baseline.json").read_text())["classifier"] > 0
    again = call("check", "memory.toml")
    assert again.status == 0 and "baseline" in again.out
    widen(project)
    moved = call("check", "memory.toml")
    assert moved.status == 1 and "more than its budget of 80.0 MB" in moved.err
    assert "a larger budget in [classifier]" in moved.err  # --update does not raise it
    text = Path("memory.toml").read_text().replace('budget = "80 MB"', "")
    Path("memory.toml").write_text(text)
    moved = call("check", "memory.toml")
    assert moved.status == 1 and "more than the baseline" in moved.err and "hint: " in moved.err
    assert call("check", "memory.toml", "--update").status == 0
    assert call("check", "memory.toml").status == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no checks"),
        ("nonsense", "is not TOML"),
        ("[a]\nmodel = 'wrn-10-1'\nsize = 3", "no setting 'size'"),
        ("[a]\nbatch = 3", "names no model"),
        ("[a]\nmodel = 'wrn-10-1'\nplan = 'none.toml'", "cannot read the plan"),
    ],
)
def test_mistakes_are_one_line(project: Path, text: str, told: str) -> None:
    Path("memory.toml").write_text(text)
    done = call("check", "memory.toml")
    assert done.refused and told in done.err
    assert call("check", "no.toml").refused


def test_a_damaged_baseline_is_named(project: Path) -> None:
    Path("memory.baseline.json").write_text("[1]")
    done = call("check", "memory.toml")
    assert done.refused and "--update" in done.err


def test_a_peak_compares_with_text() -> None:
    peak = Peak(8 * 10**9)
    assert peak < "8.1 GB" and peak <= "8 GB" and peak == "8 GB" and peak > "7 GB" and peak >= 1
    assert peak != "9 GB" and not peak < 5
    with pytest.raises(ss.SizeError):
        assert peak < "8 gigs"


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("models:build", {"input": "8x3"}, "does not take input="),
        ("models:build", {}, "does not know the configuration models:build"),
        ("hf:somewhere", {"token": 64}, "does not take token="),
    ],
)
def test_wrong_arguments_of_a_peak_are_one_line(
    peak: Any, name: str, given: dict[str, Any], told: str
) -> None:
    with pytest.raises(ss.InputError, match=told):
        peak(name, **given)
