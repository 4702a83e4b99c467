"""Peaks that must not move: a file of models, and beside it what they took when it was accepted.

[small]                            # one table a check
model = "mypackage.models:build"   # or hf:FOLDER, timm:NAME, a built-in name
input = ["8x3x224x224"]            # as --input; also batch, tokens, lora, quantize, dtype, loss
optimizer = "adamw"
device = "cuda"                    # predicted, so that no GPU is needed
plan = "plan.toml"                 # optional
budget = "8 GB"                    # optional: more than this fails, whatever the baseline says
tolerance = 0.01                   # optional: a peak may rise by this fraction
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import files
from ..errors import InputError, first_line
from ..step.profiling import profile
from ..techniques.plan import Plan
from ..units import format_size, parse_size
from .target import resolve

_KNOWN: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("model", "lora", "quantize", "dtype", "loss"), (str,)),
    **dict.fromkeys(("optimizer", "device", "plan"), (str,)),
    **dict.fromkeys(("batch", "tokens"), (int,)),
    "input": (list,),
    "budget": (str, int),
    "tolerance": (int, float),
}
"""The keys of a check, with the type of each value."""
_MOST_BYTES = 10**6
_EXAMPLE = 'model = "module:factory", input = ["8x3x224x224"], budget = "8 GB"'


@dataclass(frozen=True)
class Checked:
    """One model's peak, beside what it was and what it may be."""

    name: str
    peak_bytes: int
    baseline_bytes: int | None
    budget_bytes: int | None
    tolerance: float

    @property
    def failure(self) -> str | None:
        """Why it fails; None where it passes."""
        peak = format_size(self.peak_bytes)
        if self.budget_bytes is not None and self.peak_bytes > self.budget_bytes:
            return f"{peak} is more than its budget of {format_size(self.budget_bytes)}"
        before = self.baseline_bytes
        if before is not None and self.peak_bytes > before * (1 + self.tolerance):
            more = 100 * (self.peak_bytes / before - 1)
            return f"{peak} is {more:.1f}% more than the baseline of {format_size(before)}"
        return None

    @property
    def way_out(self) -> str:
        """Where the peak is meant: a budget is the user's to raise, --update does not."""
        if self.budget_bytes is not None and self.peak_bytes > self.budget_bytes:
            return f"if it is meant: a larger budget in [{self.name}]"
        return "if it is meant: shoestring check --update"

    def __str__(self) -> str:
        if self.failure is not None:
            return f"{self.name}: FAILED, {self.failure}"
        before = self.baseline_bytes
        told = "no baseline yet" if before is None else f"baseline {format_size(before)}"
        if before is not None and self.peak_bytes < before * (1 - self.tolerance):
            told += "; lower now, --update keeps it so"
        return f"{self.name}: {format_size(self.peak_bytes)} ({told})"


def baseline_file(path: Path) -> Path:
    """memory.toml → memory.baseline.json"""
    return path.with_suffix(".baseline.json")


def check_file(path: Path, *, update: bool = False) -> list[Checked]:
    """Predict every peak of the file; with `update` they become the baseline."""
    checks = _read(path)
    known = _baseline(baseline_file(path), update)
    found = [_checked(name, given, path.parent, known.get(name)) for name, given in checks.items()]
    if update:
        peaks = {one.name: one.peak_bytes for one in found}
        files.write(baseline_file(path), (json.dumps(peaks, indent=2) + "\n").encode())
    return found


def _read(path: Path) -> dict[str, Mapping[str, Any]]:
    try:
        given = tomllib.loads(files.read(path, _MOST_BYTES, plain=False).decode())
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror}",
            hint="one table for each check, as in examples/memory_in_ci/memory.toml",
        ) from None
    except (ValueError, RecursionError) as error:
        told = first_line(error)
        raise InputError(f"{path} is not TOML: {told}", hint="one table for each check") from None
    if not given or not all(isinstance(table, dict) for table in given.values()):
        raise InputError(
            f"{path} has no checks", hint='[name] and model = "package.module:factory"'
        )
    for name, table in given.items():
        if unknown := sorted(table.keys() - _KNOWN):
            raise InputError(
                f"{path}: [{name}] has no setting {unknown[0]!r}",
                hint="one of " + ", ".join(sorted(_KNOWN)),
            )
        for key, value in table.items():
            wrong = not isinstance(value, _KNOWN[key]) or isinstance(value, bool)
            if key == "input" and not wrong:
                wrong = not all(isinstance(one, str) for one in value)
            if wrong or (key == "tolerance" and not 0 <= value < math.inf):
                raise InputError(f"{path}: [{name}] has {key} = {value!r:.50}", hint=_EXAMPLE)
        if "model" not in table:
            raise InputError(f"{path}: [{name}] names no model", hint='model = "module:factory"')
    return given


def _baseline(path: Path, update: bool) -> dict[str, int]:
    """The peaks that were accepted; none where they cannot be read and are replaced anyway."""
    if not path.exists():
        return {}
    try:
        known = json.loads(files.read(path, _MOST_BYTES).decode())
        if any(type(peak) is not int or not 0 < peak < 2**63 for peak in known.values()):
            raise ValueError
        return dict(known)
    except (OSError, ValueError, AttributeError, RecursionError):
        if update:
            return {}
        raise InputError(
            f"the baseline {path} cannot be read", hint="write it anew by shoestring check --update"
        ) from None


def _checked(name: str, given: Mapping[str, Any], folder: Path, before: int | None) -> Checked:
    how = {key: given.get(key) for key in ("tokens", "lora", "quantize", "dtype")}
    model = str(given["model"])
    if model.startswith("hf:") and (folder / model[3:]).exists():
        model = f"hf:{folder / model[3:]}"  # as the file sees it
    target = resolve(
        model, given.get("input", ()), batch=given.get("batch"), loss=given.get("loss"), how=how
    )
    plan = Plan.load(folder / given["plan"]) if "plan" in given else Plan()
    found = profile(
        target.model, target.batch, loss=target.loss, techniques=plan, accounting="device",
        optimizer=given.get("optimizer", target.optimizer), device=given.get("device", "cuda"),
    )  # fmt: skip
    budget = parse_size(given["budget"]) if "budget" in given else None
    return Checked(name, found.peak_bytes, before, budget, float(given.get("tolerance", 0.01)))
