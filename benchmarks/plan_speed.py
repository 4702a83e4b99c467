"""What a plan costs in time: at half the plain peak, beside other ways to need less memory.

    python benchmarks/plan_speed.py gpt2-medium       # on one GPU; also resnet50, llama-1b
    python benchmarks/plan_speed.py gpt2-medium --tiny --device cpu

In one process, one after the other: the plain step, ours by `ss.plan` for a share of the measured
plain peak, `torch.utils.checkpoint` on every layer, ours for the peak which that had, compiled
blocks (all kept, all recomputed, and planned for the same share), and `torch.compile` with its
`activation_memory_budget` (of a few, until one needs no more memory than ours). FP32 as PyTorch has
it (Llama in bf16), no dropout: with dropout that budget is known to give wrong gradients. Times are
the median of some steps after a few to warm up; peaks are the allocator's, or on the CPU those of
all storages.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoestring as ss
from architectures.vision import Basic, Bottleneck, ResNet
from plan_holds import clean, provenance
from shoestring.memory.live.measure import measure, training_step
from shoestring.planning.planner import Planner
from shoestring.step.predict import predict_step
from turns import take_turns, turn

COMPILE_BUDGETS = (0.5, 0.3, 0.1)
"""Tried in this order until one needs no more memory than ours."""


@dataclass(frozen=True)
class Subject:
    """A model and how each way treats it."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    layers: Callable[[nn.Module], list[nn.Module]]
    what: str


def gpt2(tiny: bool, examples: int, fused: bool) -> Subject:
    """GPT-2 medium from its configuration, sequences of 1,024."""
    from transformers import GPT2Config, GPT2LMHeadModel

    length, width, layers = (64, 64, 4) if tiny else (1024, 1024, 24)
    config = GPT2Config(
        n_positions=length, n_embd=width, n_layer=layers, n_head=width // 64 or 1,
        vocab_size=512 if tiny else 50257, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip

    def build() -> nn.Module:
        model = GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"
        return model

    def batch() -> Any:
        tokens = torch.randint(config.vocab_size, (examples, length))
        return {"input_ids": tokens, "labels": tokens}

    return Subject(
        build,
        batch,
        lambda model, batch: model(**batch).loss,
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused),
        lambda model: list(model.transformer.h),
        f"{layers} layers of {width}, {examples} × {length} tokens, AdamW",
    )


def resnet(tiny: bool, examples: int, fused: bool) -> Subject:
    """ResNet-50 on images of 224."""
    side = 64 if tiny else 224

    def build() -> nn.Module:
        return ResNet(Basic, (2, 2, 2, 2), width=8) if tiny else ResNet(Bottleneck, (3, 4, 6, 3))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Subject(
        build,
        lambda: (torch.randn(examples, 3, side, side), torch.randint(1000, (examples,))),
        loss,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        lambda model: [block for stage in model.stages for block in stage],
        f"{'ResNet-18, narrow' if tiny else 'ResNet-50'}, {examples} × 3 × {side}², SGD",
    )


def llama(tiny: bool, examples: int, fused: bool) -> Subject:
    """Llama 1B from its configuration, in bf16, sequences of 2,048."""
    from transformers import LlamaConfig, LlamaForCausalLM

    length, width, layers = (64, 64, 4) if tiny else (2048, 2048, 16)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 256 or 1,
        vocab_size=512 if tiny else 128256, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip

    def batch() -> Any:
        tokens = torch.randint(config.vocab_size, (examples, length))
        return {"input_ids": tokens, "labels": tokens}

    return Subject(
        lambda: LlamaForCausalLM(config).to(torch.bfloat16),
        batch,
        lambda model, batch: model(**batch).loss,
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused),
        lambda model: list(model.model.layers),
        f"{layers} layers of {width}, {examples} × {length} tokens, bf16, AdamW",
    )


SUBJECTS = {"gpt2-medium": (gpt2, 8), "resnet50": (resnet, 128), "llama-1b": (llama, 2)}


def main() -> None:
    """Run what the command line asks for."""
    arguments = parse()
    warnings.simplefilter("ignore")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here; try --tiny --device cpu")
    make, examples = SUBJECTS[arguments.model]
    count = arguments.batch or (4 if arguments.tiny else examples)
    subject = make(arguments.tiny, count, arguments.device == "cuda")
    print(f"{arguments.model}: {subject.what}; {arguments.share:.0%} of the plain peak", flush=True)
    print(f"{'':<34}{'peak':>11}{'of plain':>9}{'step':>11}{'of plain':>9}  plan", flush=True)
    take_turns()
    run = Run(subject, arguments)
    run.plain()
    run.ours(int(arguments.share * run.rows[0]["peak_bytes"]))
    run.every_layer()
    run.ours(run.rows[-1]["peak_bytes"])
    run.compiled_blocks()
    if not arguments.no_compile:
        run.compiled()
    if arguments.json:
        made = {"made": provenance(), "what": subject.what, "rows": run.rows}
        Path(arguments.json).write_text(json.dumps(made, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=sorted(SUBJECTS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--batch", type=int, help="examples in a minibatch")
    parser.add_argument("--share", type=float, default=0.5, help="of the plain peak")
    parser.add_argument("--allow", default="lossless", help="as for shoestring plan")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--compile-budgets", type=float, nargs="*", help="of activations, in turn")
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    return parser.parse_args()


class Run:
    """Each way in turn, with a model of its own."""

    def __init__(self, subject: Subject, arguments: argparse.Namespace) -> None:
        self.subject, self.arguments = subject, arguments
        self.device = arguments.device
        self.rows: list[dict[str, Any]] = []

    def fresh(self) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
        """Model, batch and optimizer on the device."""
        clean()
        torch.manual_seed(0)
        with torch.device(self.device):
            model, batch = self.subject.build(), self.subject.batch()
        return model, batch, self.subject.optimizer(model)

    def plain(self) -> None:
        """As PyTorch trains."""
        model, batch, optimizer = self.fresh()
        self.note("plain", *self.take(model, batch, optimizer))

    def ours(self, budget: int, more: str = "") -> None:
        """Planned for so many bytes, and applied; `more` is allowed beside."""
        model, batch, optimizer = self.fresh()
        start = time.perf_counter()
        planner = Planner(
            model, batch, loss=self.subject.loss, optimizer=optimizer,
            allow=",".join(filter(None, (self.arguments.allow, more))),
        )  # fmt: skip
        try:
            plan = planner.plan(budget)
        except ss.BudgetError as error:
            print(f"{error.message}: planned for that")
            plan = planner.plan(error.smallest_bytes or budget)
        planned = time.perf_counter() - start
        step = ss.apply(plan, model, optimizer, loss=self.subject.loss)
        step(batch)
        step(batch)
        peak = step.measure(batch).peak_bytes
        seconds = self.time(lambda: step(batch))
        self.note(f"ss.plan for {budget / 1e9:.2f} GB {more}", peak, seconds, plan.short())
        self.rows[-1] |= {
            "budget_bytes": budget,
            "plan": plan.to_dict(),
            "kind": plan.kind,
            "planning_seconds": planned,
            "predicted_bytes": plan.predicted.peak_bytes,
            "predicted_times_plain": plan.predicted.seconds / plan.plain.seconds,
            "captured": step.captured,
        }

    def every_layer(self) -> None:
        """`torch.utils.checkpoint` without reentry around every layer."""
        model, batch, optimizer = self.fresh()
        for layer in self.subject.layers(model):
            inner = layer.forward

            def forward(*args: Any, inner: Any = inner, **kwargs: Any) -> Any:
                return checkpoint(inner, *args, use_reentrant=False, **kwargs)

            layer.forward = forward  # type: ignore[method-assign]
        self.note("torch.utils.checkpoint", *self.take(model, batch, optimizer))

    def compiled_blocks(self) -> None:
        """Each kind of block compiled: all kept, all recomputed, and as planned."""
        for others in ((), (ss.Checkpointing("residual-1"),)):
            model, batch, optimizer = self.fresh()
            chosen = (ss.CompiledBlocks(), *others)
            predicted = predict_step(
                chosen, model, batch, loss=self.subject.loss, optimizer=optimizer
            )
            step = ss.apply(chosen, model, optimizer, loss=self.subject.loss)
            start = time.perf_counter()
            for _ in range(3):
                step(batch)
            compiling = time.perf_counter() - start
            if self.device == "cuda":
                torch.cuda.empty_cache()
            peak = step.measure(batch).peak_bytes
            plan = " + ".join(technique.short() for technique in chosen)
            self.note("compiled blocks", peak, self.time(lambda step=step, b=batch: step(b)), plan)
            self.rows[-1] |= {
                "plan": ss.Plan(chosen).to_dict(),
                "predicted_bytes": predicted.peak_bytes,
                "first_three_steps_seconds": compiling,
                "captured": step.captured,
            }
            print(f"{'':<34}{predicted.peak_bytes / 1e6:>8.1f} MB predicted", flush=True)
        plain = self.rows[0]["peak_bytes"]
        self.ours(int(self.arguments.share * plain), "compiled_blocks")

    def compiled(self) -> None:
        """`torch.compile`, its budget lowered until it needs no more memory than ours."""
        import torch._functorch.config as functorch

        ours = next(row for row in self.rows if row["way"].startswith("ss.plan"))
        for budget in self.arguments.compile_budgets or COMPILE_BUDGETS:
            torch._dynamo.reset()
            model, batch, optimizer = self.fresh()
            functorch.activation_memory_budget = budget
            try:
                compiled = torch.compile(model)
                found = self.take(compiled, batch, optimizer)
            except Exception as error:
                first = (str(error).splitlines() or [""])[0][:60]
                print(f"torch.compile, budget {budget}: {type(error).__name__}: {first}")
                return
            finally:
                functorch.activation_memory_budget = 1.0
            self.note(f"torch.compile, budget {budget}", *found)
            if found[0] <= ours["peak_bytes"]:
                return

    def take(
        self, model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer
    ) -> tuple[int, float]:
        """Peak and seconds of a plain step."""
        loss = self.subject.loss
        if self.device == "cuda":  # what compiling or a first step took is not the step's
            for _ in range(3):
                training_step(model, batch, loss, optimizer)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            training_step(model, batch, loss, optimizer)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
        else:
            peak = measure(model, batch, loss=loss, optimizer=optimizer).peak_bytes
        return peak, self.time(lambda: training_step(model, batch, loss, optimizer))

    def time(self, step: Callable[[], Any]) -> float:
        """The median of some steps."""
        taken = []
        with turn():
            for number in range(3 + self.arguments.steps):
                start = time.perf_counter()
                step()
                if self.device == "cuda":
                    torch.cuda.synchronize()
                if number >= 3:
                    taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    def note(self, way: str, peak: int, seconds: float, plan: str = "") -> None:
        """One row of the table."""
        self.rows.append({"way": way, "peak_bytes": peak, "step_seconds": seconds})
        plain = self.rows[0]
        print(
            f"{way:<34}{peak / 1e6:>8.1f} MB{peak / plain['peak_bytes']:>8.2f}x"
            f"{1e3 * seconds:>8.1f} ms{seconds / plain['step_seconds']:>8.2f}x  {plan}",
            flush=True,
        )
        gc.collect()


if __name__ == "__main__":
    main()
