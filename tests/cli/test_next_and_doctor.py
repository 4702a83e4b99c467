"""The next command to try, `shoestring doctor`, and commands that are shown somewhere."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import typer
from calling import call

from shoestring.cli import doctor, next_command
from shoestring.cli.main import app
from shoestring.cli.options import show

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GROUP = typer.main.get_command(app)


def parse(command: str) -> None:
    """What the shell would give to the verb; an unknown flag or verb raises."""
    words = shlex.split(command, comments=True)
    assert words[0] == "shoestring", command
    with GROUP.make_context("shoestring", list(words[1:2]), resilient_parsing=True):
        verb = GROUP.commands[words[1]]
        try:
            verb.make_context(words[1], words[2:])
        except Exception as error:
            raise AssertionError(f"{command}: {error}") from error


def shown_in_help() -> list[str]:
    texts = [str(verb.epilog) for verb in (GROUP, *GROUP.commands.values())]
    return [c for text in texts for c in re.findall(r"`(?:echo \w+ \| )?(shoestring [^`]+)`", text)]


def shown_in_pages() -> list[str]:
    found = []
    for page in PAGES:
        for _, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S):
            joined = block.replace("\\\n", " ")
            found += re.findall(r"^(?:\$ )?(shoestring [a-z].*)$", joined, re.M)
    return sorted(set(found))


def test_there_are_some():
    assert len(shown_in_help()) > 20 and len(shown_in_pages()) > 20
    with pytest.raises(AssertionError, match="--frobnicate"):
        parse("shoestring profile wrn-28-2 --frobnicate")


@pytest.mark.parametrize("command", [*shown_in_help(), *shown_in_pages()])
def test_commands_that_are_shown_are_understood(command):
    parse(command)


@pytest.mark.parametrize("verb", sorted(GROUP.commands))
def test_every_verb_has_a_task_and_an_example(verb):
    assert GROUP.commands[verb].rich_help_panel
    assert f"shoestring {verb}" in str(GROUP.commands[verb].epilog)


def test_the_next_command_is_one():
    how = {"input": ["8x3x4x4", "8:int64"], "loss": "a b:loss", "batch": None}
    profile = next_command.after_profile("m:f", 404_810_296, "fundamental", **how)
    assert "--budget '202 MB' --accounting fundamental" in profile and "--batch" not in profile
    assert profile.count("--input") == 2 and "'a b:loss'" in profile
    parse(profile)
    plan = next_command.after_plan("wrn-10-1", "my plan.toml", input=None)
    assert plan == "shoestring verify wrn-10-1 --plan 'my plan.toml'"
    parse(plan)
    assert "-o plan.toml" in next_command.after_plan("wrn-10-1", None)
    assert next_command.after_plan("hf:x", "p.toml").startswith('ss.apply(ss.Plan.load("p.toml")')


@pytest.mark.parametrize("terminal", [True, False])
def test_it_is_said_to_a_person_only(terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    next_command.say("shoestring doctor")
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "next: shoestring doctor\n" * terminal


def test_a_result_has_colors_on_a_terminal_only(monkeypatch, capsys):
    show("plan: 3 MB\nverified")
    assert capsys.readouterr().out == "plan: 3 MB\nverified\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show("plan: 3 MB\nNOT verified\n")
    assert capsys.readouterr().out == "\033[1mplan: 3 MB\033[0m\n\033[31mNOT verified\033[0m\n"


@pytest.mark.parametrize("verb", ["profile", "plan"])
def test_another_picture_is_refused_before_any_work(verb):
    budget = ["--budget", "8 MB"] if verb == "plan" else []
    ran = call(verb, "wrn-10-1", *budget, "--svg", "memory.png")
    assert ran.status == 2 and "pictures are SVG files, memory.png is not" in ran.err


def test_pictures_are_written(tmp_path):
    ran = call("profile", "wrn-10-0.5", "--batch", "4", "--svg", str(tmp_path / "memory.svg"))
    assert ran.status == 0 and (tmp_path / "memory.svg").read_text().startswith("<svg ")


def test_doctor_finds_what_is_there_and_names_what_is_not(monkeypatch):
    monkeypatch.setitem(doctor._EXTRAS, "no_such_package", ("extra", "nothing"))
    found = {one.part: one for one in doctor.findings()}
    assert found["torch"].found == torch.__version__
    missing = found["no_such_package"]
    assert not missing.ok and missing.note == "nothing: pip install 'shoestring[extra]'"
    assert found["device"].found.startswith("cpu" if not torch.cuda.is_available() else "NVIDIA")


def test_doctor_names_extras_that_exist():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for package, (extra, _) in doctor._EXTRAS.items():
        name = doctor._NAMES.get(package, package)
        assert any(line.startswith(name) for line in extras[extra]), package
