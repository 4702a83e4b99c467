"""Help, completion and hints are quick: they know the flags without importing PyTorch."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoestring.cli import declared

SOURCE = Path(__file__).parents[2] / "src"


def test_the_source_has_the_flags_of_the_registry():
    assert declared.parsed() == declared.imported()
    assert sum(len(technique.options) for technique in declared.parsed()) >= 10


def test_a_flag_that_is_computed_is_not_guessed():
    kind = ast.parse("class Mine:\n    name: str = 'mine'\n    flags: tuple = (made(),)").body[0]
    assert isinstance(kind, ast.ClassDef)
    with pytest.raises(KeyError):
        declared._declared(kind)


def test_help_imports_no_pytorch():
    code = """
import sys, typer
from shoestring.cli.main import app
verbs = typer.main.get_command(app).commands
for verb in ([], *([name] for name in verbs)):
    app([*verb, "--help"], standalone_mode=False)
heavy = {"torch", "numpy", "transformers", "matplotlib"} & set(sys.modules)
print(len(verbs), sorted(heavy), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    number, _, heavy = done.stderr.strip().partition(" ")
    assert int(number) >= 10 and heavy == "[]"
    assert "--checkpoint" in done.stdout


@pytest.mark.parametrize(("words", "hint"), [(["prfile", "x"], ""), (["profile"], " profile")])
def test_the_hint_names_the_command_however_it_was_called(words, hint):
    done = subprocess.run(
        [sys.executable, "-m", "shoestring", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"hint: see shoestring{hint} --help"


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("shoestring pro", "profile"), ("shoestring plan --budget-", "--budget-of")],
)
def test_the_shell_completes_verbs_and_options(typed, completed):
    asked = {"_SHOESTRING_COMPLETE": "complete_bash", "COMP_WORDS": typed}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.argv = ['shoestring']; from shoestring.cli.main import main; main()",
        ],
        env={**os.environ, **asked, "COMP_CWORD": str(len(typed.split()) - 1)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [completed] and not done.stderr


def test_completion_is_set_up(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'shoestring'; from shoestring.cli.main "
         "import main; main()", "--install-completion", "bash"],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr
    assert "_SHOESTRING_COMPLETE" in next(tmp_path.rglob("shoestring.sh")).read_text()
