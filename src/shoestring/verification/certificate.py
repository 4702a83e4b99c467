"""Certificate: what a plan claims, what was found, and what a step was predicted to need."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import Any

from ..errors import VerificationError
from ..html_table import caption
from ..plain_values import PlainValues
from ..techniques.claims import Level
from ..techniques.plan import Plan
from ..units import format_size, plural

PEAK_TOLERANCE = 0.02
"""Between the predicted and the measured peak, on the CPU."""
PEAK_SLACK_BYTES = 512
"""Losses of the parts and other single numbers, which show in the smallest models alone."""


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
    Level.NEAR: "near",
    Level.LOSSY: "differs",
    Level.UNPROVEN: "UNPROVEN",
}


@dataclass(frozen=True)
class Comparison(PlainValues):
    """One result of planned training, compared with that of plain training.

    Examples:
        >>> certificate = ss.verify(plan, model, [batch], loss=loss, optimizer=optimizer)
        >>> [row.what for row in certificate.comparisons if not row.ok]
        []
    """

    what: str
    """Such as "loss", "gradients", "buffers" or "parameters"."""
    claim: Level
    """How close the plan says it is."""
    found: Level
    """How close it was."""
    error: float | None
    """||planned − plain|| / ||plain|| of the worst tensor; None where it has no size, 0.0 where
    equal to the bit."""
    bound: float | None = None
    """Its bound, relative to the same norm: a multiple of the measured rounding, or
    what the user set; None where nothing bounds it."""
    why: str = ""
    """The reason why it differs, or may differ."""
    tensor: str = ""
    """The worst one."""
    accepted: bool = False
    """The user takes it unproven."""

    @property
    def ok(self) -> bool:
        """The claim holds, within its bound; not a number is never within one."""
        if self.found is Level.UNPROVEN:
            return self.accepted
        if self.claim <= Level.ROUNDING:
            return self.found <= self.claim
        if self.error is None:
            return True
        return math.isfinite(self.error) and (self.bound is None or self.error <= self.bound)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""

        def finite(number: float | None) -> float | None:
            return number if number is not None and math.isfinite(number) else None

        return {
            "claimed": _CLAIMED[self.claim],
            "found": _FOUND[self.found],
            "relative_error": finite(self.error),
            "bound": finite(self.bound),
            "tensor": self.tensor,
            "why": self.why,
            "accepted": self.accepted,
            "ok": self.ok,
        }


@dataclass(frozen=True)
class Certificate(PlainValues):
    """Planned training beside plain training, and predicted beside measured bytes.

    Examples:
        >>> certificate = ss.verify(plan, model, [batch], loss=loss, optimizer=optimizer)
        >>> certificate.ok
        True
    """

    plan: Plan
    """The plan that was verified."""
    device: str
    """Where both copies trained."""
    steps: int
    """How many updates were compared."""
    comparisons: tuple[Comparison, ...]
    """One for each kind of result: loss, gradients, buffers, and so on."""
    predicted_peak_bytes: int | None
    """None where the step cannot be predicted, or was not planned."""
    measured_peak_bytes: int
    """Of a real step by the plan."""
    plain_peak_bytes: int
    """Measured, of the same step without the plan."""
    peak_varies: bool = False
    """Execution is random (stochastic depth), and with it the peak, which is not checked."""
    reference: str = ""
    """How rounding was measured."""
    beside: str = "plain training"
    """The reference it is compared with."""

    @property
    def peak_ok(self) -> bool:
        """Measured as predicted; checked on the CPU, where storages are counted."""
        if self.predicted_peak_bytes is None:
            return True
        off = abs(self.predicted_peak_bytes - self.measured_peak_bytes)
        allowed = max(PEAK_TOLERANCE * self.measured_peak_bytes, PEAK_SLACK_BYTES)
        return self.device != "cpu" or self.peak_varies or off <= allowed

    @property
    def ok(self) -> bool:
        """Every claim holds, nothing is unproven, and the peak is the one predicted."""
        return self.peak_ok and all(c.ok for c in self.comparisons)

    def check(self) -> None:
        """Raise VerificationError if it is not."""
        broken = [
            f"{c.what} claimed {_CLAIMED[c.claim]}, found {_FOUND[c.found]}"
            for c in self.comparisons
            if not c.ok
        ]
        if not self.peak_ok:
            assert self.predicted_peak_bytes is not None
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
            "beside": self.beside,
            "reference": self.reference,
            **{c.what.replace(" ", "_"): c.as_dict() for c in self.comparisons},
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
            "plain_peak_bytes": self.plain_peak_bytes,
            "peak_ok": self.peak_ok,
            "peak_varies": self.peak_varies,
        }

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("", "claimed", "found", "error", "bound", "why")]
        for c in self.comparisons:
            error = "" if not c.error else f"{c.error:.1e}"
            bound = "" if not c.error or c.bound is None else f"{c.bound:.0e}"
            mark = "" if c.ok else "BROKEN" if c.found is not Level.UNPROVEN else "UNPROVEN"
            why = f"{mark}: {c.why}" if mark else f"accepted: {c.why}" if c.accepted else c.why
            rows.append((c.what, _CLAIMED[c.claim], _FOUND[c.found], error, bound, why))
        return rows

    def _head(self) -> str:
        return f"{self.plan} beside {self.beside}, {plural(self.steps, 'step')} on {self.device}"

    def _end(self) -> list[str]:
        verdict = "verified" if self.ok else "NOT verified"
        return [*([self.reference] if self.reference else []), self._peak(), verdict]

    def __str__(self) -> str:
        rows = self._rows()
        wide = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, wide, strict=False)]
            lines.append("  ".join([*cells, row[5]]).rstrip())
        return "\n".join([self._head(), *lines, *self._end()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """In a notebook: the same table, and the verdict."""
        *told, verdict = (escape(line) for line in self._end())
        below = f"{'<br>'.join(told)}<br><strong>{verdict}</strong>"
        return f"{caption(self._head(), self._rows())}<p>{below}</p>"

    def _peak(self) -> str:
        measured, plain = format_size(self.measured_peak_bytes), format_size(self.plain_peak_bytes)
        if self.predicted_peak_bytes is None:
            return f"peak: not predicted, measured {measured}; plain {plain}"
        off = 100 * (self.predicted_peak_bytes / self.measured_peak_bytes - 1)
        checked = "; not checked: steps differ" if self.peak_varies else ""
        return (
            f"peak: predicted {format_size(self.predicted_peak_bytes)}, measured {measured} "
            f"({off:+.1f}%); plain {plain}{checked}" + ("" if self.peak_ok else "  BROKEN")
        )
