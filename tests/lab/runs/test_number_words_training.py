"""Number words from nothing: the command line, and where there is time the whole training."""

import json
import os
import subprocess
import sys

import pytest

LONG = pytest.mark.skipif(
    not os.environ.get("SHOESTRING_LONG"), reason="minutes; set SHOESTRING_LONG=1"
)
LEAN = ["--checkpoint", "residual-1", "--microbatch", "250"]


def shoestring(*arguments, text=None):
    chosen = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}  # one by itself
    done = subprocess.run(
        [sys.executable, "-m", "shoestring", *map(str, arguments)],
        input=text,
        capture_output=True,
        text=True,
        env=chosen,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def training(folder, *more, model="dc-transformer-tiny"):
    made = shoestring(
        "train", model, "--data", "number_words", "--device", "cpu",
        "--out", folder, "--json", *more,
    )  # fmt: skip
    return json.loads(made)


@pytest.mark.slow
def test_a_few_updates_and_a_translation(tmp_path):
    end = training(
        tmp_path / "run", "--updates", 3, "--batch", 500, "--split", "validation", *LEAN,
        model="dc-transformer-tiny-width-16",
    )  # fmt: skip
    assert (end["step"], end["translated"], end["averaged_epochs"]) == (3, 500, 0)
    lines = shoestring("translate", tmp_path / "run", "--device", "cpu", text="drei\n\nvier\n")
    assert len(lines.split("\n")) == 4 and lines.split("\n")[1] == ""


@LONG
@pytest.mark.slow
def test_unseen_numbers_are_right_plainly_and_in_an_eighth_of_the_memory(tmp_path):
    plain = training(tmp_path / "plain")
    lean = training(tmp_path / "lean", *LEAN)
    assert plain["exact_percent"] >= 95 and lean["exact_percent"] >= 95
    assert lean["measured_peak_bytes"] <= plain["measured_peak_bytes"] / 8
    words = shoestring(
        "translate", tmp_path / "lean", "--device", "cpu", text="dreihundertvierundzwanzig\n"
    )
    assert words == "three hundred twenty-four\n"
