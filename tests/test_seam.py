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
    "lab/runs/settings.py": "the report's learning rates and rewiring, tuned for its densities",
    "lab/runs/defaults.py": "the report's schedule of rewiring",
}
OURS = (
    "sparsity",
    "precision",
    "checkpointing",
    "microbatching",
    "fused_update",
    "chunked_loss",
    "optimizer_state",
    "gradient_release",
    "offload",
    "activation_bits",
    "activation_offload",
)


def _named(file: Path) -> set[str]:
    """Classes, attributes and folders of techniques that a file uses; not words in texts."""
    classes = {kind.__name__: name for name, kind in registered().items() if name in OURS}
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name) and node.id in classes:
            found.add(node.id)
        if isinstance(node, ast.Attribute) and node.attr in OURS:
            found.add(f".{node.attr}")
        if isinstance(node, ast.keyword) and node.arg in OURS:
            found.add(f"{node.arg}=")
        if isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            found |= {name for name in OURS if "techniques" in parts and name in parts}
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
    for name in OURS:
        for file in (SOURCE / "techniques" / name).rglob("*.py"):
            others = {other for other in OURS if other != name}
            assert not _named(file) & others, file
