"""The tutorials run as they stand, and the technique they write is as short as they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_tutorial_runs(script: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_every_tutorial_is_listed_and_starts_with_words() -> None:
    page = (ROOT / "docs" / "tutorials.md").read_text()
    assert len(SCRIPTS) == 4
    for script in SCRIPTS:
        assert f"(tutorials/{script.name})" in page
        assert script.read_text().startswith("# %% [markdown]\n# # ")


def test_a_technique_takes_sixty_lines() -> None:
    text = (ROOT / "docs" / "tutorials" / "4_technique.py").read_text()
    written = re.search(r"# %%\n(from dataclasses.*?)\n# %% \[markdown\]", text, re.DOTALL)
    assert written is not None
    assert len([line for line in written[1].splitlines() if line.strip()]) <= 60
