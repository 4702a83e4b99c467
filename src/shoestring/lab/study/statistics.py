"""Means with their interval, and fronts of memory and score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NORMAL_95 = 1.96
"""Standard errors on either side of a mean of many: the report's 95% interval (Appendix A.1)."""
STUDENT_95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060)
"""The same for n of 2 to 9, where the deviation itself is a guess: Student's t with n − 1."""

Point = tuple[float, float]
"""Memory in bytes, and a score that is better the larger it is."""


@dataclass(frozen=True)
class Sample:
    """n trials: their mean, and half the width of its 95% interval where n is above 1."""

    n: int
    mean: float | None
    interval: float | None
    values: tuple[float, ...] = ()


def sample(values: Sequence[float]) -> Sample:
    """Mean and half of its 95% interval: by Student's t below ten trials, else 1.96 errors.

    The deviation is the sample's, with n − 1. The report takes 1.96 for its five and three trials,
    which covers less than 95%: about 88% of five, 81% of three.
    """
    n = len(values)
    if n == 0:
        return Sample(0, None, None)
    mean = math.fsum(values) / n
    if n == 1:
        return Sample(1, mean, None, tuple(values))
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    width = STUDENT_95[n - 2] if n - 2 < len(STUDENT_95) else NORMAL_95
    return Sample(n, mean, width * math.sqrt(variance / n), tuple(values))


def pareto_front(points: Sequence[Point]) -> list[int]:
    """The points that no other one beats: none has as little memory and a better score.

    Indices by rising memory. Of points that are equal in both, the first one is in the front; one
    that is not a number is not.
    """
    real = [i for i, point in enumerate(points) if not any(map(math.isnan, point))]
    order = sorted(real, key=lambda i: (points[i][0], -points[i][1], i))
    front: list[int] = []
    best = -math.inf
    for index in order:
        if points[index][1] > best:
            front.append(index)
            best = points[index][1]
    return front


def best_within(points: Sequence[Point], budget_bytes: float) -> int | None:
    """The best score within the budget, of equals the one with the least memory."""
    front = [index for index in pareto_front(points) if points[index][0] <= budget_bytes]
    return front[-1] if front else None


def at_equal_memory(
    families: Mapping[str, Sequence[Point]],
) -> list[tuple[float, dict[str, int | None]]]:
    """For the memory of every point of any family: the best each family has within it.

    A step, not a line between two points: between them nothing was trained.
    """
    memories = sorted({memory for points in families.values() for memory, _ in points})
    return [
        (memory, {name: best_within(points, memory) for name, points in families.items()})
        for memory in memories
    ]
