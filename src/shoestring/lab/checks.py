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
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import files
from ..errors import InputError
from ..step.profiling import profile
from ..techniques.plan import Plan
from ..units import format_size, parse_size
from .target import resolve

_KNOWN = {
    "model", "input", "batch", "tokens", "lora", "quantize", "dtype", "loss", "optimizer", "device",
    "plan", "budget", "tolerance",
}  # fmt: skip
_MOST_BYTES = 10**6


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
    known = _baseline(baseline_file(path))
    found = [_checked(name, given, path.parent, known.get(name)) for name, given in checks.items()]
    if update:
        peaks = {one.name: one.peak_bytes for one in found}
        files.write(baseline_file(path), (json.dumps(peaks, indent=2) + "\n").encode())
    return found


def _read(path: Path) -> dict[str, Mapping[str, Any]]:
    try:
        given = tomllib.loads(files.read(path, _MOST_BYTES, plain=False).decode())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path} is not TOML: {error}", hint="one table for each check") from None
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
        if "model" not in table:
            raise InputError(f"{path}: [{name}] names no model", hint='model = "module:factory"')
    return given


def _baseline(path: Path) -> dict[str, int]:
    if not path.exists():
        return {}
    try:
        known = json.loads(files.read(path, _MOST_BYTES, plain=False).decode())
        return {str(name): int(peak) for name, peak in known.items()}
    except (OSError, ValueError, AttributeError, TypeError):
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
