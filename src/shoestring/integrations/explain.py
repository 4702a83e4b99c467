"""`explain`: what each flag of a training step does to its peak, and which do nothing.

Every answer is a peak: that of the same step with the flag changed, traced on fake tensors. Memory
is spent at one instant, so a flag that frees bytes at another one saves nothing.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import InputError, TraceError
from ..html_table import caption
from ..memory.model import MemoryProfile, memory_profile
from ..plain_values import PlainValues
from ..step.profiling import Device, check
from ..step.trace_step import trace_plan
from ..techniques.base import Technique
from ..techniques.plan import Plan, from_flags
from ..techniques.registry import flags
from ..trace.failures import check_trainable
from ..trace.fakes import OptimizerLike
from ..trace.graph import Role
from ..trace.split import cut, examples_of
from ..trace.tracing import Loss
from ..units import format_size
from .configurations import Configured, loss_of

NOTHING = 0.01
"""Of the peak: less than this is called nothing."""
_PLACES = (
    ("optimizer state on the host", (Role.OPTIMIZER_STATE,)),
    ("kept activations on the host", (Role.FORWARD_ACTIVATION,)),
    ("gradients on the host", (Role.GRADIENT,)),
)


@dataclass(frozen=True)
class Effect(PlainValues):
    """One flag, and the peak of the step with it changed.

    Examples:
        >>> found = ss.explain(model, batch, loss=loss, optimizer=optimizer)
        >>> {effect.flag: effect.saves_bytes for effect in found.effects}
    """

    flag: str
    """As the command line writes it."""
    on: bool
    """It is on, and the peak is the one without it."""
    peak_bytes: int
    """Of the step with the flag changed."""
    saves_bytes: int
    """By having it on; less than zero where it costs memory."""
    at_most: bool = False
    """No way to do it saves more."""


@dataclass(frozen=True)
class Explanation(PlainValues):
    """Where the peak is, and what would move it.

    Examples:
        >>> found = ss.explain(model, batch, loss=loss, optimizer=optimizer)
        >>> found.phase, found.useless
    """

    peak_bytes: int
    """Of the step as it is."""
    phase: str
    """The pass in which the peak is."""
    operation: str
    """The operation at the peak."""
    bytes_by_role: dict[str, int]
    """Live bytes at the peak."""
    effects: tuple[Effect, ...]
    """One for each flag."""

    @property
    def useless(self) -> tuple[str, ...]:
        """Flags that move the peak by less than 1%."""
        least = NOTHING * self.peak_bytes
        return tuple(e.flag for e in self.effects if abs(e.saves_bytes) < least)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        effects = [vars(effect) for effect in self.effects]
        return {**vars(self), "effects": effects, "useless": list(self.useless)}

    def _repr_html_(self) -> str:
        """In a notebook."""
        first, *lines = str(self).split("\n")
        rows = [re.split(r"\s{2,}", line.strip()) for line in lines]
        return caption(first, [["flag", "peak", "it"], *rows])

    def __str__(self) -> str:
        largest = sorted(self.bytes_by_role.items(), key=lambda item: -item[1])[:4]
        parts = ", ".join(f"{r.replace('_', ' ')} {format_size(b)}" for r, b in largest if b)
        operation = self.operation.rpartition(".")[2] or self.operation
        lines = [f"peak {format_size(self.peak_bytes)} at {operation}, {self.phase}: {parts}"]
        width = max(len(effect.flag) for effect in self.effects) if self.effects else 0
        for effect in sorted(self.effects, key=lambda e: -e.saves_bytes):
            share = effect.saves_bytes / self.peak_bytes
            told = f"saves {'up to ' * effect.at_most}{format_size(effect.saves_bytes)}"
            told += f" ({100 * share:.0f}%)"
            if abs(share) < NOTHING:
                told = "does nothing: the peak is elsewhere"
            elif share < 0:
                told = f"costs {format_size(-effect.saves_bytes)} ({-100 * share:.0f}%)"
            state = "on, off it would be" if effect.on else "with it"
            peak = format_size(effect.peak_bytes)
            lines.append(f"  {effect.flag:<{width}}  {state} {peak:>9}  {told}")
        return "\n".join(lines)

    __repr__ = __str__


def explain(
    model: nn.Module | str | Configured,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerLike = "adamw",
    device: Device | None = None,
    techniques: Plan | Iterable[Technique] = (),
    **how: Any,
) -> Explanation:
    """Say which flags move the peak of a training step, by how much, and which do nothing.

    Args:
        model: Not changed; or the name of a configuration, with `how` as for `cards`.
        batch: One batch, as your training loop has it; for a configuration, its number of examples.
        loss: `(model, batch) -> scalar`.
        optimizer: Yours, or a name such as "adamw".
        device: "cpu" or "cuda"; by default where the model is, for a configuration "cuda".
        techniques: Techniques the step already uses: for each, the peak without it.
        how: Keywords of `cards`, for a configuration.

    Returns:
        Where the peak is, and one row for each flag.

    Examples:
        >>> print(ss.explain(model, batch, loss=loss, optimizer="adamw", device="cuda"))
    """
    given: Configured | None = None
    if isinstance(model, (str, Configured)):
        size = {} if batch is None else {"batch": batch}
        given = model if isinstance(model, Configured) else Configured(model, **size, **how)
        model, batch = given.build()
        loss, device = loss or loss_of, device or "cuda"
    elif how or loss is None:
        raise InputError(
            f"explain does not take {next(iter(how), 'a model without its loss')}",
            hint="explain(model, batch, loss=…, optimizer=…)",
        )
    plan = Plan.of(techniques)
    check("device", device)
    check_trainable(model)
    where = device or next(model.parameters()).device.type

    def profiled(model: nn.Module, batch: Any, plan: Plan) -> MemoryProfile:
        """Of the step run eagerly: that a flag lets it be a CUDA graph is not what it buys."""
        trace = trace_plan(
            plan, model, batch, loss=loss, optimizer=optimizer, device=where, captured=False
        )
        return memory_profile(trace, "device")

    def peak_of(model: nn.Module, batch: Any, plan: Plan) -> MemoryProfile | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a flag may match nothing: its peak says so
            try:
                return profiled(model, batch, plan)
            except (InputError, TraceError):  # it does not apply to this model or optimizer
                return None

    now = profiled(model, batch, plan)
    found = [
        *_by_flags(now, plan, lambda other: peak_of(model, batch, other)),
        *_by_place(now),
        *_by_size(now, given, model, batch, lambda m, b: peak_of(m, b, plan)),
    ]
    roles = {role.value: size for role, size in now.bytes_by_role.items()}
    return Explanation(now.peak_bytes, now.peak_phase, now.peak_operation, roles, tuple(found))


def _by_flags(now: MemoryProfile, plan: Plan, peak_of: Any) -> Iterable[Effect]:
    names = {technique.name for technique in plan.techniques}
    for technique in plan.techniques:
        without = peak_of(plan.without(technique.name))
        if without is not None:
            saves = without.peak_bytes - now.peak_bytes
            yield Effect(technique.short(), True, without.peak_bytes, saves)
    for flag in flags().values():
        if flag.explained is None:
            continue
        words, value = flag.explained
        (added,) = from_flags({flag.name: value}).techniques
        if added.name not in names and (found := peak_of(plan.but(added))) is not None:
            saves = now.peak_bytes - found.peak_bytes
            yield Effect(words, False, found.peak_bytes, saves)


def _by_place(now: MemoryProfile) -> Iterable[Effect]:
    """If all bytes of a kind were elsewhere at every instant: no offload saves more."""
    columns = list(Role)
    for words, roles in _PLACES:
        gone = sum(now.timeline.bytes_by_role[:, columns.index(role)] for role in roles)
        peak = int((now.timeline.totals - gone).max(initial=0))
        yield Effect(words, False, peak, now.peak_bytes - peak, at_most=True)


def _by_size(
    now: MemoryProfile, given: Configured | None, model: nn.Module, batch: Any, peak_of: Any
) -> Iterable[Effect]:
    try:
        examples = examples_of(batch) or 1
    except InputError:  # its tensors share no first dimension
        examples = 1
    tried = [("half the batch", model, cut(batch, 0, examples // 2))] if examples > 1 else []
    if given is not None and given.has_context and given.tokens > 1:
        tried.append(("half the context", model, given.sized(tokens=given.tokens // 2).build()[1]))
    for words, smaller, data in tried:
        found = peak_of(smaller, data)
        if found is not None:
            yield Effect(words, False, found.peak_bytes, now.peak_bytes - found.peak_bytes)
