"""A class has a name of its own: who reads one need not ask which."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import shoestring

SOURCE = Path(shoestring.__file__).parent


def test_no_class_is_defined_twice_under_one_name():
    """Names that begin with an underscore are a file's own."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(file.relative_to(SOURCE)))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
