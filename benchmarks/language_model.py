"""What each lever costs a language model in quality: loss curves on Europarl's English, over plain.

    python benchmarks/language_model.py --data-dir DIR --out FILE     # 28M parameters, one GPU
    python benchmarks/language_model.py --small --data-dir DIR --out FILE    # 1.6M, a CPU
    python benchmarks/language_model.py --data-dir DIR --out FILE --only "8-bit state" --seeds 0
    python benchmarks/language_model.py --out FILE --table            # of what is there

A GPT (weights of head and embedding tied) trains with AdamW on random windows of the English side
of `europarl160k`. For a seed all levers start from the same weights, and see the same windows and
the same dropout. A row is a run: its losses, on the held-out sentences too, and its bytes. Runs
that the file has already are not made again, so the same command goes on where it was ended.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from factored_adamw import FactoredAdamW
from shoestring.lab.records.run import provenance
from shoestring.lab.study.statistics import sample
from shoestring.lab.tasks import load_text

STATE8, STATE4 = ss.OptimizerState(8), ss.OptimizerState(4)
NEAR = (STATE8, ss.GradientRelease(), ss.ChunkedLoss())
LEVERS: dict[str, tuple[ss.Technique, ...]] = {
    "plain": (),
    "released gradients": (ss.GradientRelease(),),
    "chunked loss": (ss.ChunkedLoss(),),
    "8-bit state": (STATE8,),
    "4-bit state": (STATE4,),
    "8-bit activations": (ss.ActivationBits(8),),
    "4-bit activations": (ss.ActivationBits(4),),
    "2-bit activations": (ss.ActivationBits(2),),
    "8-bit state, released, chunked": NEAR,
    "and 8-bit activations": (*NEAR, ss.ActivationBits(8)),
    "4-bit state, released, chunked, 4-bit activations": (
        STATE4, ss.GradientRelease(), ss.ChunkedLoss(), ss.ActivationBits(4),
    ),
    "bf16": (ss.Precision("bf16"),),
    "bf16, 8-bit state, released, chunked": (ss.Precision("bf16"), *NEAR),
}  # fmt: skip
FACTORED = {
    "factored": 32, "factored, 8-bit first moment": 8, "factored, 4-bit first moment": 4,
}  # fmt: skip
"""Prototypes of AdamW with factored second moments: bits of the first moment."""
ADAFACTOR = "Adafactor, lr "
ADAFACTOR_RATES = ("0.03", "0.1", "0.3")
"""It has no first moment, and steps relative to the weights: rates of another size."""
NAMES = (*LEVERS, *FACTORED, *(ADAFACTOR + rate for rate in ADAFACTOR_RATES))
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1
SMALL = {
    "width": 128, "layers": 4, "heads": 4, "length": 64, "batch": 8, "updates": 200, "lr": 1e-3,
    "warmup": 20, "every": 50, "held_out": 128,
}  # fmt: skip


class Block(nn.Module):
    """Attention and MLP, normalized before."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        three = self.attention(self.norm1(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = three.transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Learnt positions, blocks, and a head whose weight is the embedding."""

    def __init__(self, words: int, size: argparse.Namespace) -> None:
        super().__init__()
        self.tokens, self.positions = (nn.Embedding(n, size.width) for n in (words, size.length))
        self.blocks = nn.ModuleList(
            Block(size.width, size.heads, size.dropout) for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, words, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # those that end a residual branch smaller, as GPT-2's
                ends = name.endswith(("out.weight", "down.weight"))
                scale = (2 * size.layers) ** -0.5 if ends else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next pieces."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Windows:
    """The sentences in a row, each with its end, and windows of it."""

    def __init__(self, given: argparse.Namespace) -> None:
        task = load_text(given.data, folder=given.data_dir)
        self.words, self.size, self.device = task.target_vocabulary.size, given, given.device
        self.train, self.valid = (
            torch.from_numpy(side[1].numbers.astype(np.int64)) for side in (task.train, task.valid)
        )

    def batch(self, seed: int, update: int) -> torch.Tensor:
        """Windows of the training text, drawn by seed and update."""
        last = len(self.train) - self.size.length - 1
        draw = np.random.default_rng([seed, update])
        return self._at(self.train, draw.integers(0, last, self.size.batch))

    def held_out(self) -> list[torch.Tensor]:
        """The same windows of the validation text for everyone, one after the other."""
        count = min(self.size.held_out, (len(self.valid) - 1) // self.size.length)
        starts = np.arange(count) * self.size.length
        return [
            self._at(self.valid, starts[at : at + self.size.batch])
            for at in range(0, count, self.size.batch)
        ]

    def _at(self, text: torch.Tensor, starts: np.ndarray) -> torch.Tensor:
        made = torch.stack([text[start : start + self.size.length + 1] for start in starts])
        return made.to(self.device)


def optimizer_for(name: str, model: nn.Module, given: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW, or what the row compares it with."""
    parameters = list(model.parameters())
    shared: dict[str, Any] = {"lr": given.lr, "weight_decay": WEIGHT_DECAY}
    if name in FACTORED:
        return FactoredAdamW(parameters, betas=BETAS, bits=FACTORED[name], **shared)
    if name.startswith(ADAFACTOR):
        # Its weight decay is not relative to the weights as its steps are: scaled to AdamW's.
        rate = float(name.removeprefix(ADAFACTOR))
        decay = WEIGHT_DECAY * given.lr / rate
        return torch.optim.Adafactor(parameters, lr=rate, weight_decay=decay)
    on_gpu = given.device == "cuda"
    return torch.optim.AdamW(parameters, betas=BETAS, fused=on_gpu, capturable=on_gpu, **shared)


def rate_at(update: int, given: argparse.Namespace) -> float:
    """Up in a line, then down to a tenth in half a cosine; of an update counted from 0."""
    if update < given.warmup:
        return (update + 1) / given.warmup
    done = (update - given.warmup) / max(given.updates - given.warmup, 1)
    return 0.55 + 0.45 * math.cos(math.pi * done)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of tensors between steps, the counts of updates left out."""
    held: list[Any] = [v for state in optimizer.state.values() for v in state.values()]
    flat = [t for v in held for t in (v if isinstance(v, tuple) else (v,))]
    return sum(t.nbytes for t in flat if isinstance(t, torch.Tensor) and t.dim())


@torch.no_grad()
def evaluated(model: nn.Module, batches: list[torch.Tensor]) -> float:
    """Mean over all pieces, without dropout."""
    model.eval()
    sums = sum(float(loss(model, b)) * len(b) for b in batches)
    model.train()
    return sums / sum(len(b) for b in batches)


def run(name: str, seed: int, windows: Windows, given: argparse.Namespace) -> dict[str, Any]:
    """Train once: the curve, and what it took."""
    gc.collect()  # of the run before, whose bytes are not this one's
    torch.manual_seed(seed)
    model = GPT(windows.words, given)
    techniques = LEVERS.get(name, ())
    parameters = sum(p.numel() for p in model.parameters())
    model.to(given.device)
    optimizer = optimizer_for(name, model, given)
    predicted = None
    if name in LEVERS:
        predicted = ss.profile(
            model, windows.batch(seed, 0), loss=loss, optimizer=optimizer, techniques=techniques,
            accounting="device",
        ).peak_bytes  # fmt: skip
    step = ss.apply(techniques, model, optimizer, loss=loss)
    if name not in LEVERS:  # their rates are numbers of Python, which a graph would keep
        step.use_graph(False)
    torch.manual_seed(seed)  # of dropout
    held_out, measured, curve = windows.held_out(), None, []
    first = [group["lr"] for group in optimizer.param_groups]
    sums, began, training = torch.zeros((), device=given.device), time.perf_counter(), 0.0
    for update in range(given.updates):
        for group, rate in zip(optimizer.param_groups, first, strict=True):
            group["lr"] = rate * rate_at(update, given)
        batch = windows.batch(seed, update)
        if update == 2:  # state is there, and on CUDA the step is captured
            measured = step.measure(batch).peak_bytes
            assert step.loss is not None
            sums += step.loss
        else:
            sums += step(batch)
        if (update + 1) % given.every == 0 or update + 1 == given.updates:
            since = update + 1 - (curve[-1][0] if curve else 0)
            train = float(sums) / since
            training += time.perf_counter() - began
            curve.append([update + 1, round(train, 5), round(evaluated(model, held_out), 5)])
            sums.zero_()
            began = time.perf_counter()
    return {
        "lever": name, "seed": seed, "plan": str(step.plan), "valid_loss": curve[-1][2],
        "curve": curve, "parameters": parameters, "state_bytes": state_bytes(optimizer),
        "predicted_peak_bytes": predicted, "measured_peak_bytes": measured,
        "training_seconds": round(training, 2), "settings": settings_of(given),
        "text": {"train_pieces": len(windows.train), "words": windows.words},
        "host": provenance(torch.device(given.device)),
    }  # fmt: skip


def settings_of(given: argparse.Namespace) -> dict[str, Any]:
    """All that decides the numbers of a row, beside its lever and seed."""
    return {name: getattr(given, name) for name in (*SMALL, "dropout", "device")}


def table(rows: list[dict[str, Any]]) -> str:
    """Of each lever the held-out loss at the end, and over plain's of the same seed."""
    plain = {row["seed"]: row for row in rows if row["lever"] == "plain"}
    lines = [
        "| lever | n | held-out loss | over plain | largest on the way | state, bytes a parameter "
        "| measured peak | predicted | time of plain |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(row["lever"] for row in rows):
        mine = [row for row in rows if row["lever"] == name]
        both = [(row, plain[row["seed"]]) for row in mine if row["seed"] in plain]
        over = [row["valid_loss"] - base["valid_loss"] for row, base in both]
        way = [
            max(a[2] - b[2] for a, b in zip(row["curve"], base["curve"], strict=True))
            for row, base in both
        ]
        slow = [row["training_seconds"] / base["training_seconds"] for row, base in both]
        last, predicted = mine[-1], mine[-1]["predicted_peak_bytes"]
        end = sample([row["valid_loss"] for row in mine])
        lines.append(
            f"| {name} | {end.n} | {end.mean:.4f} | {_told(over)} | "
            f"{f'{max(way):+.4f}' if way else '–'} | "
            f"{last['state_bytes'] / last['parameters']:.2f} | "
            f"{last['measured_peak_bytes'] / 1e6:.2f} MB | "
            f"{'–' if predicted is None else f'{predicted / 1e6:.2f} MB'} | "
            f"{f'{sample(slow).mean:.2f}' if slow else '–'} |"
        )
    return "\n".join([
        *lines, "", "Over plain: the mean of differences of equal seeds ± half of its 95% interval "
        "(Student's t).",
    ])  # fmt: skip


def _told(values: list[float]) -> str:
    found = sample(values)
    if found.mean is None:
        return "–"
    width = "" if found.interval is None else f" ± {found.interval:.4f}"
    return f"{found.mean:+.4f}{width}"


def arguments() -> argparse.Namespace:
    """The command line's; --small is for a CPU, and single options change either."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="europarl160k", help="a text; its second language")
    parser.add_argument("--data-dir", help="by default $SHOESTRING_DATA")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one a run")
    parser.add_argument("--only", action="append", help="a lever's whole name; repeatable")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="1.6M parameters, 200 updates")
    parser.add_argument("--table", action="store_true", help="print the table of --out alone")
    parser.add_argument("--dropout", type=float, default=0.1)
    large = {
        "width": 512, "layers": 8, "heads": 8, "length": 256, "batch": 32, "updates": 3000,
        "lr": 6e-4, "warmup": 200, "every": 250, "held_out": 512,
    }  # fmt: skip
    for name, value in large.items():
        kind = type(value)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"{value}")
    given = parser.parse_args()
    for name, value in (SMALL if given.small else large).items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    unknown = set(given.only or ()) - set(NAMES)
    if unknown:
        parser.error(f"no lever is called {unknown.pop()!r}; one of: {'; '.join(NAMES)}")
    return given


def main() -> None:
    """Make the runs that are not there yet, seed by seed, and print the table."""
    given = arguments()
    rows = []
    if given.out.exists():
        rows = [json.loads(line) for line in given.out.read_text().splitlines()]
    if not given.table:
        windows = Windows(given)
        own = settings_of(given)
        made = {(row["lever"], row["seed"]) for row in rows if row["settings"] == own}
        for seed in given.seeds:
            for name in given.only or NAMES:
                if (name, seed) in made:
                    continue
                row = run(name, seed, windows, given)
                rows.append(row)
                with given.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{name}, seed {seed}: {row['valid_loss']:.4f}", flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
