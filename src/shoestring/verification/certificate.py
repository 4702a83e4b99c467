"""Certificate: what a plan claims, what was found, and what a step was predicted to need."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import VerificationError
from ..techniques.claims import Level
from ..techniques.plan import Plan
from ..units import format_size

TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 5e-2,
    torch.bfloat16: 2e-1,
}
"""Largest relative error that counts as rounding, by the least precise type computed in."""

PEAK_TOLERANCE = 0.02
"""Between the predicted and the measured peak, on the CPU."""
PEAK_SLACK_BYTES = 512
"""Losses of the parts and other single numbers, which show in the smallest models alone."""

SMALL_TENSOR = 1e-2
"""A tensor is compared at least on this fraction of the largest one's scale: a gradient that is
zero but for rounding (of a bias before BatchNorm) has no scale of its own."""


_CLAIMED = {
    Level.EQUAL: "equal",
    Level.ROUNDING: "within rounding",
    Level.NEAR: "near",
    Level.LOSSY: "lossy",
}
_FOUND = {
    Level.NONE: "none",
    Level.EQUAL: "equal",
    Level.ROUNDING: "within rounding",
    Level.LOSSY: "differs",
}


@dataclass(frozen=True)
class Comparison:
    """One thing of plain training beside that of planned training."""

    what: str
    claim: Level
    found: Level
    error: float | None
    """Largest relative error; None where it has no size, 0.0 where equal to the bit."""
    tolerance: float | None
    why: str = ""
    """What makes it differ, or may make it."""

    @property
    def ok(self) -> bool:
        """A lossless claim holds; a lossy one is never broken, unless by infinities."""
        if self.claim <= Level.ROUNDING:
            return self.found <= self.claim
        return self.error is None or self.what == "gradients" or math.isfinite(self.error)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        finite = self.error is not None and math.isfinite(self.error)
        return {
            "claimed": _CLAIMED[self.claim],
            "found": _FOUND[self.found],
            "relative_error": self.error if finite else None,
            "tolerance": self.tolerance,
            "why": self.why,
            "ok": self.ok,
        }


@dataclass(frozen=True)
class Certificate:
    """Planned training beside plain training, and predicted beside measured bytes."""

    plan: Plan
    device: str
    steps: int
    comparisons: tuple[Comparison, ...]
    predicted_peak_bytes: int
    measured_peak_bytes: int
    plain_peak_bytes: int
    """Measured, of the same step without the plan."""
    peak_varies: bool = False
    """What runs is drawn (stochastic depth), and with it the peak, which is not judged."""

    @property
    def peak_ok(self) -> bool:
        """Measured as predicted; judged on the CPU, where storages are counted."""
        off = abs(self.predicted_peak_bytes - self.measured_peak_bytes)
        allowed = max(PEAK_TOLERANCE * self.measured_peak_bytes, PEAK_SLACK_BYTES)
        return self.device != "cpu" or self.peak_varies or off <= allowed

    @property
    def ok(self) -> bool:
        """Every lossless claim holds and the peak is the one predicted."""
        return self.peak_ok and all(c.ok for c in self.comparisons)

    def check(self) -> None:
        """Raise VerificationError if it is not."""
        broken = [
            f"{c.what} claimed {_CLAIMED[c.claim]}, found {_FOUND[c.found]}"
            for c in self.comparisons
            if not c.ok
        ]
        if not self.peak_ok:
            broken.append(
                f"peak predicted {format_size(self.predicted_peak_bytes)}, "
                f"measured {format_size(self.measured_peak_bytes)}"
            )
        if broken:
            causes = [c.why for c in self.comparisons if not c.ok and c.why]
            raise VerificationError("; ".join(broken), hint=causes[0] if causes else None)

    def __getitem__(self, what: str) -> Comparison:
        return next(c for c in self.comparisons if c.what == what)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "ok": self.ok,
            "plan": self.plan.to_dict(),
            "device": self.device,
            "steps": self.steps,
            **{c.what.replace(" ", "_"): c.as_dict() for c in self.comparisons},
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
            "plain_peak_bytes": self.plain_peak_bytes,
            "peak_ok": self.peak_ok,
            "peak_varies": self.peak_varies,
        }

    def __str__(self) -> str:
        rows = [("", "claimed", "found", "error", "rounding", "why")]
        for c in self.comparisons:
            error = (f"{c.error:.1e}", f"{c.tolerance:.0e}") if c.error else ("", "")
            mark = c.why if c.ok else f"BROKEN: {c.why}"
            rows.append((c.what, _CLAIMED[c.claim], _FOUND[c.found], *error, mark))
        wide = [max(len(row[i]) for row in rows) for i in range(5)]
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        lines = [f"{self.plan} beside plain training, {steps} on {self.device}"]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, wide, strict=False)]
            lines.append("  ".join([*cells, row[5]]).rstrip())
        off = 100 * (self.predicted_peak_bytes / self.measured_peak_bytes - 1)
        judged = "; not judged, what runs is drawn" if self.peak_varies else ""
        lines.append(
            f"peak: predicted {format_size(self.predicted_peak_bytes)}, measured "
            f"{format_size(self.measured_peak_bytes)} ({off:+.1f}%); "
            f"plain {format_size(self.plain_peak_bytes)}{judged}"
            + ("" if self.peak_ok else "  BROKEN")
        )
        lines.append("verified" if self.ok else "NOT verified")
        return "\n".join(lines)


def compare(
    what: str,
    expected: Mapping[Any, torch.Tensor],
    found: Mapping[Any, torch.Tensor],
    claim: Level,
    why: str,
    tolerance: float,
) -> Comparison:
    """Tensors of plain training beside those of planned training, by name."""
    if not expected and not found:
        return Comparison(what, claim, Level.NONE, None, None)
    if expected.keys() != found.keys():
        return Comparison(what, claim, Level.LOSSY, math.inf, tolerance, why)
    pairs = [(expected[name], found[name]) for name in expected]
    if all(_same(*pair) for pair in pairs):
        return Comparison(what, claim, Level.EQUAL, 0.0, tolerance)
    error = relative_error(pairs)
    level = Level.ROUNDING if error <= tolerance else Level.LOSSY
    return Comparison(what, claim, level, error, tolerance, why)


def _same(expected: torch.Tensor, found: torch.Tensor) -> bool:
    if expected.dtype is not found.dtype or expected.shape != found.shape:
        return False
    return bool(((expected == found) | (expected.isnan() & found.isnan())).all())


def relative_error(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """max |e − f| / max |e| of the worst tensor; infinite where shapes or infinities differ."""
    wide = [(e.double().flatten(), f.double().flatten()) for e, f in pairs]
    tops = [float(e.abs().max()) if e.numel() else 0.0 for e, _ in wide]
    floor = SMALL_TENSOR * max(tops) or 1.0
    worst = 0.0
    for (e, f), top in zip(wide, tops, strict=True):
        if e.shape != f.shape:
            return math.inf
        if e.numel():
            error = float(torch.where(e == f, 0.0, (e - f).abs()).max()) / max(top, floor)
            worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst
