"""Trace → MemoryProfile: the only place a peak is computed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ..errors import InputError, UnknownOperationWarning
from ..html_table import caption
from ..plain_values import PlainValues
from ..trace.graph import Phase, Role, Trace
from ..units import format_flops, format_size
from .device import device_timeline
from .fundamental import fundamental_timeline
from .nodes import dense_flops, forward_graph
from .picture import Picture, draw_timeline
from .schedule import Kind, recompute_flops, schedule
from .timeline import Timeline

Accounting = Literal["fundamental", "device"]
ACCOUNTINGS = get_args(Accounting)


@dataclass(frozen=True)
class MemoryProfile(PlainValues):
    """Where the bytes of one training step go. All of it is predicted; nothing was allocated.

    Examples:
        >>> profile = ss.profile(model, batch, loss=loss, optimizer=optimizer)
        >>> profile.peak_bytes, profile.peak_phase, profile.peak_operation
    """

    accounting: str
    """Either "fundamental" or "device"."""
    device: str
    """Where the step is taken to run."""
    timeline: Timeline = field(repr=False)
    """Live bytes at every instant."""
    bytes_by_role: Mapping[Role, int]
    """Live bytes at the peak; the roles add up to it."""
    bytes_by_module: Mapping[str, int] = field(repr=False)
    """Live bytes at the peak, largest first; "" for those of no module."""
    peak_bytes: int
    """The largest sum of live bytes."""
    peak_operation: str
    """The operation at the peak."""
    peak_phase: str
    """The pass in which it is."""
    peak_module: str
    """The module that runs it."""
    stored_activation_bytes: int
    """Forward activations held when the backward pass begins."""
    forward_flops: int
    """Of the forward pass."""
    backward_flops: int
    """Of the backward pass, without what it recomputes."""
    recompute_flops: int
    """Of what the backward pass recomputes."""
    parameters: int
    """How many the model has."""
    sparsifiable_parameters: int
    """How many of them are in tensors that can be sparse."""
    warnings: tuple[str, ...] = ()
    """Such as operations that the rules do not know."""

    @property
    def activation_bytes(self) -> int:
        """Forward and backward activations at the peak, the report's activation memory."""
        return (
            self.bytes_by_role[Role.FORWARD_ACTIVATION]
            + self.bytes_by_role[Role.BACKWARD_ACTIVATION]
            + self.bytes_by_role[Role.TRANSIENT]
        )

    def as_dict(self) -> dict[str, Any]:
        """Byte counts as integers, by the names the command line prints."""
        roles = {f"{role.value}_bytes": self.bytes_by_role[role] for role in Role}
        return {
            "accounting": self.accounting,
            "device": self.device,
            **roles,
            "peak_bytes": self.peak_bytes,
            "peak": {
                "operation": self.peak_operation,
                "phase": self.peak_phase,
                "module": self.peak_module,
                "instant": self.timeline.peak_instant,
                "instants": len(self.timeline.labels),
            },
            "stored_activation_bytes": self.stored_activation_bytes,
            "forward_flops": self.forward_flops,
            "backward_flops": self.backward_flops,
            "recompute_flops": self.recompute_flops,
            "parameters": self.parameters,
            "sparsifiable_parameters": self.sparsifiable_parameters,
            "modules": dict(self.bytes_by_module),
            "warnings": list(self.warnings),
        }

    def plot(self, file: str | Path | None = None) -> Picture:
        """Draw the live bytes of the step by role; `file` also writes it, as SVG.

        Args:
            file: Name of an SVG file to write.

        Returns:
            The picture, which a notebook shows.

        Examples:
            >>> ss.profile(model, batch, loss=loss, optimizer="sgd").plot("memory.svg")
        """
        of = f" on {self.device}" if self.accounting == "device" else ""
        picture = draw_timeline(
            self.timeline,
            f"Predicted memory of one step{of}: peak {format_size(self.peak_bytes)}",
        )
        if file is not None:
            picture.save(file)
        return picture

    def _repr_html_(self) -> str:
        """In a notebook: the step over time, and bytes by role at the peak."""
        rows = [["at the peak", "bytes", "share"]]
        for role, size in sorted(self.bytes_by_role.items(), key=lambda item: -item[1]):
            if size:
                share = f"{100 * size / self.peak_bytes:.1f}%"
                rows.append([role.value.replace("_", " "), format_size(size), share])
        return self.plot().svg + caption(str(self), rows)

    def __str__(self) -> str:
        roles = self.bytes_by_role
        optimizer = roles[Role.GRADIENT] + roles[Role.OPTIMIZER_STATE]
        parts = [
            f"model {format_size(roles[Role.MODEL])}",
            f"optimizer {format_size(optimizer)}",
            f"activations {format_size(self.activation_bytes)}",
        ]
        other = self.peak_bytes - roles[Role.MODEL] - optimizer - self.activation_bytes
        if other:
            parts.append(f"other {format_size(other)}")
        parts.append(f"peak {format_size(self.peak_bytes)}")
        if self.recompute_flops:
            parts.append(f"recomputes {format_flops(self.recompute_flops)}")
        return " · ".join(parts)

    __repr__ = __str__


def memory_profile(trace: Trace, accounting: str = "fundamental") -> MemoryProfile:
    """The peak of the traced step and what is live at it, by one of the two accountings."""
    notes = list(trace.warnings)
    stored = recomputed = 0
    if accounting == "fundamental":
        graph = forward_graph(trace)
        events = schedule(graph, trace.checkpoint)
        timeline = fundamental_timeline(trace, graph, events)
        recomputed = recompute_flops(graph, events)
        if graph.unknown:
            note = (
                "counted conservatively, every input and output kept, for want of a rule: "
                + ", ".join(graph.unknown)
            )
            notes.append(note)
            warnings.warn(note, UnknownOperationWarning, stacklevel=2)
        if any(op.phase is Phase.RECOMPUTE for op in trace.ops):
            notes.append(
                "the model runs parts of itself again in the backward pass; the fundamental "
                "accounting counts it as if it kept them, the device accounting as it is"
            )
        boundary = next((i for i, e in enumerate(events) if e.kind is not Kind.FORWARD), 0)
    elif accounting == "device":
        timeline = device_timeline(trace)
        recomputed = dense_flops(trace, Phase.RECOMPUTE)
        boundary = next((i for i, o in enumerate(trace.ops) if o.phase is not Phase.FORWARD), 0)
    else:
        raise InputError(
            f"unknown accounting {accounting!r}", hint="one of " + ", ".join(ACCOUNTINGS)
        )
    peak = timeline.peak_instant
    roles = timeline.roles_at(peak)
    stored = timeline.roles_at(boundary)[Role.FORWARD_ACTIVATION] if timeline.labels else 0
    operation, phase, module = timeline.labels[peak]
    return MemoryProfile(
        accounting=accounting,
        device=trace.device,
        timeline=timeline,
        bytes_by_role=roles,
        bytes_by_module=timeline.modules_at(peak),
        peak_bytes=sum(roles.values()),
        peak_operation=operation,
        peak_phase=phase,
        peak_module=module,
        stored_activation_bytes=stored,
        forward_flops=dense_flops(trace, Phase.FORWARD),
        backward_flops=dense_flops(trace, Phase.BACKWARD),
        recompute_flops=recomputed,
        parameters=sum(p.numel for p in trace.parameters),
        sparsifiable_parameters=sum(p.numel for p in trace.parameters if p.sparsifiable),
        warnings=tuple(notes),
    )
