"""Memory and time of levers beside recomputation: the loss, state, gradients, the host, bits.

    python benchmarks/levers.py                          # on one GPU, all rows
    python benchmarks/levers.py --only 1b --only update  # rows whose name contains one of these
    python benchmarks/levers.py --only "1b compiled" --only "1b + compiled"
    python benchmarks/levers.py --only long              # inputs of recomputed blocks on the host
    python benchmarks/levers.py --tiny --device cpu      # small shapes, to see that it runs

Llama shapes in bf16 with random weights, AdamW, one row a process. "gc" is Hugging Face's gradient
checkpointing; the others recompute every block by `Checkpointing("residual-1")`. "long" is one
sequence of 16,384 tokens, "adapter" trains LoRA of rank 16 beside the projections of attention. A
step is forward, backward and update. Peaks are of a step in steady state after `empty_cache`; times
are medians of three groups of two steps. "update" is the update alone, gradients given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shoestring as ss
from turns import turn

SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "tie_word_embeddings": True, "batch": (2, 2048),
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "tie_word_embeddings": False, "batch": (1, 2048),
    },
    "1b long": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "tie_word_embeddings": True, "batch": (1, 16384),
    },
    "8b adapter long": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "tie_word_embeddings": False, "batch": (1, 16384),
    },
    "8b adapter": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "tie_word_embeddings": False, "batch": (1, 2048),
    },
    "tiny adapter long": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4000,
        "tie_word_embeddings": False, "batch": (1, 1024),
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4000,
        "tie_word_embeddings": True, "batch": (2, 32),
    },
}  # fmt: skip
GC = "gc"
CLIPPED = "all but bits, clipped"
RANK = 16
"""Of the adapters beside q, k, v and o that are trained where a shape's name has "adapter"."""
LONG = (ss.Checkpointing("residual-1"), ss.ChunkedLoss())
LONG_PLANS: dict[str, tuple[ss.Technique, ...]] = {
    "recomputed": LONG,
    "recomputed in pairs": (ss.Checkpointing("residual-2"), ss.ChunkedLoss()),
    "+ inputs on the host": (*LONG, ss.ActivationOffload()),
    "all saved on the host": (ss.ChunkedLoss(), ss.ActivationOffload("all")),
    "+ weights on the host": (*LONG, ss.WeightOffload()),
    "+ 4-bit inputs": (*LONG, ss.ActivationBits(4)),
    "+ 4-bit inputs on the host": (*LONG, ss.ActivationBits(4), ss.ActivationOffload()),
}
"""For shapes of one long sequence."""
ALL = (ss.Checkpointing("residual-1"), ss.ChunkedLoss(), ss.GradientRelease())
PLANS: dict[str, tuple[ss.Technique, ...]] = {
    GC: (),
    "recomputed": (ss.Checkpointing("residual-1"),),
    "+ chunked loss": (ss.Checkpointing("residual-1"), ss.ChunkedLoss()),
    "+ 8-bit state": (ss.Checkpointing("residual-1"), ss.OptimizerState(8)),
    "+ both": (ss.Checkpointing("residual-1"), ss.ChunkedLoss(), ss.OptimizerState(8)),
    "+ released": (ss.Checkpointing("residual-1"), ss.GradientRelease()),
    "all": (*ALL, ss.OptimizerState(8)),
    "all, 4-bit": (*ALL, ss.OptimizerState(4)),
    "+ on the host": (ss.Checkpointing("residual-1"), ss.Offload()),
    "+ on the host, released": (ss.Checkpointing("residual-1"), ss.Offload(), ss.GradientRelease()),
    "all, on the host": (*ALL, ss.OptimizerState(8), ss.Offload()),
    "all, 4-bit, on the host": (*ALL, ss.OptimizerState(4), ss.Offload()),
    "all, weights on the host": (*ALL, ss.OptimizerState(8), ss.Offload(), ss.WeightOffload()),
    "compiled blocks": (ss.CompiledBlocks(),),
    "+ compiled blocks": (ss.Checkpointing("residual-1"), ss.CompiledBlocks()),
    "8-bit activations": (ss.ActivationBits(8),),
    "4-bit activations": (ss.ActivationBits(4),),
    "+ 4-bit activations": (ss.Checkpointing("residual-1"), ss.ActivationBits(4)),
    "+ inputs on the host": (ss.Checkpointing("residual-1"), ss.ActivationOffload()),
    CLIPPED: ALL,
}


def build(shape: str, device: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model on the device, in bf16, and a batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = dict(SHAPES[shape])
    size = settings.pop("batch")
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(LlamaConfig(**settings, use_cache=False))
    finally:
        torch.set_default_dtype(before)
    if "adapter" in shape:
        add_adapters(model)
    words = torch.randint(settings["vocab_size"], size, device=device)
    return model.train(), {"input_ids": words, "labels": words}


class Adapter(nn.Module):
    """A frozen linear layer, and beside it a product of two thin matrices that is trained."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        like: dict[str, Any] = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        self.down = nn.Linear(layer.in_features, RANK, bias=False, **like)
        self.up = nn.Linear(RANK, layer.out_features, bias=False, **like)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) + self.up(self.down(x))
        return out


def add_adapters(model: nn.Module) -> None:
    """Train adapters beside the projections of attention, and nothing else."""
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        above, _, name = path.rpartition(".")
        if isinstance(module, nn.Linear) and name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(model.get_submodule(above), name, Adapter(module))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Hugging Face's own."""
    value: torch.Tensor = model(**batch).loss
    return value


def wait(device: str) -> None:
    """For the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(run: Callable[[], object], device: str, groups: int = 3, each: int = 2) -> float:
    """Seconds of one call: the median of some groups."""
    found = []
    with turn():
        for _ in range(groups):
            wait(device)
            start = time.perf_counter()
            for _ in range(each):
                run()
            wait(device)
            found.append((time.perf_counter() - start) / each)
    return statistics.median(found)


def peaks(run: Callable[[], object], device: str) -> dict[str, float]:
    """GB allocated and reserved at most in one call."""
    if device != "cuda":
        return {"allocated_gb": 0.0, "reserved_gb": 0.0}
    wait(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    wait(device)
    return {
        "allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
        "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
    }


def plans_for(shape: str) -> dict[str, tuple[ss.Technique, ...]]:
    """By name."""
    return LONG_PLANS if "long" in shape else PLANS


def step_row(shape: str, plan: str, device: str, eager: bool) -> dict[str, Any]:
    """One way to train one shape."""
    model, batch = build(shape, device)
    chosen = plans_for(shape)[plan]
    quantized = any(isinstance(t, ss.OptimizerState) for t in chosen)
    settings = {} if quantized else {"fused": True, "capturable": device == "cuda"}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, **settings)
    predicted = 0.0
    if plan == GC:
        arguments = {"use_reentrant": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)

        def run() -> float | torch.Tensor:
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value.detach()
    else:
        from shoestring.step.predict import predict_step

        about: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "device": device}
        predicted = predict_step(chosen, model, batch, **about).peak_bytes / 1e9
        clip = 1.0 if plan == CLIPPED else None
        step = ss.apply(chosen, model, optimizer, loss=loss, clip=clip)
        step.use_graph(not eager)

        def run() -> float | torch.Tensor:
            return step(batch)

    losses = [float(run()) for _ in range(4)]
    row = {
        "ms": 1e3 * timed(run, device), **peaks(run, device), "predicted_gb": predicted,
        "loss": losses,
    }  # fmt: skip
    if plan != GC:
        row["captured"] = step.captured
        if device == "cuda":
            # A replayed graph allocates nothing: its pool is what the capture needed.
            row["allocated_gb"] = max(row["allocated_gb"], step.captured_peak_bytes / 1e9)
    return row


def update_row(shape: str, bits: int, device: str, eager: bool) -> dict[str, Any]:
    """The update alone; the gradients are there."""
    model, _ = build(shape, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    step = ss.apply([ss.OptimizerState(bits)], model, optimizer, loss=loss)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    update = step._setup.update
    for _ in range(3):
        update()
    wait(device)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    row: dict[str, Any] = {"ms": 1e3 * timed(update, device, each=5)}
    if device == "cuda" and not eager:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            update()
        row["captured_ms"] = 1e3 * timed(graph.replay, device, each=5)
    found = peaks(update, device)
    row.update(found, extra_mb=found["allocated_gb"] * 1e3 - before / 1e6)
    count = sum(p.numel() for p in model.parameters())
    state = sum(t.nbytes for s in optimizer.state.values() for k, t in s.items() if k != "step")
    row.update(parameters=count, bytes_a_parameter=state / count)
    moved = 3 * 2 * count + 2 * state
    row["gb_per_second"] = moved / min(row["ms"], row.get("captured_ms", row["ms"])) / 1e6
    return row


def rows(tiny: bool) -> dict[str, tuple[Any, ...]]:
    """Name → what to call."""
    made: dict[str, tuple[Any, ...]] = {}
    for shape in (s for s in SHAPES if ("tiny" in s) == tiny):
        for plan in plans_for(shape):
            made[f"{shape} {plan}"] = step_row, shape, plan
        if "long" in shape:
            continue
        for bits in (8, 4):
            made[f"{shape} update {bits}-bit"] = update_row, shape, bits
    return made


def text(name: str, row: dict[str, Any]) -> str:
    """One line of the table."""
    if "error" in row:
        return f"| {name} | {row['error']} |"
    cells = [f"{row['allocated_gb']:.2f} / {row['reserved_gb']:.2f} GB", f"{row['ms']:.1f} ms"]
    if "captured_ms" in row:
        cells.append(f"captured {row['captured_ms']:.1f} ms")
    if row.get("predicted_gb"):
        cells.append(f"predicted {row['predicted_gb']:.2f} GB")
    if "captured" in row:
        cells.append("captured" if row["captured"] else "eager")
    if "bytes_a_parameter" in row:
        cells.append(f"{row['bytes_a_parameter']:.3f} bytes of state a parameter")
        cells.append(f"+{row['extra_mb']:.2f} MB")
        cells.append(f"{row['gb_per_second']:.0f} GB/s")
    if "loss" in row:
        cells.append("loss " + " ".join(f"{value:.3f}" for value in row["loss"]))
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    """Each row in a process of its own, then the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help="part of a row's name")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--eager", action="store_true", help="capture no CUDA graph")
    parser.add_argument("--row", help="run this one, here, and print JSON")
    given = parser.parse_args()
    every = rows(given.tiny)
    if given.row is not None:
        warnings.simplefilter("ignore")
        run, *arguments = every[given.row]
        print(json.dumps(run(*arguments, given.device, given.eager)))
        return
    table = []
    for name in every:
        if given.only and not any(part in name for part in given.only):
            continue
        command = [sys.executable, __file__, "--row", name, "--device", given.device]
        command += ["--tiny"] * given.tiny + ["--eager"] * given.eager
        done = subprocess.run(command, capture_output=True, text=True)
        try:
            row = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            print(done.stderr[-3000:], file=sys.stderr)
            row = {"error": last[:200]}
        table.append(text(name, row))
        print(table[-1], file=sys.stderr, flush=True)
    versions = f"torch {torch.__version__}"
    if given.device == "cuda":
        versions += f", {torch.cuda.get_device_name()}"
    print(f"\n{versions}: allocated / reserved, a step\n")
    print("\n".join(table))


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.exit(1)
