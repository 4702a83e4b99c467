"""How far are planned schedules from the exact optimum, on random chains and small graphs?

python benchmarks/plan_optimality.py                 # 200 instances, some minutes
python benchmarks/plan_optimality.py --instances 20
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import scipy

from shoestring.memory.work import Work
from shoestring.techniques.checkpointing.solve import front, solve
from shoestring.techniques.checkpointing.stages import Chain, Option, Stage, plain

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from reference.exact import Class, optimum

FRACTIONS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
"""Budgets between the smallest that `front` finds (0) and the peak of keeping everything (1)."""
CLASSES: tuple[Class, ...] = ("persistent", "dropping", "parted")
TOLERANCE = 0.03


@dataclass(frozen=True)
class Instance:
    """A chain, and what each of its stages reads: the one before it, in a graph others too."""

    seed: int
    kind: str
    chain: Chain
    reads: tuple[tuple[int, ...], ...]


def random_instance(seed: int, most_blocks: int = 6) -> Instance:
    """Every fourth is a graph. Of the chains half are like networks, and half are like nothing."""
    rng = random.Random(seed)
    kind = ("network", "arbitrary", "network", "graph")[seed % 4]
    count = rng.randint(2, most_blocks) + 2
    outs = [rng.randint(10, 100) for _ in range(count)]
    if kind != "arbitrary":  # neighbors have outputs of a size, and keep several times as much
        for i in range(1, count):
            outs[i] = outs[i - 1] if rng.random() < 0.6 else max(5, outs[i - 1] // 2)
    stages = [_random_stage(rng, i, outs, kind) for i in range(count)]
    reads: list[tuple[int, ...]] = [(i - 1,) if i else () for i in range(count)]
    if kind == "graph":
        for _ in range(rng.randint(1, 2)):
            reader = rng.randrange(2, count)
            source = rng.randrange(0, reader - 1)
            reads[reader] = tuple(sorted({*reads[reader], source}))
        for i in range(count):
            only = all(i not in reads[r] for r in range(i + 2, count))
            stages[i] = replace(stages[i], joins=only)
    chain = Chain(stages[0], tuple(stages[1:-1]), stages[-1], fixed_bytes=rng.randint(0, 500))
    return Instance(seed, kind, chain, tuple(reads))


def _random_stage(rng: random.Random, i: int, outs: list[int], kind: str) -> Stage:
    out, given = outs[i], outs[i - 1] if i else 0
    tape = int(out * rng.uniform(2, 16)) if kind != "arbitrary" else rng.randint(20, 300)
    seconds = rng.uniform(1, 10)
    last_part = rng.uniform(0.5, 1)
    scratch, gradients = rng.randint(0, 2 * out), rng.randint(0, 40)
    options = {}
    for name, share, more in (
        ("keep", 1.0, 0.0),
        ("cheap", rng.uniform(0.3, 0.95), rng.uniform(0.01, 0.3)),
    ):
        kept = int(tape * share) + out
        forward = kept + scratch
        backward = kept + max(given, scratch) + gradients
        options[name] = Option(
            kept_bytes=kept,
            forward_bytes=forward,
            backward_bytes=backward,
            again_bytes=max(forward + out // 2, backward),
            forward=Work(seconds),
            again=Work(seconds * last_part),
            backward=Work(seconds * (2 + more)),
        )
    return Stage(f"block {i}", options, out, out + scratch, out, gradients)


def budgets(chain: Chain, fractions: Sequence[float] = FRACTIONS) -> list[int]:
    """From the least memory that was found towards that of keeping everything."""
    least, most = front(chain)[0].peak_bytes, plain(chain).peak_bytes
    return [int(least + fraction * (most - least)) for fraction in fractions]


def gap(instance: Instance, budget_bytes: int, schedules: Class) -> tuple[float, bool]:
    """Cost of the planned schedule over the optimum, less one; whether the optimum is proved."""
    planned = solve(instance.chain, budget_bytes)
    best = optimum(instance.chain, budget_bytes, reads=instance.reads, schedules=schedules)
    assert planned is not None and best is not None
    return planned.cost / best.cost - 1, best.bound >= best.cost * (1 - 1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    began = time.perf_counter()
    for seed in range(given.instances):
        instance = random_instance(seed)
        for fraction, budget in zip(FRACTIONS, budgets(instance.chain), strict=True):
            for name in CLASSES:
                found, proved = gap(instance, budget, name)
                rows.append(
                    {"seed": seed, "kind": instance.kind, "blocks": len(instance.chain.blocks),
                     "fraction": fraction, "class": name, "gap": found, "proved": proved}
                )  # fmt: skip
    print(f"{given.instances} instances, {time.perf_counter() - began:.0f} s, "
          f"numpy {np.__version__}, scipy {scipy.__version__}")  # fmt: skip
    print("| class | kind | cases | within 3% | median | 95th percentile | worst |"
          " worst above the smallest budget |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for name in CLASSES:
        for kinds in (("network",), ("arbitrary",), ("graph",), ("network", "arbitrary", "graph")):
            chosen = [r for r in rows if r["class"] == name and r["kind"] in kinds]
            gaps = np.array([r["gap"] for r in chosen])
            above = max(r["gap"] for r in chosen if r["fraction"] > 0)
            shown = np.median(gaps), np.percentile(gaps, 95), gaps.max(), above
            print(f"| {name} | {'all' if len(kinds) > 1 else kinds[0]} | {len(gaps)} "
                  f"| {(gaps <= TOLERANCE).mean():.1%} | "
                  + " | ".join(f"{share:.2%}" for share in shown) + " |")  # fmt: skip
    unproved = sum(not r["proved"] for r in rows)
    print(f"{unproved} optima not proved within a minute")
    if given.json:
        given.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
