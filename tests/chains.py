"""The chain of blocks of a model, as the planner sees it."""

from __future__ import annotations

from typing import Any

from torch import nn

from shoestring.step.trace_step import trace_plan
from shoestring.techniques import Checkpointing
from shoestring.techniques.checkpointing.block_chain import estimate_chain
from shoestring.techniques.checkpointing.stages import Chain
from shoestring.techniques.plan import Plan
from shoestring.trace.graph import Trace


def chain_of(
    techniques: Any,
    model: nn.Module,
    batch: Any,
    *,
    loss: Any,
    optimizer: Any,
    device: str = "cpu",
    **others: Any,
) -> Chain:
    """Of the step that the techniques make."""

    def trace_step(plan: Plan, *, optimizer: Any = None, **more: Any) -> Trace:
        given = {"loss": loss, "optimizer": optimizer, "device": device}
        return trace_plan(plan, model, batch, **given, **more)

    plan = Plan(techniques)
    given = {"plan": plan, "optimizer": optimizer, **others}
    return estimate_chain(trace_step, model, Checkpointing.of, **given)
