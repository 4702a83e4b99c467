"""The examples run as they stand, and stay within the budget they name."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tiers import slow_but

ROOT = Path(__file__).parents[1]


EXAMPLES = {
    "plain_loop": "torch",
    "huggingface_finetune": "transformers",
    "trainer": "accelerate",
    "trainer --lora": "peft",
    "sft": "trl",
    "lightning_callback": "lightning",
    "accelerate_loop": "accelerate",
}
"""By what they need."""


@pytest.mark.parametrize("name", slow_but(1, list(EXAMPLES)))
def test_example_stays_within_its_budget(name: str) -> None:
    if find_spec(EXAMPLES[name]) is None:
        pytest.skip(f"needs {EXAMPLES[name]}")
    script, *flags = name.split()
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{script}.py", *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    measured, budget = re.findall(r"measured ([\d.]+) MB of ([\d.]+) MB", done.stdout)[0]
    assert 0.5 * float(budget) < float(measured) <= float(budget)
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0]
