"""The flow that docs/flow.md draws is the one that is checked, and every file it names is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOW = (ROOT / "docs" / "flow.md").read_text(encoding="utf-8")


def test_the_drawing_has_the_layers_that_are_checked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = project["tool"]["importlinter"]["contracts"][0]
    *stages, shared, least = contract["layers"]
    drawing = FLOW.split("```")[1]
    drawn = re.findall(r"^ {8}(\w+) +[▼│] ", drawing, re.MULTILINE)
    assert drawn == [stage.strip("()") for stage in reversed(stages)]
    at_the_bottom = re.search(r"for all: (.*)", drawing)
    assert at_the_bottom is not None
    assert set(at_the_bottom[1].split(" · ")) == set(f"{shared} | {least}".split(" | "))


def test_every_file_it_names_is_there():
    named = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", FLOW)
    assert len(named) > 50
    for name in named:
        places = [ROOT / "src" / "shoestring", ROOT / "src" / "shoestring" / "techniques"]
        assert any((place / name).exists() for place in places), name
