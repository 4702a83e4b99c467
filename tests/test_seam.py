"""Nothing outside a technique's folder names it, but for what stands here with its reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from shoestring.techniques import Technique, registered

SOURCE = Path(__file__).parents[1] / "src" / "shoestring"
EXCEPTIONS = {
    "__init__.py": "the public names",
    "lab/demo.py": "a demonstration of these four",
    "lab/runs/command.py": "records of earlier versions, which allowed by another name",
    "lab/runs/settings.py": "the report's learning rates and rewiring, tuned for its densities",
    "lab/runs/defaults.py": "the report's schedule of rewiring",
    "planning/planner.py": "a way out, in a warning",
    "step/graph.py": "a way out, in an error",
}
OURS = tuple(n for n, k in registered().items() if k.__module__.startswith("shoestring."))


def _named(file: Path) -> set[str]:
    """Classes, attributes, folders and flags of techniques that a file uses, in texts too."""
    kinds = {name: kind for name, kind in registered().items() if name in OURS}
    classes = {kind.__name__: name for name, kind in kinds.items()}
    strings = {flag.name for kind in kinds.values() for flag in kind.flags} | kinds.keys()
    strings -= {"optimizer_state"}  # a role of bytes, too
    found: set[str] = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = set() if id(node) in docstrings else set(re.findall(r"\w+", node.value))
            found |= words & classes.keys() | ({node.value} & strings)
        if isinstance(node, ast.Name) and node.id in classes:
            found.add(node.id)
        if isinstance(node, ast.Attribute) and node.attr in OURS:
            found.add(f".{node.attr}")
        if isinstance(node, ast.keyword) and node.arg in OURS:
            found.add(f"{node.arg}=")
        if isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            inside = "techniques" in parts or "techniques" in file.parts
            found |= {name for name in OURS if inside and name in parts}
            found |= {alias.name for alias in node.names if alias.name in classes}
    return found


def test_techniques_are_named_in_their_folders_alone() -> None:
    found = {}
    for file in sorted(SOURCE.rglob("*.py")):
        path = file.relative_to(SOURCE).as_posix()
        if not path.startswith("techniques/") and (names := _named(file)):
            found[path] = names
    assert found.keys() == EXCEPTIONS.keys(), found


def test_its_page_names_all_of_the_contract() -> None:
    page = (SOURCE.parents[1] / "docs" / "adding-a-technique.md").read_text(encoding="utf-8")
    said = {word.split("(")[0] for word in re.findall(r"`([^`]+)`", page)}
    names = {n for n in (*vars(Technique), *Technique.__annotations__) if not n.startswith("_")}
    assert names - said == set()


def test_no_technique_knows_another() -> None:
    kinds = {name: kind.__name__ for name, kind in registered().items()}
    for name in OURS:
        others = {word for n in OURS if n != name for word in (n, f".{n}", f"{n}=", kinds[n])}
        for file in (SOURCE / "techniques" / name).rglob("*.py"):
            assert not _named(file) & others, file
