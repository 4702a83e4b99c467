"""Plan: which techniques, with which settings. Frozen; reads and writes TOML and JSON."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .. import files
from ..errors import InputError
from . import Checkpointing, Microbatching, Precision, Sparsity, Technique

_KINDS: dict[str, type[Any]] = {
    "sparsity": Sparsity,
    "precision": Precision,
    "checkpointing": Checkpointing,
    "microbatching": Microbatching,
}
"""In the order they are applied: what a tensor is, its type, when it is made again, how many."""
MOST_BYTES = 10**7
"""Of a plan's file."""


@dataclass(frozen=True)
class Plan:
    """The settings of each technique; None leaves it out."""

    sparsity: Sparsity | None = None
    precision: Precision | None = None
    checkpointing: Checkpointing | None = None
    microbatching: Microbatching | None = None

    @classmethod
    def of(cls, techniques: Iterable[Technique]) -> Plan:
        """The plan of these techniques, at most one of a kind."""
        if isinstance(techniques, tuple(_KINDS.values())):
            raise InputError(f"{techniques!r} is one technique, not several", hint="give a list")
        found: dict[str, Any] = {}
        for technique in techniques:
            name = next((n for n, kind in _KINDS.items() if isinstance(technique, kind)), None)
            if name is None:
                raise InputError(
                    f"{technique!r} is no technique", hint="one of " + ", ".join(_KINDS)
                )
            if name in found:
                raise InputError(f"{name} is given twice", hint="keep one of them")
            found[name] = technique
        return cls(**found)

    @property
    def techniques(self) -> tuple[Technique, ...]:
        """Those that are there, in the order they are applied."""
        return tuple(t for name in _KINDS if (t := getattr(self, name)) is not None)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain values: technique → setting → value, defaults left out."""
        out: dict[str, dict[str, Any]] = {}
        for name in _KINDS:
            technique = getattr(self, name)
            if technique is None:
                continue
            out[name] = {
                f.name: _plain(name, f.name, getattr(technique, f.name))
                for f in fields(technique)
                if getattr(technique, f.name) != f.default
            }
        return out

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Plan:
        """Read what `to_dict` wrote; anything else is an error that names it."""
        found: dict[str, Any] = {}
        for name, settings in given.items():
            kind = _KINDS.get(name)
            if kind is None or not isinstance(settings, Mapping):
                raise InputError(
                    f"a plan has no part {name!r}", hint="its parts are " + ", ".join(_KINDS)
                )
            known = {f.name for f in fields(kind)}
            unknown = sorted(set(settings) - known)
            if unknown:
                raise InputError(
                    f"{name} has no setting {unknown[0]!r}",
                    hint="one of " + ", ".join(sorted(known)),
                )
            values = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
            try:
                found[name] = kind(**values)
            except TypeError as error:
                raise InputError(f"{name}: {error}", hint="see the technique's README") from None
        return cls(**found)

    def changed(self, changes: Mapping[str, Any]) -> Plan:
        """The plan with some settings replaced, each named "technique.setting"."""
        given = self.to_dict()
        for name, value in changes.items():
            technique, _, setting = name.partition(".")
            given.setdefault(technique, {})[setting] = value
        return self.from_dict(given) if changes else self

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(self.to_dict(), indent=2)

    def to_toml(self) -> str:
        """One table per technique, for a person to edit."""
        parts = []
        for name, settings in self.to_dict().items():
            lines = [f"{key} = {_toml(value)}" for key, value in settings.items()]
            parts.append("\n".join([f"[{name}]", *lines]))
        return ("\n\n".join(parts) or "# plain training: no technique") + "\n"

    def save(self, path: str | Path) -> None:
        """Write TOML, or JSON where the name ends in .json."""
        text = self.to_json() if Path(path).suffix == ".json" else self.to_toml()
        try:
            files.write(path, text.encode())
        except OSError as error:
            raise InputError(f"cannot write the plan {path}: {error.strerror}") from None

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` or a person wrote."""
        try:
            text = files.read(path, MOST_BYTES, plain=False).decode()
            if not text.strip():  # a disk that was full leaves one
                raise ValueError("it is empty")
            given = json.loads(text) if Path(path).suffix == ".json" else tomllib.loads(text)
        except OSError as error:
            raise InputError(f"cannot read the plan {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"the plan {path} is damaged: {error}", hint="TOML or JSON") from None
        if not isinstance(given, Mapping):
            raise InputError(f"the plan {path} is no table", hint="TOML or JSON")
        return cls.from_dict(given)

    def __str__(self) -> str:
        shown = []
        for name, settings in self.to_dict().items():
            values = ", ".join(f"{v}" for v in settings.values())
            shown.append(f"{name} {values}".strip())
        return " + ".join(shown) or "plain"


def check_place(path: str | Path) -> None:
    """InputError where no plan can be saved, before one is sought."""
    folder = Path(path).parent
    if Path(path).is_dir() or not folder.is_dir():
        what = "it is a folder" if Path(path).is_dir() else f"there is no folder {folder}"
        raise InputError(f"cannot write the plan {path}: {what}", hint="such as plan.toml")


def _plain(technique: str, setting: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(technique, setting, item) for item in value]
    if callable(value):
        raise InputError(
            f"{technique}.{setting} is a function and cannot be written to a file",
            hint="give it where the plan is applied",
        )
    return value


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
