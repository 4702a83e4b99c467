"""What the allocator takes from a card: never less than is allocated, and what makes it more."""

import pytest
import torch
from torch import nn

from shoestring.memory.reserved import reserved
from shoestring.planning.margin import LEAST, Margin
from shoestring.planning.planner import Planner
from shoestring.step.trace_step import trace_plan
from shoestring.techniques.plan import Plan

MIB = 2**20


def trace_of(width=1024, rows=4096, depth=4, optimizer=None):
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
    )
    batch = torch.empty(rows, width, device="meta")
    return trace_plan(
        Plan(), model.to("meta"), batch, loss=lambda m, b: m(b).mean(), optimizer=optimizer,
        device="cuda",
    )  # fmt: skip


def test_it_is_no_less_than_what_is_allocated_and_state_adds_to_it():
    trace = trace_of()
    bare, held = reserved(trace), reserved(trace_of(optimizer="adamw"), state_first=True)
    gradients = sum(s.nbytes for s in trace.storages if s.role == "gradient")
    assert bare.eager_bytes > gradients
    assert held.eager_bytes >= bare.eager_bytes + 2 * gradients - 40 * MIB
    assert held.eager_bytes % (2 * MIB) == 0


def test_a_smaller_last_part_takes_no_less():
    trace = trace_of(optimizer="adamw")
    assert reserved(trace, rest=0.7).eager_bytes >= reserved(trace).eager_bytes


def test_eager_steps_before_a_capture_are_held_to_the_limit():
    trace = trace_of(optimizer="adamw")
    free = reserved(trace)
    held = reserved(trace, limit_bytes=free.eager_bytes - 40 * MIB)
    assert held.captured_bytes <= free.captured_bytes


def planner(**given):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(3)))
    return Planner(
        model.to("meta"), torch.empty(8192, 256, device="meta"),
        loss=lambda m, b: m(b).square().mean(), optimizer=torch.optim.AdamW(model.parameters()),
        device="cuda", **given,
    )  # fmt: skip


def test_a_budget_is_of_what_is_reserved_unless_it_says_allocated():
    of_card, of_tensors = planner(), planner(budget_of="allocated")
    least, less = of_card.smallest_bytes(), of_tensors.smallest_bytes()
    assert less < least
    plan = of_card.plan(least)
    assert plan.predicted.reserved_bytes <= least and plan.budget_of == "reserved"
    assert plan.predicted.reserved_bytes >= plan.predicted.peak_bytes
    assert of_tensors.plan(less).predicted.reserved_bytes == 0


@pytest.mark.slow
def test_the_smallest_budget_is_one_that_can_be_planned_for():
    made = planner(allow="lossless")
    assert made.plan(made.smallest_bytes()).kind == "lossless"


@pytest.mark.parametrize("known", [0, 600, 950, 2000])
@pytest.mark.parametrize("needed", [500, 700, 1000, 123_456])
def test_a_budget_for_what_is_needed_has_room_for_it(known, needed):
    margin = Margin(0.04, known)
    budget = margin.budget_for(needed)
    assert margin.limit(budget) >= needed
    assert LEAST <= margin.fraction(budget) <= 0.04
