"""BudgetPlan: a plan that was chosen for a budget, with what is predicted for it and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..html_table import caption
from ..memory.picture import Curve, Picture, draw_curves
from ..memory.prediction import Prediction
from ..plain_values import PlainValues
from ..techniques.claims import LOSSLESS, LOSSY, NEAR_LOSSLESS
from ..techniques.plan import Plan
from ..units import format_flops, format_seconds, format_size
from .prices import Price, price_lines

BudgetOf = Literal["reserved", "allocated"]


@dataclass(frozen=True)
class Choice(PlainValues):
    """One part of the plan, and why it is there.

    Examples:
        >>> for choice in plan.choices: print(choice.part, choice.setting, choice.why)
    """

    part: str
    """The name of a technique."""
    setting: str
    """In short."""
    kind: str
    """Lossless, near-lossless or lossy."""
    why: str
    """The effect that the planner took it for."""


@dataclass(frozen=True)
class FrontPoint(PlainValues):
    """A plan that no other allowed plan beats in both memory and time.

    Examples:
        >>> for point in plan.front: print(point.peak_bytes, point.seconds, point.plan.short())
    """

    plan: Plan
    """The techniques."""
    peak_bytes: int
    """Predicted."""
    seconds: float
    """Predicted, of one step."""
    exact: bool
    """Predicted by its own step; else estimated from the chain of blocks."""
    kind: str
    """Lossless, near-lossless or lossy."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "plan": self.plan.to_dict(),
            "peak_bytes": self.peak_bytes,
            "step_seconds": self.seconds,
            "exact": self.exact,
            "kind": self.kind,
        }


@dataclass(frozen=True)
class Trial(PlainValues):
    """The measured step of a plan, from a trial on the device.

    Examples:
        >>> if plan.trial is not None: print(plan.trial.needed_bytes, plan.trial.seconds)
    """

    needed_bytes: int
    """On CUDA reserved at most, from the first step on; on the CPU tensors and scratch."""
    seconds: float
    """The fastest of a few steps."""
    captured: bool
    """Whether it ran as one CUDA graph."""


@dataclass(frozen=True, kw_only=True)
class BudgetPlan(Plan):
    """The fastest plan, by prediction, whose peak stays within a budget, with a margin.

    Examples:
        >>> plan = ss.plan(model, batch, loss=loss, optimizer=optimizer, budget="8 GB")
        >>> plan.predicted.peak_bytes <= plan.budget_bytes
        True
        >>> [choice.why for choice in plan.choices]
        []
    """

    budget_bytes: int = field()  # type: ignore[misc]
    """As it was asked for."""
    budget_of: BudgetOf = "reserved"
    """On CUDA: what the allocator takes from the card, or what is "allocated" of that."""
    margin: float
    """Fraction of the budget left free for what the prediction may miss."""
    predicted: Prediction
    """Of the step by this plan."""
    plain: Prediction
    """Of the same step without a plan."""
    choices: tuple[Choice, ...]
    """One for each technique, with the reason."""
    front: tuple[FrontPoint, ...] = ()
    """From the least memory to the least time."""
    prices: tuple[Price, ...] = ()
    """Plans for somewhat less and more memory, if you asked for them."""
    rates: Mapping[str, Any] = field(default_factory=dict)
    """How fast the device was taken to be: the same rates give the same plan."""
    ranks: int = 1
    """Processes that share a step; `predicted` and `plain` are of one, the time without sending."""
    sharding: str = ""
    """How several ranks share a step, "fsdp" or "ddp"."""
    by_running: str = ""
    """Why the model cannot be traced, where the plan was run and measured instead: `predicted` and
    `plain` are then what steps took."""
    trial: Trial | None = None
    """Measured on a few steps by the plan, if the device is present; `predicted` agrees with it."""

    @property
    def plan(self) -> Plan:
        """The techniques alone."""
        return Plan(self.techniques)

    @property
    def kind(self) -> str:
        """How close the planned training is to plain training: the level of its weakest part."""
        kinds = [choice.kind for choice in self.choices]
        return next((kind for kind in (LOSSY, NEAR_LOSSLESS) if kind in kinds), LOSSLESS)

    def plot(self, file: str | Path | None = None) -> Picture:
        """Draw the memory of the plain and of the planned step over one another, and the budget.

        Args:
            file: Name of an SVG file to write.

        Returns:
            The picture, which a notebook shows.

        Examples:
            >>> ss.plan(model, batch, loss=loss, optimizer="adamw", budget="8 GB").plot("plan.svg")
        """
        curves = [
            Curve(f"{name}: peak {format_size(of.peak_bytes)}", of.curve or (of.peak_bytes,) * 2,
                  name)
            for name, of in (("plain", self.plain), ("planned", self.predicted))
        ]  # fmt: skip
        how = "Measured" if self.by_running else "Predicted"
        where = "" if self.predicted.device == "any" else f" on {self.predicted.device}"
        picture = draw_curves(
            curves, f"{how} memory of one training step{where}", budget_bytes=self.budget_bytes
        )
        if file is not None:
            picture.save(file)
        return picture

    def _rows(self) -> list[tuple[str, str, str, str]]:
        return [(c.part, c.setting, c.kind, c.why) for c in self.choices]

    def to_toml(self) -> str:
        """The plan for a person to edit; what was predicted stands above it as comments."""
        lines = [f"# {line}".rstrip() for line in self._summary()]
        for choice in self.choices:
            lines.append(f"# {choice.part}: {choice.kind}; {choice.why}")
        return "\n".join(lines) + "\n\n" + super().to_toml()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, bytes as integers."""
        return {
            "plan": self.to_dict(),
            "kind": self.kind,
            "budget_bytes": self.budget_bytes,
            "budget_of": self.budget_of,
            "margin": self.margin,
            "predicted": self.predicted.as_dict(),
            "plain": self.plain.as_dict(),
            "choices": [vars(choice) for choice in self.choices],
            "front": [point.as_dict() for point in self.front],
            "prices": [price.as_dict() for price in self.prices],
            "rates": dict(self.rates),
            "by_running": self.by_running,
            "trial": None if self.trial is None else vars(self.trial),
            "ranks": self.ranks,
            "sharding": self.sharding,
        }

    def _summary(self) -> list[str]:
        predicted, plain = self.predicted, self.plain
        if self.by_running:
            return [
                f"{self.kind}, for {format_size(self.budget_bytes)}: measured "
                f"{format_size(predicted.peak_bytes)}{_scratch(predicted)} on {predicted.device}, "
                f"plain {format_size(plain.peak_bytes)}",
                f"found by running steps: {self.by_running}",
            ]
        seconds, flops = _number(predicted.seconds), _number(predicted.flops)
        of = "" if predicted.accounting == "fundamental" else f" on {predicted.device}"
        of += f", each of {self.ranks} ranks, {self.sharding}" if self.ranks > 1 else ""
        lines = [
            f"{self.kind}, for {format_size(self.budget_bytes)}: "
            f"predicted {format_size(predicted.peak_bytes)}{_scratch(predicted)} "
            f"({predicted.accounting} accounting{of}, {100 * self.margin:.2g}% left free), "
            f"plain {format_size(plain.peak_bytes)}",
            f"step {format_seconds(seconds)}, {_times(seconds, plain.seconds)} "
            f"plain; {format_flops(int(flops))}, {_times(flops, plain.flops)} plain "
            f"(rates: {predicted.costs}{'; as one CUDA graph' * predicted.captured})",
        ]
        if predicted.link_bytes:
            share = predicted.hidden_seconds / max(predicted.link_seconds, 1e-12)
            lines.append(
                f"{format_size(predicted.link_bytes)} copied from the host and back, "
                f"{format_seconds(predicted.link_seconds)}, {100 * share:.0f}% of it hidden"
            )
        return lines

    def _repr_html_(self) -> str:
        """In a notebook: both steps over time, and the parts of the plan."""
        return self.plot().svg + caption(
            " · ".join([self.short(), *self._summary()]),
            [("technique", "setting", "claim", "why"), *self._rows()],
        )

    def __str__(self) -> str:
        first = f"{self.short()}: {format_size(self.predicted.peak_bytes)}"
        if not self.by_running:
            first += f", {_times(_number(self.predicted.flops), self.plain.flops)} FLOPs"
        return "\n".join([first, *self._summary(), *_table(self._rows()), *price_lines(self)])

    __repr__ = __str__

    @property
    def summary(self) -> str:
        """The prediction, in a few lines."""
        return "\n".join(self._summary())


def _scratch(predicted: Prediction) -> str:
    if predicted.reserved_bytes:
        return f", {format_size(predicted.reserved_bytes)} reserved"
    nbytes = predicted.scratch_bytes
    return f" and {format_size(nbytes)} scratch of kernels" if nbytes else ""


def _number(value: float | None) -> float:
    assert value is not None  # a planner predicts time, too
    return value


def _times(value: float, plain: float | None) -> str:
    return f"{value / plain:.2f}x" if plain else "1.00x"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns of one width, the last one free."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  " + "  ".join([*(f"{c:<{w}}" for c, w in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]
