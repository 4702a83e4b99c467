"""Plan: an ordered tuple of techniques with their settings; reads and writes TOML and JSON."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from .. import files
from ..errors import InputError
from .base import LossUnits, Technique
from .registry import name_of, registered

MOST_BYTES = 10**7
"""Of a plan's file."""


@dataclass(frozen=True, init=False)
class Plan:
    """The techniques of a training step, at most one of a kind, in the order they are applied.

    `plan.precision` is the technique of this name, or None.

    Args:
        techniques: A list of them.
        named: Or each by its name: `Plan(precision=Precision("fp16"))`.

    Examples:
        >>> plan = ss.Plan([ss.Precision("fp16"), ss.Microbatching(10)])
        >>> plan.save("plan.toml")
        >>> ss.Plan.load("plan.toml") == plan
        True
    """

    techniques: tuple[Technique, ...] = ()
    """In the order they are applied."""
    budget_bytes: ClassVar[int | None] = None
    """The request a `BudgetPlan` was made for."""

    def __init__(self, techniques: Iterable[Technique] = (), **named: Technique | None) -> None:
        if isinstance(techniques, Technique):
            raise InputError(f"{techniques!r} is one technique, not several", hint="give a list")
        if isinstance(techniques, (str, Path)):
            name = str(techniques)
            raise InputError(f"{name!r} is not a plan", hint=f"load a file: Plan.load({name!r})")
        if isinstance(techniques, type) or not isinstance(techniques, Iterable):
            raise InputError(f"{techniques!r} is not a plan", hint="give a list of techniques")
        for name in named:
            if name not in registered():
                raise InputError(_no_part(name), hint="its parts are " + ", ".join(registered()))
        given = (*techniques, *(t for t in named.values() if t is not None))
        object.__setattr__(self, "techniques", given)
        self.__post_init__()

    def __post_init__(self) -> None:
        found: dict[str, Technique] = {}
        for technique in self.techniques:
            name = name_of(technique)
            if name in found:
                raise InputError(f"{name} is given twice", hint="keep one of them")
            found[name] = technique
        ordered = tuple(found[name] for name in registered() if name in found)
        if why := refusal(ordered):
            raise InputError(why, hint="leave one of them out")
        object.__setattr__(self, "techniques", ordered)

    @classmethod
    def of(cls, given: Plan | Iterable[Technique]) -> Plan:
        """The plan of these techniques, or of another plan without its budget.

        Args:
            given: A plan, or a list of techniques.

        Returns:
            A plan of techniques alone.
        """
        return Plan(given.techniques if isinstance(given, Plan) else given)

    def get(self, name: str) -> Technique | None:
        """The technique of this name.

        Args:
            name: Such as "precision".

        Returns:
            The technique, None where the plan has none.
        """
        return next((t for t in self.techniques if t.name == name), None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in registered():
            raise AttributeError(f"a plan has no part {name!r}")
        return self.get(name)

    def but(self, *techniques: Technique) -> Self:
        """The plan with these in place of their like.

        Args:
            techniques: At most one of a kind.

        Returns:
            Another plan.
        """
        names = {t.name for t in techniques}
        kept = [t for t in self.techniques if t.name not in names]
        return replace(self, techniques=(*kept, *techniques))

    def without(self, *names: str) -> Self:
        """The plan less the techniques of these names.

        Args:
            names: Such as "precision".

        Returns:
            Another plan.
        """
        return replace(self, techniques=tuple(t for t in self.techniques if t.name not in names))

    def examples_at_once(self, batch: Any) -> int | None:
        """How many examples of a batch run at once.

        Args:
            batch: A minibatch, which microbatches of tokens look at.

        Returns:
            The number, None for all.
        """
        found = (t.examples_at_once(batch) for t in self.techniques)
        return min((n for n in found if n is not None), default=None)

    def examples_together(self, batch: Any) -> int:
        """How many examples must run on one rank.

        Args:
            batch: A minibatch, which microbatches of tokens look at.

        Returns:
            The number.
        """
        found = (t.examples_together(batch) for t in self.techniques)
        return min((n for n in found if n is not None), default=1)

    @property
    def loss_units(self) -> LossUnits:
        """Units a part's loss is averaged over."""
        return next((t.loss_units for t in self.techniques if t.loss_units), "auto")

    @property
    def at_once(self) -> int | None:
        """How much of a minibatch runs at once, as flags count it; None for all."""
        return min((t.at_once for t in self.techniques if t.at_once is not None), default=None)

    @property
    def tokens_at_once(self) -> int | None:
        """How many tokens run at once, where they are counted."""
        found = (t.tokens_at_once for t in self.techniques)
        return min((n for n in found if n is not None), default=None)

    @property
    def input_dtype(self) -> torch.dtype:
        """In which floating-point inputs are best given."""
        found = (t.input_dtype for t in self.techniques)
        return next((dtype for dtype in found if dtype is not None), torch.float32)

    def short(self) -> str:
        """On one line, its parts by their settings: 'fp16 + residual-2* + microbatch 10'."""
        return " + ".join(t.short() for t in self.techniques) or "plain"

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain values: technique → setting → value, defaults left out."""
        return {technique.name: technique.to_dict() for technique in self.techniques}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Plan:
        """Read what `to_dict` wrote; anything else is an error that names it.

        Args:
            given: Technique → setting → value.

        Returns:
            The plan.
        """
        if not isinstance(given, Mapping):
            raise InputError(f"{given!r} is not a plan", hint="a plan's to_dict() makes one")
        found = []
        for name, settings in given.items():
            kind = registered().get(name)
            if kind is None or not isinstance(settings, Mapping):
                raise InputError(_no_part(name), hint="its parts are " + ", ".join(registered()))
            found.append(kind.from_dict(settings))
        return Plan(found)

    def changed(self, changes: Mapping[str, Any]) -> Plan:
        """The plan with some settings replaced.

        Args:
            changes: New values by name, each "technique.setting".

        Returns:
            Another plan.
        """
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
        """Write a file for people and programs.

        Args:
            path: TOML, or JSON where the name ends in .json.
        """
        text = self.to_json() if Path(path).suffix == ".json" else self.to_toml()
        try:
            files.write(path, text.encode())
        except OSError as error:
            raise InputError(f"cannot write the plan {path}: {error.strerror}") from None

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` or a person wrote.

        Args:
            path: A TOML or JSON file.

        Returns:
            The plan.
        """
        try:
            text = files.read(path, MOST_BYTES, plain=False).decode()
            if not text.strip():  # a disk that was full leaves one
                raise ValueError("it is empty")
            given = json.loads(text) if Path(path).suffix == ".json" else tomllib.loads(text)
        except OSError as error:
            raise InputError(
                f"cannot read the plan {path}: {error.strerror}",
                hint="plan.save(FILE) or shoestring plan MODEL --budget SIZE -o FILE writes one",
            ) from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"the plan {path} is damaged: {error}", hint="TOML or JSON") from None
        if not isinstance(given, Mapping):
            raise InputError(f"the plan {path} is not a table", hint="TOML or JSON")
        return cls.from_dict(given)

    def __str__(self) -> str:
        shown = []
        for name, settings in self.to_dict().items():
            values = ", ".join(f"{v}" for v in settings.values())
            shown.append(f"{name} {values}".strip())
        return " + ".join(shown) or "plain"


def refusal(techniques: Iterable[Technique]) -> str | None:
    """Why some techniques cannot be in one plan; None if they can."""
    given = list(techniques)
    found = (one.refuses(other) for one in given for other in given if one is not other)
    return next((why for why in found if why is not None), None)


def from_flags(given: Mapping[str, Any], unit: str = "examples") -> Plan:
    """The plan for flags of the command line; those that are None were not given."""
    made = (kind.from_flags(given, unit) for kind in registered().values())
    return Plan(technique for technique in made if technique is not None)


def _no_part(name: str) -> str:
    return f"a plan has no part {name!r}"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
