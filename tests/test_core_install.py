"""With the core dependencies alone a user's model is profiled, planned, trained and verified."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORT_NAMES = {"scikit-learn": "sklearn", "subword-nmt": "subword_nmt", "import-linter": "grimp"}
NAME = re.compile(r"[A-Za-z0-9_-]+")

MODEL = """
import torch
import torch.nn.functional as F


def build():
    return torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(),
        torch.nn.Linear(64, 4),
    )


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)
"""

LIBRARY = """
import torch, shoestring as ss
from users_model import build, loss

model = build()
batch = torch.randn(512, 16), torch.randint(4, (512,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
given = dict(loss=loss, optimizer=optimizer)
budget = ss.profile(model, batch, **given, accounting="device").peak_bytes // 2
plan = ss.plan(model, batch, **given, budget=budget)
assert ss.verify(plan, model, [batch], **given).ok
step = ss.apply(plan, model, optimizer, loss=loss)
step(batch)
assert step.measure(batch).peak_bytes <= budget
"""

COMMAND_LINE = """
import sys
from shoestring.cli.main import main


def call(*arguments):
    sys.argv = ["shoestring", *arguments]
    try:
        main()
    except SystemExit as end:
        return end.code


shapes = "--input 512x16 --input 512:int64 --loss users_model:loss"
model = ("users_model:build", *shapes.split())
assert call("profile", *model) == 0
assert call("plan", *model, "--budget", "250 KB", "-o", "plan.toml") == 0
assert call("verify", *model, "--plan", "plan.toml") == 0
assert call("train", "wrn-10-0.5", "--data", "digits", "--epochs", "1", "--out", "run") == 2
"""


def optional_packages() -> list[str]:
    """Import names of all that extras bring and the core does not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core = {NAME.match(line)[0] for line in project["dependencies"]}  # type: ignore[index]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    names = {NAME.match(line)[0] for line in extras} - core - {"shoestring"}  # type: ignore[index]
    return sorted(IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names)


def run_in_core_install(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code where no optional package can be imported."""
    (folder / "users_model.py").write_text(MODEL, encoding="utf-8")
    hidden = f"import sys\nsys.modules.update(dict.fromkeys({optional_packages()!r}))\n"
    paths = os.pathsep.join([str(ROOT / "src"), str(folder)])
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", hidden + code],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_extras_are_found():
    some = {"matplotlib", "sacrebleu", "scipy", "sklearn", "subword_nmt", "transformers"}
    assert some <= set(optional_packages())


def test_a_users_model_needs_no_extra_and_a_missing_one_is_named(tmp_path):
    ran = run_in_core_install(LIBRARY + COMMAND_LINE, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.splitlines()[-2:] == [
        "InputError: the data set digits needs scikit-learn, which is not installed",
        "hint: pip install 'shoestring[lab]'",
    ]
