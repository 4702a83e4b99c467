"""How long planning takes, and its memory, for models of up to 405 billion parameters.

    OMP_NUM_THREADS=1 python benchmarks/plan_time.py [blocks-100 | llama-70b | phi …] [--json FILE]
    python benchmarks/plan_time.py llama-8b --device cuda --budgets 0.55 35GB 20GB

Nothing is allocated for the models. Seconds are of one process, for a planner and one plan at each
share of the plain peak; `solver` is the dynamic program's part of it, and `steps` are the planned
steps that were traced whole. Beside the shapes here, every model of `card_models` can be named. A
budget that no plan fits is timed up to its refusal.
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
from card_models import SUBJECTS as CARD
from plan_holds import provenance
from shoestring.planning.cost import NOMINAL
from shoestring.planning.device_estimates import DeviceEstimates
from shoestring.planning.planner import Planner
from shoestring.techniques.checkpointing import scheduler
from shoestring.units import parse_size

SHARES = ("0.9", "0.7", "0.5")


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


def llama_shape(width: int, inner: int, layers: int, heads: int) -> Callable[[], Any]:
    """Of Llama 3's sizes in bf16, one sequence of 2,048 tokens."""

    def build() -> tuple[nn.Module, Any, Callable[..., torch.Tensor]]:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=8, vocab_size=128256, use_cache=False,
        )  # fmt: skip
        tokens = torch.zeros(1, 2048, dtype=torch.int64)
        batch = {"input_ids": tokens, "labels": tokens}
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        return model, batch, lambda model, batch: model(**batch).loss

    return build


SUBJECTS: dict[str, Callable[[], Any]] = {
    "blocks-100": deep,
    "llama-7b": llama,
    "llama-8b": llama_shape(4096, 14336, 32, 32),
    "llama-70b": llama_shape(8192, 28672, 80, 64),
    "llama-405b": llama_shape(16384, 53248, 126, 128),
    **{name: (lambda s=s: s.build(False)) for name, s in CARD.items()},  # type: ignore[misc]
}


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="*", choices=[*SUBJECTS, []], default=[])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--budgets", nargs="*", default=SHARES, help="shares of plain, or sizes")
    parser.add_argument("--allow", help="as for shoestring plan")
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    print(f"{'':<12}{'budget':>7}{'wall':>8}{'CPU':>8}{'solver':>8}{'steps':>6}{'memory':>9}  plan")
    for name in arguments.model or ("blocks-100", "llama-7b"):
        for budget in arguments.budgets:
            rows.append(planned(name, budget, arguments.device, arguments.allow))
            print(line(rows[-1]), flush=True)
    if arguments.json:
        made = {"made": provenance(), "rows": rows}
        Path(arguments.json).write_text(json.dumps(made, indent=1) + "\n")


def planned(name: str, budget: str, device: str, allow: str | None) -> dict[str, Any]:
    """One plan from nothing."""
    with torch.device("meta"):
        model, batch, loss = SUBJECTS[name]()
    solver, traced = timed(scheduler, "solve"), timed(DeviceEstimates, "_traced_prediction")
    wall, cpu = time.perf_counter(), time.process_time()
    planner = Planner(
        model, batch, loss=loss, optimizer="adamw", device=device, costs=NOMINAL[device],
        allow=allow,
    )  # fmt: skip
    plain = planner.estimates.plain.needed_bytes
    room = int(float(budget) * plain) if budget.replace(".", "").isdigit() else parse_size(budget)
    try:
        plan = planner.plan(room).short()
    except ss.BudgetError as error:
        plan = error.message
    return {
        "name": name,
        "budget": budget,
        "wall_seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
        "solver_seconds": sum(solver),
        "steps": len(traced),
        "memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "plan": plan,
    }


def timed(place: Any, name: str) -> list[float]:
    """The seconds of each call of a function from now on."""
    run, taken = getattr(place, name), []
    run = getattr(run, "inner", run)

    def wrapped(*args: Any) -> Any:
        start = time.perf_counter()
        try:
            return run(*args)
        finally:
            taken.append(time.perf_counter() - start)

    wrapped.inner = run  # type: ignore[attr-defined]
    setattr(place, name, wrapped)
    return taken


def line(row: dict[str, Any]) -> str:
    """Of the table."""
    return (
        f"{row['name']:<12}{row['budget']:>7}{row['wall_seconds']:>6.1f} s"
        f"{row['cpu_seconds']:>6.1f} s{row['solver_seconds']:>6.2f} s"
        f"{row['steps']:>6}{row['memory_bytes'] / 1e9:>6.2f} GB  {row['plan']}"
    )


if __name__ == "__main__":
    main()
