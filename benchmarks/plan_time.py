"""How long planning takes, and its memory: a network of 100 blocks, and a Llama of 7 billion.

    OMP_NUM_THREADS=2 python benchmarks/plan_time.py [blocks-100 | llama-7b] [--json FILE]

Nothing is allocated for the models. Seconds are of one process, for a planner and one plan at each
share of the plain peak; `solver` is the dynamic program's part of it.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoestring as ss
from plan_holds import provenance
from shoestring.lab.target import _building
from shoestring.planning import device_estimates as estimates
from shoestring.planning.cost import NOMINAL
from shoestring.planning.planner import Planner

SHARES = (0.9, 0.7, 0.5)


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Deep(nn.Module):
    """A hundred of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def deep() -> tuple[nn.Module, Any, Callable[..., torch.Tensor]]:
    """On vectors of 64, 2,048 at once."""
    return Deep(), torch.randn(2048, 64), lambda model, batch: model(batch)


def llama() -> tuple[nn.Module, Any, Callable[..., torch.Tensor]]:
    """Of the size of Llama-2-7B, four sequences of 2,048 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=2048))
    tokens = torch.zeros(4, 2048, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}
    return model, batch, lambda model, batch: model(**batch).loss


SUBJECTS = {"blocks-100": deep, "llama-7b": llama}


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="*", choices=[*SUBJECTS, []], default=[])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    print(f"{'':<12}{'share':>6}{'wall':>8}{'CPU':>8}{'solver':>8}{'memory':>9}  plan")
    for name in arguments.model or SUBJECTS:
        for share in SHARES:
            rows.append(planned(name, share, arguments.device))
            print(line(rows[-1]), flush=True)
    if arguments.json:
        made = {"made": provenance(), "rows": rows}
        Path(arguments.json).write_text(json.dumps(made, indent=1) + "\n")


def planned(name: str, share: float, device: str) -> dict[str, Any]:
    """One plan from nothing."""
    with _building():
        model, batch, loss = SUBJECTS[name]()
    solver = timed("solve")
    wall, cpu = time.perf_counter(), time.process_time()
    planner = Planner(
        model, batch, loss=loss, optimizer="adamw", device=device, costs=NOMINAL[device]
    )
    try:
        plan = planner.plan(int(share * planner.estimates.plain.needed_bytes)).short()
    except ss.BudgetError as error:
        plan = error.message
    return {
        "name": name,
        "share": share,
        "wall_seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
        "solver_seconds": sum(solver),
        "memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "plan": plan,
    }


def timed(name: str) -> list[float]:
    """The seconds of each call of the solver from now on."""
    run, taken = getattr(estimates, name), []
    run = getattr(run, "inner", run)

    def wrapped(*args: Any) -> Any:
        start = time.perf_counter()
        try:
            return run(*args)
        finally:
            taken.append(time.perf_counter() - start)

    wrapped.inner = run  # type: ignore[attr-defined]
    setattr(estimates, name, wrapped)
    return taken


def line(row: dict[str, Any]) -> str:
    """Of the table."""
    return (
        f"{row['name']:<12}{row['share']:>6.0%}{row['wall_seconds']:>6.1f} s"
        f"{row['cpu_seconds']:>6.1f} s{row['solver_seconds']:>6.2f} s"
        f"{row['memory_bytes'] / 1e9:>6.2f} GB  {row['plan']}"
    )


if __name__ == "__main__":
    main()
