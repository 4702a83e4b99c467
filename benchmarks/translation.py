"""DC-Transformer on minibatches of 4,000 tokens: updates per second, and the peak of a lean plan.

    PYTHONPATH=src python3 benchmarks/translation.py [--json FILE] [--only NAME,…] [--data FOLDER]

Each way trains by itself, in a process of its own. The times are of whole updates as a run makes
them: batches made on the host and sent, learning rates set, forward, backward, Adam. `plain` is
what PyTorch does without this library: FP32, eager, its own Adam. Sentences are random, of lengths
like IWSLT'14's, unless `--data` names a prepared text. cuBLAS gets no workspace of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":0:0")
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")

import numpy as np
import torch

from shoestring.lab.models.dynamic_conv import SOURCE_VOCABULARY, TARGET_VOCABULARY
from shoestring.lab.records.run import provenance
from shoestring.lab.runs.text_settings import text_settings_for
from shoestring.lab.runs.trainer import Trainer, prepare_device
from shoestring.lab.tasks.bpe import END, SPECIAL, Sentences, Vocabulary
from shoestring.lab.tasks.prepared import load
from shoestring.lab.tasks.text import LONGEST, TextTask
from shoestring.techniques import Checkpointing, Microbatching, Precision, Sparsity, Technique
from shoestring.techniques.plan import Plan

MICROBATCH = Microbatching(250, unit="tokens")
WAYS: dict[str, list[Technique] | None] = {
    "plain": None,
    "fp32": [],
    "fp16": [Precision("fp16")],
    "fp16 residual-1 microbatch 250": [
        Precision("fp16"), Checkpointing("residual-1"), MICROBATCH,
    ],
    "fp16 density 0.3": [Sparsity(0.3), Precision("fp16")],
}  # fmt: skip
COUNTED_MB = {"plain": 2896.0, "fp16 residual-1 microbatch 250": 331.0}
"""The report's, in bytes of tensors."""
NEEDED_PER_SECOND = 25.0
PEAK_LIMIT = 1.25


def main() -> int:
    """One way, or each in a process of its own; 1 where a figure falls short on CUDA."""
    options = arguments()
    if options.way is not None:
        print(json.dumps(run(options.way, options)))
        return 0
    chosen = list(WAYS) if options.only is None else options.only.split(",")
    found = {}
    for name in chosen:
        again = [sys.executable, __file__, "--way", name, *sys.argv[1:]]
        done = subprocess.run(again, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"{name}: failed", file=sys.stderr)
            continue
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(line(name, found), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))
    short = [name for name in chosen if name not in found or not holds(name, found[name])]
    print("short of what is asked: " + ", ".join(short) if short else "all hold")
    return 1 if short else 0


def arguments() -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=list(WAYS), help="this one, in this process")
    parser.add_argument("--only", help="names, with commas")
    parser.add_argument("--json", help="file for all that was found")
    parser.add_argument("--data", help="a prepared text")
    parser.add_argument("--model", default="dc-transformer")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--updates", type=int, default=300, help="that are timed")
    parser.add_argument("--device", default=None)
    return parser.parse_args()


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Warm up until every shape was captured, then time whole updates."""
    device = prepare_device(options.device, tf32=False, benchmark=False)
    task = load(Path(options.data)) if options.data else random_text()
    parts = WAYS[name]
    settings = text_settings_for(
        options.model,
        "random",
        task,
        plan=Plan.of(parts or []),
        tune=True,
        batch=options.tokens,
        updates=10**6,
    )
    trainer = Trainer(settings, task, device, predict=False)
    update = trainer.advance if parts is not None else plain_update(trainer)
    warm_up(trainer, update)
    gc.collect()
    wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began, first = time.perf_counter(), trainer.done
    while trainer.done < first + options.updates:
        update()
    wait(device)
    seconds = time.perf_counter() - began
    feed = trainer.job.feed
    made = {
        "way": name,
        "model": options.model,
        "parameters": trainer.parameters,
        "tokens": options.tokens,
        "shapes": [[shape.rows, shape.length] for shape in feed.shapes],  # type: ignore[attr-defined]
        "not_padding": feed.filled,  # type: ignore[attr-defined]
        "updates_per_second": options.updates / seconds,
        "captured": trainer.step.captured,
        "train_loss": trainer.train_loss(),
        "host": provenance(device),
    }
    if device.type == "cuda":
        made["peak_bytes"] = max(
            torch.cuda.max_memory_allocated(), trainer.step.captured_peak_bytes
        )
        made["reserved_bytes"] = torch.cuda.max_memory_reserved()
    else:
        made["peak_bytes"] = trainer.measured_peak_bytes
    return made


def plain_update(trainer: Trainer) -> Callable[[], None]:
    """PyTorch as everybody writes it, on the same model and batches."""
    model, loss, feed = trainer.step.model, trainer.loss, trainer.job.feed
    settings = trainer.job.settings  # type: ignore[attr-defined]
    optimizer = torch.optim.Adam(
        model.parameters(),
        lr=settings.learning_rate_at(0),
        betas=settings.betas,
        weight_decay=settings.weight_decay,
    )

    def update() -> None:
        batch = feed.batch(*divmod(trainer.done, feed.steps_per_epoch))
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(trainer.done)
        optimizer.zero_grad(set_to_none=True)
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        trainer.loss_sum.add_(value.detach())
        trainer.loss_count += 1
        trainer.done += 1

    return update


def warm_up(trainer: Trainer, update: Callable[[], None]) -> None:
    """Until every shape of an epoch came three times: eager, captured, replayed."""
    feed = trainer.job.feed
    counts: dict[Any, int] = {}
    shapes = {tuple(feed.batch(0, n)["source"].shape) for n in range(feed.steps_per_epoch)}
    while any(counts.get(shape, 0) < 3 for shape in shapes) and trainer.done < 2000:
        number = divmod(trainer.done, feed.steps_per_epoch)
        shape = tuple(feed.batch(*number)["source"].shape)
        counts[shape] = counts.get(shape, 0) + 1
        update()


def random_text(pairs: int = 20_000) -> TextTask:
    """Random pieces in sentences of about 25, a few of 200, as IWSLT'14's are."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(3.0, 0.65, pairs), 2, LONGEST - 1).astype(np.int64)

    def side(size: int) -> Sentences:
        own = np.clip(np.rint(lengths * draw.normal(1.0, 0.1, pairs)), 2, LONGEST - 1).astype(int)
        return Sentences.of([[*draw.integers(4, size, n).tolist(), END] for n in own])

    def vocabulary(size: int) -> Vocabulary:
        return Vocabulary((*SPECIAL, *(f"w{n}" for n in range(size - len(SPECIAL)))))

    sides = side(SOURCE_VOCABULARY), side(TARGET_VOCABULARY)
    few = tuple(Sentences.of([one[n] for n in range(8)]) for one in sides)
    return TextTask(
        name="random",
        split="test",
        source_language="de",
        target_language="en",
        codes=None,
        source_vocabulary=vocabulary(SOURCE_VOCABULARY),
        target_vocabulary=vocabulary(TARGET_VOCABULARY),
        train=sides,
        valid=few,  # type: ignore[arg-type]
        test=few,  # type: ignore[arg-type]
        valid_references=("",) * 8,
        test_references=("",) * 8,
        notes={},
    )


def line(name: str, found: dict[str, Any]) -> str:
    """A row for people; faster than plain where that ran before."""
    held = found[name]
    shown = f"{name:<32} {held['updates_per_second']:7.2f} updates/s"
    if "plain" in found:
        shown += f"  {held['updates_per_second'] / found['plain']['updates_per_second']:5.2f}x"
    shown += f"  peak {held['peak_bytes'] / 1e6:8.1f} MB"
    if name in COUNTED_MB:
        counted = COUNTED_MB[name]
        shown += f" ({held['peak_bytes'] / 1e6 / counted:.2f} of the report's counted {counted:g})"
    return shown + ("" if held["captured"] or name == "plain" else "  not captured")


def holds(name: str, held: dict[str, Any]) -> bool:
    """What is asked of the full model on CUDA."""
    if held["host"]["device"] == "cpu" or held["model"] != "dc-transformer":
        return True
    if name == "fp16":
        return held["updates_per_second"] >= NEEDED_PER_SECOND
    if name == "fp16 residual-1 microbatch 250":
        return held["peak_bytes"] / 1e6 <= PEAK_LIMIT * COUNTED_MB[name]
    return True


def wait(device: torch.device) -> None:
    """For all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
