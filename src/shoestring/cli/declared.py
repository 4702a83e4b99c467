"""Names and flags of the techniques, read from their source: `--help` does not import PyTorch.

Importing a technique takes PyTorch, a second or more. The flags stand in its class as literals, so
they are parsed like data. Techniques of other packages are imported.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

GROUP = "shoestring.techniques"
FOLDER = Path(__file__).parents[1] / "techniques"
_KINDS = {kind.__name__: kind for kind in (bool, int, float, str)}


@dataclass(frozen=True)
class DeclaredFlag:
    """A flag of a technique, as the command line shows it."""

    name: str
    kind: type
    help: str


@dataclass(frozen=True)
class Declared:
    """One technique: the name by which `--allow` knows it, and its flags."""

    allow: str
    options: tuple[DeclaredFlag, ...]


@cache
def techniques() -> tuple[Declared, ...]:
    """All of them, in the order they are applied."""
    if "torch" in sys.modules or entry_points(group=GROUP):
        return imported()
    try:
        return parsed()
    except (OSError, ValueError, KeyError, TypeError):  # no source, or flags that are computed
        return imported()


def imported() -> tuple[Declared, ...]:
    """As the registry has them."""
    from ..techniques.registry import registered

    return tuple(
        Declared(
            kind.allow or name, tuple(DeclaredFlag(f.name, f.kind, f.help) for f in kind.flags)
        )
        for name, kind in registered().items()
    )  # fmt: skip


def parsed() -> tuple[Declared, ...]:
    """As their source has them: the class of each folder that is decorated with `register`."""
    found = []
    for path in FOLDER.glob("*/__init__.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and "register" in map(_name, node.decorator_list):
                found.append(_declared(node))
    return tuple(declared for _, _, declared in sorted(found, key=lambda one: one[:2]))


def _declared(kind: ast.ClassDef) -> tuple[int, str, Declared]:
    values = {
        line.target.id: line.value
        for line in kind.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }

    def value(of: str, default: Any) -> Any:
        node = values.get(of)
        return default if node is None else ast.literal_eval(node)

    name, flags = value("name", None), values.get("flags")
    calls = flags.elts if isinstance(flags, ast.Tuple) else []
    allow = value("allow", None) or name
    return value("order", 50), name, Declared(allow, tuple(_option(call) for call in calls))


def _option(call: ast.expr) -> DeclaredFlag:
    if not isinstance(call, ast.Call):
        raise ValueError("a flag that is not written out")
    given = dict(zip(("name", "setting", "kind", "help"), call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    kind = _KINDS[_name(given["kind"])]
    return DeclaredFlag(ast.literal_eval(given["name"]), kind, ast.literal_eval(given["help"]))


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""
