"""The API reference has every public name, and functions say Args, Returns and Examples."""

import ast
import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import shoestring as ss

ROOT = Path(__file__).parents[1]
NAMES = re.findall(r"^::: shoestring\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
FUNCTIONS = [n for n in ss.__all__ if inspect.isfunction(getattr(ss, n))]


def test_it_has_the_public_names_once_each():
    assert sorted(NAMES) == sorted(set(ss.__all__) - {"__version__"})


def test_there_are_functions():
    assert {"profile", "measure", "plan", "apply", "fit", "verify"} <= set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_explains_its_arguments_and_shows_an_example(name):
    function = getattr(ss, name)
    text = inspect.getdoc(function) or ""
    sections = dict(
        re.findall(r"^(Args|Returns|Raises|Examples):\n((?:    .*\n?|\n)+)", text, re.M)
    )
    assert {"Args", "Returns", "Examples"} <= set(sections)
    explained = re.findall(r"^    (\w+):", sections["Args"], re.M)
    assert explained == list(inspect.signature(function).parameters)
    assert "ss." in sections["Examples"]


@pytest.mark.parametrize("name", [n for n in ss.__all__ if inspect.isclass(getattr(ss, n))])
def test_a_class_and_its_methods_say_what_they_are(name):
    kind = getattr(ss, name)
    assert kind.__doc__ and not kind.__doc__.startswith(f"{name}(")
    for method, made in vars(kind).items():
        if inspect.isfunction(made) and not method.startswith("_"):
            assert made.__doc__, f"{name}.{method}"


def test_every_page_is_in_the_navigation():
    """`make docs` finds the same, with mkdocs; this needs nothing."""
    listed = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = [p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")]
    kinds = (ROOT / "src" / "shoestring" / "techniques").glob("*/README.md")
    pages += [f"techniques/{path.parent.name}.md" for path in kinds]
    for page in pages:
        assert re.search(rf"[ :] ?{re.escape(page)}$", listed, re.M), page


def test_what_builds_the_site_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = (ROOT / "constraints.txt").read_text()
    for line in project["optional-dependencies"]["docs"]:
        assert re.search(rf"^{line.partition('[')[0]}==", pins, re.M), line


def test_names_are_imported_when_used_from_where_type_checkers_see_them():
    tree = ast.parse((ROOT / "src" / "shoestring" / "__init__.py").read_text())
    seen = {
        (node.module, alias.name)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {(module, name) for name, module in ss._MODULES.items()}
    assert {name for _, name in seen} < set(ss.__all__) <= set(dir(ss))
    with pytest.raises(AttributeError, match="no attribute 'plon'"):
        _ = ss.plon


def test_importing_it_imports_nothing_else():
    """`import shoestring` is to add at most 0.3 s to `import torch`: it imports no stage at all."""
    code = (
        "import sys, shoestring; print([m for m in sys.modules if m.startswith(('shoe', 'torch'))])"
    )
    paths = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=paths, capture_output=True, text=True, check=True
    )
    assert set(ast.literal_eval(done.stdout)) == {
        "shoestring",
        "shoestring.errors",
        "shoestring.version",
    }


def test_the_version_is_the_same_everywhere():
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    released = re.search(r"^## (\d\S*) \(", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert cited is not None and released is not None
    assert cited[1] == released[1] == ss.__version__
