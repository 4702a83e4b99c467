"""What each part of a plan claims about each thing that training leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..techniques.plan import Plan
from .certificate import Comparison, Level

WHAT = ("loss", "gradients", "buffers", "random stream", "optimizer state", "parameters")
RECOMPUTATION, MICROBATCHES = "recomputation", "microbatches"
_VALUES = tuple(what for what in WHAT if what != "random stream")
_MOVED = ("optimizer state", "parameters")

Claims = dict[str, tuple[Level, str]]
"""What → how close, and why not closer."""


@dataclass(frozen=True)
class Circumstances:
    """What decides whether a technique is lossless."""

    device: str
    batch_norm: bool
    """The model has BatchNorm that trains."""
    drawn: bool
    """A plain step draws random numbers."""
    split: bool
    """A batch is larger than a microbatch."""
    linear: bool
    """The update is linear in the gradient, as SGD's is: rounding stays rounding."""


def claims(plan: Plan, at: Circumstances) -> Claims:
    """The weakest claim of any part, for each thing."""
    made: Claims = dict.fromkeys(WHAT, (Level.EQUAL, ""))

    def weaken(names: tuple[str, ...], level: Level, why: str) -> None:
        for name in names:
            if level > made[name][0]:
                made[name] = level, why
            elif level == made[name][0]:
                made[name] = level, f"{made[name][1]}; {why}"

    if at.device != "cpu":
        weaken(_VALUES, Level.ROUNDING, f"kernels on {at.device} add in any order")
    if at.split:
        _microbatches(plan, at, weaken)
    precision = plan.precision
    if precision is not None and precision.kind != "fp32":
        weaken(_VALUES, Level.NEAR, f"{precision.kind} rounds")
    if plan.sparsity is not None and plan.sparsity.density < 1:
        weaken(("gradients",), Level.ROUNDING, "added in another order")
        rest = tuple(name for name in _VALUES if name != "gradients")
        weaken(rest, Level.LOSSY, f"density {plan.sparsity.density:g} is another model")
    if not at.linear and made["gradients"][0] > Level.EQUAL:
        weaken(_MOVED, Level.NEAR, "the optimizer divides by the gradient: zero ± rounding moves")
    return made


def _microbatches(plan: Plan, at: Circumstances, weaken: object) -> None:
    assert callable(weaken) and plan.microbatching is not None
    if not plan.microbatching.simulated:
        weaken(_VALUES[:2] + _MOVED, Level.ROUNDING, "gradients are added part by part")
    if at.batch_norm:
        weaken(_VALUES, Level.LOSSY, "BatchNorm sees one microbatch at a time")
    if at.drawn and not plan.microbatching.simulated:
        why = "each microbatch draws its own numbers; compared with those of the whole batch"
        weaken(("random stream",), Level.LOSSY, why)


_SUSPECTS = {
    "buffers": ("moved once more by BatchNorm that ran again", "moved by every microbatch"),
    "random stream": ("more or fewer numbers were drawn: a dropout mask drawn again", ""),
    "gradients": ("a dropout mask drawn again, or a hook", "a loss that does not split by units="),
    "loss": ("another forward pass", "a loss that does not split by units="),
    MICROBATCHES: ("", "a loss that does not split by units="),
    RECOMPUTATION: ("statistics moved twice, or a dropout mask drawn again", ""),
}
"""What usually causes it, with any plan and with microbatches."""


def suspicion(broken: Comparison, *, split: bool = True) -> Comparison:
    """The same with what usually causes it; with `split` a batch is larger than a microbatch."""
    if broken.what not in _SUSPECTS:
        return replace(broken, why=broken.why or "follows from the above")
    always, parts = _SUSPECTS[broken.what]
    causes = [cause for cause in (always, parts if split else "") if cause]
    return replace(broken, why=", or ".join(causes) + "?")
