"""Time per update of the training loop beside a bare PyTorch loop with one graph of the same step.

    PYTHONPATH=src python3 benchmarks/train_step.py [--precision fp16] [--json FILE]

Both run in one process, in turns, on the same data, model, type and layout. The bare loop makes
its batches as simply as can be (a permutation, a gather, one crop and flip for each image, all on
the device), writes them into the graph's batch and replays the graph; on the CPU there is no
graph, and the figure only shows that the benchmark runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shoestring.lab.models import builtin
from shoestring.lab.records.run import provenance
from shoestring.lab.runs.settings import settings_for
from shoestring.lab.runs.trainer import Trainer, prepare_device
from shoestring.lab.tasks import load_task
from shoestring.lab.tasks.images import ImageTask
from shoestring.techniques import Precision
from shoestring.techniques.plan import Plan

MOST = 1.1
"""What the loop may take, relative to the bare one."""


class Bare:
    """What a person writes who wants this one step to be fast, and nothing else."""

    def __init__(
        self, model: str, task: ImageTask, batch: int, device: torch.device, half: bool
    ) -> None:
        self.task, self.size, self.device = task, batch, device
        self.dtype = torch.float16 if half else torch.float32
        self.format = torch.channels_last if device.type == "cuda" else torch.contiguous_format
        torch.manual_seed(0)
        self.model = builtin(model).build().to(device, memory_format=self.format)
        if half:
            self.model.half()
            for module in self.model.modules():
                if isinstance(module, torch.nn.BatchNorm2d):
                    module.float()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=0.01,
            momentum=0.9,
            weight_decay=5e-4,
            nesterov=True,
            fused=device.type == "cuda",
        )
        self.scale = 1024.0 if half else 1.0
        self.images, self.labels = task.images.to(device), task.labels.to(device)
        self.order = torch.randperm(len(self.images), device=device)
        self.at = 0
        self.batch = self._next()
        self.graph = self._captured() if device.type == "cuda" else None

    def _next(self) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = self.order[self.at : self.at + self.size]
        self.at = (self.at + self.size) % (len(self.images) - self.size + 1)
        side, pad, device = self.task.images.shape[-1], self.task.padding, self.device
        padded = F.pad(self.images[chosen], (pad,) * 4)
        moved = torch.arange(side, device=device)
        rows = moved + torch.randint(2 * pad + 1, (self.size, 1), device=device)
        columns = moved + torch.randint(2 * pad + 1, (self.size, 1), device=device)
        mirrored = torch.rand(self.size, 1, device=device) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
        example = torch.arange(self.size, device=device).view(-1, 1, 1, 1)
        channel = torch.arange(3, device=device).view(1, -1, 1, 1)
        crops = padded[example, channel, rows[:, None, :, None], columns[:, None, None, :]]
        pixels = (crops.float() - 127.5) / 64
        return pixels.to(self.dtype, memory_format=self.format), self.labels[chosen]

    def _step(self) -> None:
        images, labels = self.batch
        loss = F.cross_entropy(self.model(images).float(), labels)
        (loss * self.scale).backward()
        if self.scale != 1:
            torch._foreach_div_([p.grad for p in self.model.parameters()], self.scale)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _captured(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph

    def advance(self) -> None:
        """One update."""
        made = self._next()
        for held, new in zip(self.batch, made, strict=True):
            held.copy_(new)
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()


def seconds_of(advance: Callable[[], None], updates: int, device: torch.device) -> float:
    """Of one update, over a group of them."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(updates):
        advance()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / updates


def compare(
    model: str,
    task: ImageTask,
    batch: int,
    device: torch.device,
    half: bool,
    updates: int,
    groups: int,
) -> dict[str, Any]:
    """Medians of groups of updates, the two loops in turns."""
    plan = Plan.of([Precision("fp16")] if half else [])
    settings = settings_for(
        model,
        task.name,
        images=len(task.images),
        plan=plan,
        epochs=10_000,
        batch=batch,
        channels_last=device.type == "cuda",
    )
    loop = Trainer(settings, task, device, predict=False)
    bare = Bare(model, task, batch, device, half)
    times: dict[str, list[float]] = {"loop": [], "bare": []}
    for advance in (loop.advance, bare.advance):
        seconds_of(advance, 5, device)
    for _ in range(groups):
        times["loop"].append(seconds_of(loop.advance, updates, device))
        times["bare"].append(seconds_of(bare.advance, updates, device))
    medians = {f"{name}_step_seconds": statistics.median(t) for name, t in times.items()}
    return {
        "model": model,
        "batch": batch,
        "precision": "fp16" if half else "fp32",
        "updates": updates * groups,
        **medians,
        "ratio": medians["loop_step_seconds"] / medians["bare_step_seconds"],
        "captured": loop.step.captured,
        "host": provenance(device),
    }


def main() -> int:
    """Print both times and their ratio; 1 if it is above the limit on a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="wrn-28-2")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--precision", choices=("fp32", "fp16"), default="fp16")
    parser.add_argument("--device")
    parser.add_argument("--updates", type=int, default=200, help="of a group")
    parser.add_argument("--groups", type=int, default=9)
    parser.add_argument("--json", help="also write the result to this file")
    options = parser.parse_args()
    device = prepare_device(options.device, tf32=False, benchmark=False)
    task = load_task(options.data, folder=options.data_dir)
    found = compare(
        options.model,
        task,
        options.batch,
        device,
        options.precision == "fp16",
        options.updates,
        options.groups,
    )
    print(
        f"{found['model']} {found['precision']} batch {found['batch']} on {device}: "
        f"loop {1e3 * found['loop_step_seconds']:.3f} ms, "
        f"bare {1e3 * found['bare_step_seconds']:.3f} ms, ratio {found['ratio']:.3f} "
        f"(at most {MOST})"
    )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)
    return int(device.type == "cuda" and found["ratio"] > MOST)


if __name__ == "__main__":
    sys.exit(main())
