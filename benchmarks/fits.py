"""Predicted fits against what a GPU really takes: language and vision, LoRA, recomputation, 8 bits.

    python benchmarks/fits.py                 # on the GPU; writes nothing
    python benchmarks/fits.py --only llama    # cases whose name has this
    python benchmarks/fits.py --predict       # predictions alone, on any machine

Each case is built from a configuration with random weights, predicted without a GPU's help, then
trained for four steps in a process of its own. Compared are the predicted bytes with
`torch.cuda.max_memory_reserved` of the steps (and allocated, to tell why). The last case asks for
the longest context of an 8B LoRA in 24 GB and runs it, and 5% more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import shoestring as ss
from shoestring.integrations.configurations import DTYPES, Configured, _with_lora, loss_of
from shoestring.planning.planner import Planner
from shoestring.techniques.plan import Plan
from shoestring.trace.fakes import OPTIMIZERS

LLAMA_1B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
    "max_position_embeddings": 131072, "dtype": "bfloat16",
}  # fmt: skip
LLAMA_8B = {
    **LLAMA_1B, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936,
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    "dtype": "bfloat16",
}  # fmt: skip
VIT_L = {
    "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 1024,
    "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
    "image_size": 224, "patch_size": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One step that is predicted and run."""

    name: str
    config: dict[str, Any] = field(repr=False)
    batch: int = 1
    tokens: int = 2048
    lora: str | None = None
    optimizer: str = "adamw"
    share: float | None = None
    """Of the plain step's bytes: the budget of a lossless plan; None for the plain step."""
    dtype: str | None = None


CASES = [
    Case("llama 1B, 2 × 2048", LLAMA_1B, batch=2),
    Case("llama 1B, 2 × 2048, planned to 75%", LLAMA_1B, batch=2, share=0.75),
    Case("llama 1B, LoRA r=16, 4 × 2048", LLAMA_1B, batch=4, lora="r=16"),
    Case(
        "llama 1B, LoRA all-linear, planned to 50%", LLAMA_1B, batch=4, share=0.5,
        lora="r=16,targets=all-linear",
    ),
    Case("llama 8B, LoRA r=16, 1 × 2048", LLAMA_8B, lora="r=16"),
    Case("llama 8B, LoRA r=16, planned to 75%", LLAMA_8B, lora="r=16", share=0.75),
    Case("qwen 0.5B, 8 × 1024", QWEN, batch=8, tokens=1024),
    Case("qwen 0.5B, planned to 60%", QWEN, batch=8, tokens=1024, share=0.6),
    Case("qwen 0.5B, 8-bit AdamW", QWEN, batch=4, tokens=1024, optimizer="adamw8bit"),
    Case("ViT-L, 32 images, FP32", VIT_L, batch=32),
    Case("ViT-L, 32 images, planned to 50%", VIT_L, batch=32, share=0.5),
    Case("ViT-L, 64 images, BF16, SGD", VIT_L, batch=64, dtype="bf16", optimizer="sgd"),
]  # fmt: skip


def configured(case: Case, folder: str) -> Configured:
    Path(folder, "config.json").write_text(json.dumps(case.config))
    return Configured(
        f"hf:{folder}", tokens=case.tokens, batch=case.batch, lora=case.lora, dtype=case.dtype
    )


def predicted(case: Case, given: Configured) -> tuple[Plan, int]:
    """The plan and the bytes a budget must hold for it, without asking a GPU."""
    model, batch = given.build()
    planner = Planner(
        model, batch, loss=loss_of, optimizer=case.optimizer, allow="lossless", device="cuda"
    )
    plain = planner.estimates.plain.needed_bytes
    if case.share is None:
        return Plan(), plain
    plan = planner.plan(int(case.share * plain))
    return plan, plan.predicted.needed_bytes


def measured(case: Case, given: Configured, plan: Plan) -> dict[str, int]:
    """Four real steps."""
    kind, sees = given._kind
    dtype = DTYPES[case.dtype or "fp32"] if case.dtype else given._configuration.dtype
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = kind._from_config(given._configuration, dtype=dtype or torch.float32)
    model.config.use_cache = False
    model.train()
    if case.lora is not None:
        model.requires_grad_(False)
        model = _with_lora(model, case.lora)
    if sees == "images":
        pixels = torch.randn(case.batch, 3, 224, 224, device="cuda", dtype=dtype or torch.float32)
        batch = {"pixel_values": pixels, "labels": torch.zeros(case.batch, dtype=int).cuda()}
    else:
        words = torch.randint(1000, (case.batch, case.tokens), device="cuda")
        batch = {"input_ids": words, "labels": words.clone()}
    trained = [p for p in model.parameters() if p.requires_grad]
    step = ss.apply(plan, model, OPTIMIZERS[case.optimizer](trained), loss=loss_of)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        step(batch)
    torch.cuda.synchronize()
    return {
        "reserved": torch.cuda.max_memory_reserved(),
        "allocated": torch.cuda.max_memory_allocated(),
    }


def one(number: int, predict_only: bool) -> dict[str, Any]:
    case = CASES[number]
    with tempfile.TemporaryDirectory() as folder:
        given = configured(case, folder)
        start = time.perf_counter()
        plan, needed = predicted(case, given)
        seconds = time.perf_counter() - start
        found = {} if predict_only else measured(case, given, plan)
    return {"name": case.name, "plan": plan.short(), "predicted": needed, "s": seconds, **found}


def longest(tokens: int | None) -> dict[str, Any]:
    """The longest context named for 24 GB, or a run of so many tokens within them."""
    case = Case("llama 8B, LoRA r=16", LLAMA_8B, lora="r=16", tokens=tokens or 2048)
    with tempfile.TemporaryDirectory() as folder:
        given = configured(case, folder)
        found = ss.will_it_fit(given, "24 GB")
        if tokens is None:
            return {"tokens": found.longest_context}
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(24e9 / total)
        model, batch = given.build()
        plan = ss.plan(
            model, batch, loss=loss_of, optimizer="adamw", device="cuda", allow="lossless",
            budget="24 GB",
        )  # fmt: skip
        return measured(case, given, plan)


def child(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, timeout=560
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:100]}
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--longest", action="store_true", help="the longest context, too")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.case is not None:
        print(json.dumps(one(given.case, given.predict)))
        return
    if given.tokens is not None:
        print(json.dumps(longest(given.tokens or None)))
        return
    rows, off = [], []
    for number, case in enumerate(CASES):
        if given.only not in case.name:
            continue
        found = child("--case", str(number), *(["--predict"] if given.predict else []))
        rows.append({**asdict(case), **found, "name": case.name})
        print(f"{case.name}: {found}", file=sys.stderr, flush=True)
    print(f"{'case':44} {'predicted':>9} {'reserved':>9} {'alloc.':>9} {'off':>7}  plan")
    for row in rows:
        if "error" in row:
            print(f"{row['name']:44} {row['error']}")
            continue
        gigabytes = [row.get(key, 0) / 1e9 for key in ("predicted", "reserved", "allocated")]
        error = row["predicted"] / row["reserved"] - 1 if "reserved" in row else float("nan")
        off.append(error)
        numbers = " ".join(f"{g:9.2f}" for g in gigabytes)
        print(f"{row['name']:44} {numbers} {100 * error:+6.1f}%  {row['plan'][:40]}")
    if off:
        middle = sorted(off)[len(off) // 2]
        print(f"below: {sum(e < 0 for e in off)} of {len(off)}; median {100 * middle:+.1f}%")
    if given.longest:
        tokens = child("--tokens", "0")["tokens"]
        print(f"longest context for 24 GB: {tokens}: {child('--tokens', str(tokens))}")
        more = int(1.05 * tokens)
        print(f"5% more, {more}: {child('--tokens', str(more))}")


if __name__ == "__main__":
    main()
