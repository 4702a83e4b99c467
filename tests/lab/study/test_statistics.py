"""Means, intervals and fronts, by hand and against brute force."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoestring.lab.study.statistics import at_equal_memory, best_within, pareto_front, sample


def test_few_trials_have_students_interval():
    found = sample([94.0, 94.2, 94.7])
    # Deviations −0.3, −0.1, 0.4: the variance with n − 1 is 0.26 / 2.
    assert found.mean == pytest.approx(94.3)
    assert found.interval == pytest.approx(4.3027 * math.sqrt(0.13 / 3))
    assert found.n == 3


@pytest.mark.parametrize("n", [2, 3, 5, 9, 10, 30])
def test_width_is_students_t_below_ten(n):
    stats = pytest.importorskip("scipy.stats")
    values = [math.sin(k) for k in range(n)]
    wide = stats.t.ppf(0.975, n - 1) if n < 10 else 1.96
    assert sample(values).interval == pytest.approx(wide * stats.sem(values), rel=1e-4)


def test_one_trial_has_no_interval_and_none_no_mean():
    assert sample([93.0]).interval is None and sample([93.0]).mean == 93.0
    assert sample([]).mean is None


POINTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=12)


def beats(a, b):
    return a[0] <= b[0] and a[1] >= b[1] and a != b


@given(POINTS)
def test_front_is_what_nobody_beats(points):
    front = pareto_front(points)
    unbeaten = {p for p in points if not any(beats(other, p) for other in points)}
    assert {points[i] for i in front} == unbeaten
    assert len(front) == len(unbeaten), "equal points are in it once"
    assert [points[i][0] for i in front] == sorted(points[i][0] for i in front)


@given(POINTS, st.integers(0, 10))
def test_best_within_a_budget(points, budget):
    fitting = [p for p in points if p[0] <= budget]
    found = best_within(points, budget)
    if not fitting:
        assert found is None
    else:
        assert points[found] == min(fitting, key=lambda p: (-p[1], p[0]))


def test_what_is_no_number_beats_nothing():
    points = [(1.0, 5.0), (1.0, math.nan), (1.0, 9.0)]
    assert pareto_front(points) == [2] and best_within(points, 1.0) == 2


def test_families_at_equal_memory():
    families = {"sparse": [(2, 90), (5, 94)], "narrow": [(1, 85), (5, 93), (6, 95)]}
    assert at_equal_memory(families) == [
        (1, {"sparse": None, "narrow": 0}),
        (2, {"sparse": 0, "narrow": 0}),
        (5, {"sparse": 1, "narrow": 1}),
        (6, {"sparse": 1, "narrow": 2}),
    ]
