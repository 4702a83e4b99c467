"""Thirteen small models, and techniques that are wrong on purpose in ten ways.

PYTHONPATH=src:tests python -m verification.sabotage     # how many are caught, and pass
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoestring.techniques import Checkpointing, Microbatching
from shoestring.techniques.base import Setup
from shoestring.techniques.plan import Plan
from shoestring.trace.batches import map_tensors
from shoestring.trace.streams import rewound_streams
from shoestring.verification.certificate import Comparison
from shoestring.verification.proof import prove
from techniques.small_models import SMALL, Attention, classify


@dataclass(frozen=True)
class Case:
    """A model to train by right and wrong techniques."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    blocks: str = ""
    """Where its repeated blocks are."""


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.spread = nn.Linear(20, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.decode = nn.Linear(4, 20)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = F.relu(self.encode(x))
        mean, spread = self.mean(hidden), self.spread(hidden)
        return self.decode(mean + torch.randn_like(mean) * (0.5 * spread).exp()), mean, spread


def elbo(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    made, mean, spread = model(x)
    apart = -0.5 * (1 + spread - mean.square() - spread.exp()).sum()
    return F.binary_cross_entropy_with_logits(made, x, reduction="sum") + apart


def denoise(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    time = torch.randint(0, 100, (len(x), 1), device=x.device)
    noise, share = torch.randn_like(x), (time / 100).to(x.dtype)
    return F.mse_loss(model(x * (1 - share) + noise * share), noise)


def masked_words(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    hidden = torch.rand(tokens.shape, device=tokens.device) < 0.3
    logits = model(tokens.masked_fill(hidden, 0))
    lost = F.cross_entropy(logits.transpose(1, 2).float(), tokens, reduction="none")
    return (lost * hidden).mean()


def padded(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


def padded_batch() -> Any:
    tokens = torch.arange(6 * 7).reshape(6, 7) % 50
    labels = tokens.clone()
    for row, length in enumerate([7, 2, 4, 2, 6, 5]):
        labels[row, length:] = -100
    return {"tokens": tokens, "labels": labels}


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 12, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(x)[0][:, -1])


class Experts(nn.Module):
    """Every row takes the better of three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 3)
        self.experts = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, best = self.gate(x).softmax(-1).max(-1)
        out = torch.stack([expert(x) for expert in self.experts], 1)
        picked = out.gather(1, best[:, None, None].expand(-1, 1, x.shape[1]))[:, 0]
        return self.head(x + share[:, None] * picked)


def rows() -> Any:
    return torch.randn(6, 12), torch.arange(6) % 4


def _group_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout2d(0.2),
        nn.Conv2d(8, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def _words() -> nn.Module:
    layers = nn.Sequential(*(Attention(16) for _ in range(3)))
    return nn.Sequential(nn.Embedding(50, 16), layers, nn.Linear(16, 50))


def _small(name: str, blocks: str = "") -> Case:
    small = SMALL[name]
    return Case(small.build, small.batch, small.loss, blocks)


CASES = {
    "cnn": _small("cnn"),
    "residual": _small("residual", "1"),
    "transformer": _small("transformer", "1"),
    "tied": _small("tied", "layers"),
    "lstm": _small("lstm"),
    "mlp": _small("mlp"),
    "vae": Case(Variational, lambda: torch.rand(8, 20), elbo),
    "diffusion": Case(
        lambda: nn.Sequential(nn.Linear(20, 32), nn.SiLU(), nn.Linear(32, 20)),
        lambda: torch.randn(8, 20),
        denoise,
    ),
    "masked": Case(_words, lambda: torch.arange(6 * 7).reshape(6, 7) % 50, masked_words, "1"),
    "padded": Case(SMALL["tied"].build, padded_batch, padded, "layers"),
    "gru": Case(Gated, lambda: (torch.randn(6, 5, 8), torch.arange(6) % 4), classify),
    "experts": Case(Experts, rows, classify),
    "groups": Case(_group_norm, lambda: (torch.randn(6, 3, 8, 8), torch.arange(6) % 4), classify),
}


# -- wrong on purpose: each changes a step that is right -------------------------------------------


def longer(setup: Setup) -> None:
    """Gradients times 1.01."""
    _before_update(setup, lambda p, number: p.grad.mul_(1.01))


def skipped(setup: Setup) -> None:
    """One parameter does not move."""
    _before_update(setup, lambda p, number: p.grad.zero_() if number == 1 else None)


def not_a_number(setup: Setup) -> None:
    """One NaN in one gradient."""
    _before_update(setup, lambda p, n: p.grad.view(-1)[0].fill_(torch.nan) if n == 0 else None)


def _before_update(setup: Setup, change: Callable[[Any, int], Any]) -> None:
    update = setup.update

    def changed() -> None:
        held = [p for p in setup.model.parameters() if p.grad is not None]
        with torch.no_grad():
            for number, p in enumerate(held):
                change(p, number)
        update()

    setup.update = changed


def advanced(setup: Setup) -> None:
    """The random stream goes on by one number more."""
    run = setup.run

    def changed(batch: Any) -> torch.Tensor:
        made = run(batch)
        torch.rand(1)
        return made

    setup.run = changed


def _near(first: torch.Tensor, second: torch.Tensor) -> bool:
    """As the two biases of an LSTM, whose gradients are the same but for rounding."""
    return bool((first - second).norm() <= 0.1 * first.norm())


def swapped(setup: Setup) -> None:
    """Momentum belongs to another parameter of its shape, or the other way round to its rows."""

    def swap() -> None:
        held = [s["momentum_buffer"] for s in setup.optimizer.state.values() if s]
        for first, second in pairwise(held):
            if first.shape == second.shape and not _near(first, second):
                kept = first.clone()
                first.copy_(second)
                second.copy_(kept)
                return
        held[0].copy_(held[0].flip(0))

    setup.after_update.append(swap)


def stale(setup: Setup) -> None:
    """A buffer stays as it was."""
    held = {name: b.clone() for name, b in setup.model.named_buffers()}

    def restore() -> None:
        for name, buffer in setup.model.named_buffers():
            buffer.copy_(held[name])

    setup.after_update.append(restore)


def statistics_twice(setup: Setup) -> None:
    """Running statistics move once more."""
    run = setup.run

    def changed(batch: Any) -> torch.Tensor:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            run(batch)
        return run(batch)

    setup.run = changed


def wrong_weight(setup: Setup) -> None:
    """The first part weighs a tenth more."""
    split = setup.split

    def changed(batch: Any) -> Iterator[Any]:
        for number, (part, weight) in enumerate(split(batch)):
            yield part, (1.0 if weight is None else weight) * (1.1 if number == 0 else 1.0)

    setup.split = changed


def other_layer(setup: Setup, blocks: str = "") -> None:
    """The second block runs in place of the first."""
    first, second = list(setup.model.get_submodule(blocks).children())[:2]
    first.forward = second.forward


def redrawn(setup: Setup, blocks: str = "") -> None:
    """Recomputation draws its masks from another place."""
    for block in setup.model.get_submodule(blocks).children():
        block.forward = _drawn_anew(block.forward)


def _drawn_anew(plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(x: torch.Tensor) -> Any:
        return checkpoint(
            plain, x, use_reentrant=False, context_fn=lambda: (nullcontext(), _elsewhere())
        )

    return forward


@contextmanager
def _elsewhere() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        yield


WRONG: dict[str, Any] = {
    wrong.__name__: wrong
    for wrong in (longer, skipped, not_a_number, advanced, swapped, stale, statistics_twice,
                  wrong_weight, other_layer, redrawn)
}  # fmt: skip
HAVE_BATCH_NORM = ("cnn", "residual")
DRAW_IN_BLOCKS = ("transformer", "masked")


def applies(wrong: str, name: str, carrier: str) -> bool:
    """Whether a mistake can be made with this model and technique."""
    if wrong in ("stale", "statistics_twice"):
        return name in HAVE_BATCH_NORM
    if wrong == "other_layer":
        return bool(CASES[name].blocks)
    if wrong == "redrawn":
        return name in DRAW_IN_BLOCKS
    if wrong == "advanced":  # parts draw as they like
        return carrier == "checkpointing"
    return True


@cache
def saboteur(base: type[Any], wrong: str, blocks: str) -> type[Any]:
    """The technique, then the mistake."""

    def apply(self: Any, setup: Setup) -> None:
        base.apply(self, setup)
        change = WRONG[wrong]
        if wrong in ("other_layer", "redrawn"):
            change(setup, blocks)
        else:
            change(setup)

    return dataclass(frozen=True)(type(f"{wrong}_{base.__name__}", (base,), {"apply": apply}))


def technique(carrier: str, name: str, wrong: str | None) -> Any:
    base: type[Any] = Checkpointing if carrier == "checkpointing" else Microbatching
    kind = base if wrong is None else saboteur(base, wrong, CASES[name].blocks)
    if carrier == "microbatching":
        return kind(3 if name in ("vae", "diffusion") else 4)
    return kind("every-1")


def compared(
    name: str, chosen: Iterable[Any], dtype: torch.dtype = torch.float32, steps: int = 2
) -> list[Comparison]:
    """The rows of a certificate, without its peak."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build().to(dtype)
    batch = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, case.batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with rewound_streams() as rewind:
        plan = Plan.of(chosen)
        return prove(plan, model, optimizer, case.loss, [batch] * steps, rewind, None)[1]


CARRIERS = ("checkpointing", "microbatching")
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cases(names: Iterable[str], types: Iterable[str] = TYPES) -> list[tuple[Any, ...]]:
    """(model, type, technique, mistake or None)."""
    return [
        (name, kind, carrier, wrong)
        for name in names
        for kind in types
        for carrier in CARRIERS
        for wrong in (None, *WRONG)
        if wrong is None or applies(wrong, name, carrier)
    ]


def broken(name: str, kind: str, carrier: str, wrong: str | None) -> list[str]:
    """What a certificate says against it."""
    rows = compared(name, [technique(carrier, name, wrong)], TYPES[kind])
    return [f"{row.what} ({row.tensor}): {row.why}" for row in rows if not row.ok]


def main() -> None:
    """Try all; print counts, and by name what went wrong."""
    torch.set_num_threads(1)
    found = {case: bool(broken(*case)) for case in cases(CASES)}
    wrong = {case: told for case, told in found.items() if case[3] is not None}
    honest = {case: told for case, told in found.items() if case[3] is None}
    print(
        f"{len(CASES)} models, {len(WRONG)} mistakes, {', '.join(TYPES)}, torch {torch.__version__}"
    )
    print(f"mistakes caught: {sum(wrong.values())} of {len(wrong)}")
    print(f"honest plans passed: {len(honest) - sum(honest.values())} of {len(honest)}")
    for case, told in found.items():
        if told is (case[3] is None):
            print("  ", *case)


if __name__ == "__main__":
    main()
