"""Predicted fits against what a GPU really takes: LoRA, NF4, 8 bits, recomputation, Liger; plans.

    python benchmarks/fits.py --longest --predict --predictions fits.json    # on any machine
    python benchmarks/fits.py --longest --predictions fits.json              # on one GPU of 80 GB

Each case is built from a configuration with random weights. All are predicted first, by processes
that see no GPU, and kept in the file; a case that stands there is not predicted again. Then each
is trained for four steps in a process of its own, one after the other: without a plan by a plain
loop of PyTorch. Compared are the predicted bytes with `torch.cuda.max_memory_reserved` of the steps
(and allocated, to tell why). `--longest` asks for the longest context of an 8B LoRA in 24 GB and
runs it, and 5% more, by the same plan and with no more memory than that. `--only TEXT` takes the
cases whose name has it.

It needs peft, bitsandbytes and liger-kernel. For a machine without them:

    pip install --no-deps --target carry/site peft bitsandbytes liger-kernel
    PYTHONPATH=src:carry/site python benchmarks/fits.py …
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import shoestring as ss
from shoestring.integrations.configurations import DTYPES, Configured, _with_lora, loss_of
from shoestring.integrations.sizes import Sizes
from shoestring.memory.reserved import reserved
from shoestring.planning.planner import Planner
from shoestring.step.trace_step import trace_plan
from shoestring.techniques.plan import Plan
from shoestring.trace.fakes import OPTIMIZERS
from turns import turn

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
    quantize: str | None = None
    checkpointed: bool = False
    """By Hugging Face's `gradient_checkpointing_enable`."""
    liger: bool = False
    """With Liger's kernels, its fused head and loss among them."""


CASES = [
    Case("llama 1B, 2 × 2048", LLAMA_1B, batch=2),
    Case("llama 1B, 2 × 2048, planned to 75%", LLAMA_1B, batch=2, share=0.75),
    Case("llama 1B, checkpointed, 4 × 2048", LLAMA_1B, batch=4, checkpointed=True),
    Case("llama 1B, LoRA r=16, 4 × 2048", LLAMA_1B, batch=4, lora="r=16"),
    Case("llama 1B, Liger, 4 × 2048", LLAMA_1B, batch=4, liger=True),
    Case("llama 8B, LoRA r=16, planned to 75%", LLAMA_8B, lora="r=16", share=0.75),
    Case("llama 8B, NF4, LoRA r=16, 1 × 2048", LLAMA_8B, lora="r=16", quantize="nf4"),
    Case(
        "llama 8B, NF4, LoRA, checkpointed, 2 × 2048", LLAMA_8B, batch=2, quantize="nf4",
        lora="r=16,targets=all-linear", checkpointed=True,
    ),
    Case("qwen 0.5B, AdamW8bit, 4 × 1024", QWEN, batch=4, tokens=1024, optimizer="adamw8bit"),
    Case("qwen 0.5B, planned to 60%", QWEN, batch=8, tokens=1024, share=0.6),
    Case("ViT-L, 32 images, FP32", VIT_L, batch=32),
    Case("ViT-L, 64 images, BF16, checkpointed", VIT_L, batch=64, dtype="bf16", checkpointed=True),
]  # fmt: skip


def configured(case: Case, folder: str) -> Configured:
    Path(folder, "config.json").write_text(json.dumps(case.config))
    return Configured(
        f"hf:{folder}", tokens=case.tokens, batch=case.batch, lora=case.lora, dtype=case.dtype,
        quantize=case.quantize,
    )  # fmt: skip


def as_asked(case: Case, model: Any) -> Any:
    """Hugging Face's checkpointing and Liger's kernels, on a fake model or a real one."""
    if case.checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if case.liger:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    return model


def predicted(case: Case, given: Configured) -> tuple[Plan, int, bool]:
    """The plan, the bytes a budget must hold for it, and whether it runs as a CUDA graph."""
    model, batch = given.build()
    model = as_asked(case, model)
    how: dict[str, Any] = {"loss": loss_of, "optimizer": case.optimizer, "device": "cuda"}
    if case.share is None:
        trace = trace_plan(Plan(), model, batch, captured=False, **how)
        return Plan(), reserved(trace).eager_bytes, False
    planner = Planner(model, batch, allow="lossless", **how)
    found = planner.plan(int(case.share * planner.estimates.plain.needed_bytes))
    return found.plan, found.predicted.needed_bytes, found.predicted.captured


def measured(case: Case, given: Configured, plan: Plan, captured: bool) -> dict[str, int]:
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
    if case.quantize is not None:
        quantize(model)
    if case.lora is not None:
        model = _with_lora(model, case.lora)
    model = as_asked(case, model)
    if sees == "images":
        pixels = torch.randn(case.batch, 3, 224, 224, device="cuda", dtype=dtype or torch.float32)
        batch = {"pixel_values": pixels, "labels": torch.zeros(case.batch, dtype=int).cuda()}
    else:
        words = torch.randint(1000, (case.batch, case.tokens), device="cuda")
        batch = {"input_ids": words, "labels": words.clone()}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[case.optimizer](trained)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with turn():
        if plan.techniques:
            step = ss.apply(plan, model, optimizer, loss=loss_of)
            step.use_graph(captured)
            for _ in range(4):
                step(batch)
        else:
            for _ in range(4):
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.cuda.synchronize()
    return {
        "reserved": torch.cuda.max_memory_reserved(),
        "allocated": torch.cuda.max_memory_allocated(),
    }


def quantize(model: Any) -> None:
    """Linear layers but the head as bitsandbytes' NF4, with doubly quantized scales."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and child is not head:
                sizes, dtype = (child.in_features, child.out_features), child.weight.dtype
                packed = Linear4bit(
                    *sizes, bias=child.bias is not None, compute_dtype=dtype, quant_type="nf4",
                    compress_statistics=True, device="meta",
                )  # fmt: skip
                packed.weight = Params4bit(
                    child.weight.data.cpu(), requires_grad=False, quant_type="nf4",
                    compress_statistics=True, module=packed,
                )  # fmt: skip
                packed.bias = child.bias
                setattr(module, name, packed.to(child.weight.device))
    model.is_loaded_in_4bit = True  # as from_pretrained leaves it: peft has a LoRA for such layers


LONGEST = Case("llama 8B, LoRA r=16, longest in 24 GB", LLAMA_8B, lora="r=16")
BUDGET_BYTES = 24 * 10**9


def predict(number: int) -> dict[str, Any]:
    case = CASES[number]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        plan, needed, captured = predicted(case, configured(case, folder))
        seconds = time.perf_counter() - start
    told = {"plan": plan.to_dict(), "short": plan.short(), "captured": captured}
    return {**told, "predicted": needed, "s": round(seconds, 1)}


def predict_longest() -> dict[str, Any]:
    """Tokens of one example, and the plan they are for."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = Sizes(configured(LONGEST, folder), LONGEST.optimizer)
        room = sizes.margin.limit(BUDGET_BYTES)
        tokens = sizes.largest("tokens", room, room)
        return {"tokens": tokens, "plan": sizes._for_all(sizes._whole).to_dict()}


def run(given: dict[str, Any]) -> dict[str, Any]:
    """A case by its plan, or so many tokens within 24 GB."""
    case = LONGEST if "tokens" in given else CASES[given["number"]]
    if "tokens" in given:
        case = replace(case, tokens=given["tokens"])
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(BUDGET_BYTES / total)
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan.from_dict(given["plan"])
        return measured(case, configured(case, folder), plan, given.get("captured", False))


def child(job: dict[str, Any], *, gpu: bool) -> dict[str, Any]:
    """In a process of its own."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    if not gpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--job", json.dumps(job)], capture_output=True, text=True,
        timeout=560, env=environment,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:160]}
    return json.loads(lines[-1])


def show(rows: list[dict[str, Any]]) -> None:
    off = []
    print(f"{'case':44} {'predicted':>9} {'reserved':>9} {'alloc.':>9} {'off':>7}  plan")
    for row in rows:
        if "error" in row:
            print(f"{row['name']:44} {row['error']}")
            continue
        gigabytes = [row.get(key, 0) / 1e9 for key in ("predicted", "reserved", "allocated")]
        numbers = " ".join(f"{g:9.2f}" for g in gigabytes)
        error = row["predicted"] / row["reserved"] - 1 if "reserved" in row else float("nan")
        off += [error] if "reserved" in row else []
        print(f"{row['name']:44} {numbers} {100 * error:+6.1f}%  {row['short'][:40]}")
    if off:
        middle = sorted(off)[len(off) // 2]
        print(f"below: {sum(e < 0 for e in off)} of {len(off)}; median {100 * middle:+.1f}%")


def key_of(case: Case, shoestring: str = ss.__version__) -> str:
    """What a prediction is of; another version predicts again."""
    return json.dumps({**asdict(case), "shoestring": shoestring}, sort_keys=True)


def predictions(chosen: list[int], longest: bool, file: Path | None, workers: int) -> Any:
    """Those of the file, and the others by processes of their own, which the file then has."""
    known = json.loads(file.read_text()) if file is not None and file.is_file() else {}
    jobs: dict[str, dict[str, Any]] = {key_of(CASES[n]): {"number": n} for n in chosen}
    jobs |= {key_of(LONGEST): {"longest": True}} if longest else {}

    def one(key: str) -> None:
        told = child(jobs[key], gpu=False)
        print(f"{jobs[key]}: {told}", file=sys.stderr, flush=True)
        known[key] = told
        if file is not None:
            kept = {k: v for k, v in known.items() if "error" not in v}
            file.write_text(json.dumps(kept, indent=1) + "\n")

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, [key for key in jobs if key not in known]))
    return known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--predict", action="store_true", help="predict alone")
    parser.add_argument("--predictions", type=Path, help="a file that keeps what is predicted")
    parser.add_argument("--longest", action="store_true", help="the longest context, too")
    parser.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) // 2, 1))
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.job is not None:
        job = json.loads(given.job)
        if "plan" in job:
            print(json.dumps(run(job)))
        else:
            print(json.dumps(predict_longest() if "longest" in job else predict(job["number"])))
        return
    chosen = [n for n, case in enumerate(CASES) if given.only in case.name]
    known = predictions(chosen, given.longest, given.predictions, given.workers)
    rows = []
    for number in chosen:
        told = known[key_of(CASES[number])]
        if not given.predict and "error" not in told:
            told |= child({**told, "number": number}, gpu=True)
        rows.append({**told, "name": CASES[number].name})
        print(f"{CASES[number].name}: {told}", file=sys.stderr, flush=True)
    show(rows)
    if given.longest:
        told = known[key_of(LONGEST)]
        print(f"longest context for 24 GB: {told}")
        if not given.predict and "tokens" in told:
            for tokens in (told["tokens"], int(1.05 * told["tokens"])):
                print(f"{tokens} tokens: {child({**told, 'tokens': tokens}, gpu=True)}", flush=True)


if __name__ == "__main__":
    main()
