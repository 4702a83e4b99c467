"""The mixed integer program and the dynamic program agree."""

from __future__ import annotations

import pytest

from plan_optimality import TOLERANCE, budgets, gap, random_instance
from reference.exact import optimum
from shoestring.techniques.checkpointing.solve import solve
from shoestring.techniques.checkpointing.stages import plain


@pytest.mark.parametrize("seed", range(20))
def test_planned_schedules_are_within_3_percent_of_the_optimum(seed: int) -> None:
    """A part of benchmarks/plan_optimality.py, which runs 200 instances."""
    instance = random_instance(seed, most_blocks=4)
    for budget in budgets(instance.chain, (0.0, 0.3, 0.7)):
        for schedules in ("persistent", "dropping"):
            found, proved = gap(instance, budget, schedules)  # type: ignore[arg-type]
            assert proved
            assert -1e-6 <= found <= (1e-6 if schedules == "persistent" else TOLERANCE)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_fits_where_the_planner_finds_nothing(seed: int) -> None:
    instance = random_instance(seed, most_blocks=4)
    least = budgets(instance.chain, (0.0,))[0]
    assert solve(instance.chain, least - 1) is None
    assert optimum(instance.chain, least - 1, reads=instance.reads) is None


def test_with_all_memory_the_optimum_is_the_plain_step() -> None:
    chain = random_instance(5).chain
    kept = plain(chain)
    found = optimum(chain, kept.peak_bytes)
    assert found is not None and found.cost == pytest.approx(kept.cost)
    less = optimum(chain, kept.peak_bytes - 1)
    assert less is not None and less.cost > kept.cost


@pytest.mark.parametrize("seed", [1, 9])
def test_a_larger_class_is_never_worse(seed: int) -> None:
    instance = random_instance(seed, most_blocks=4)
    for budget in budgets(instance.chain, (0.1, 0.4)):
        costs = []
        for schedules in ("persistent", "dropping", "parted"):
            best = optimum(instance.chain, budget, schedules=schedules)  # type: ignore[arg-type]
            assert best is not None
            costs.append(best.cost)
        assert costs[0] >= costs[1] - 1e-6 and costs[1] >= costs[2] - 1e-6
