"""State that a step moves in place, hooks, and losses that look at the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.utils.parametrizations import spectral_norm

from .base import Layer, Made, Stranger, classify, labeled, tower


class Codes(nn.Module):
    """Vectors by the nearest of a few codes, parameters that follow what was seen."""

    def __init__(self, wide: int, codes: int = 8) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(wide, wide), nn.Linear(wide, wide)
        self.codes = nn.Parameter(torch.randn(codes, wide), requires_grad=False)
        self.total = nn.Parameter(self.codes.detach().clone(), requires_grad=False)
        self.count = nn.Parameter(torch.ones(codes), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape; moves the codes."""
        inside = self.into(x)
        nearest = (inside.detach() @ self.codes.t()).argmax(1)
        chosen = self.codes[nearest].clone()
        picked = F.one_hot(nearest, len(self.codes)).to(x.dtype)
        with torch.no_grad():
            self.count.mul_(0.9).add_(0.1 * picked.sum(0))
            self.total.mul_(0.9).add_(0.1 * picked.t() @ inside.detach())
            self.codes.data.copy_(self.total / self.count.clamp_min(1e-3).unsqueeze(1))
        made: Tensor = x + self.out(inside + (chosen - inside).detach())
        return made


def _codes(scale: int) -> Made:
    wide = 64 * scale
    inside = [part for _ in range(3) for part in (Layer(wide), Codes(wide))]
    model = nn.Sequential(nn.Linear(48, wide), *inside, nn.Linear(wide, 5))
    return model, labeled(scale, 512), classify


class Scaled(nn.Module):
    """A block behind a running scale that it moves where no version shows it."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.layer = Layer(wide)
        self.scale = nn.Parameter(torch.ones(wide), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        self.scale.data.lerp_(x.detach().abs().mean(0), 0.1)
        made: Tensor = self.layer(x / self.scale.clone())
        return made


def _scaled(scale: int) -> Made:
    wide = 64 * scale
    blocks = (Scaled(wide) for _ in range(4))
    model = nn.Sequential(nn.Linear(48, wide), *blocks, nn.Linear(wide, 5))
    return model, labeled(scale, 512), classify


class Shared(nn.Module):
    """Two blocks, three times each."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(48, wide), nn.Linear(wide, 5)
        self.blocks = nn.ModuleList(Layer(wide) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Five scores."""
        x = self.into(x)
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        made: Tensor = self.out(x)
        return made


def _shared(scale: int) -> Made:
    return Shared(64 * scale), labeled(scale), classify


def _normalizer(scale: int) -> Made:
    seen = {"mean": torch.ones(())}

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        value = classify(model, batch)
        seen["mean"] = 0.9 * seen["mean"] + 0.1 * value.detach()
        return value / seen["mean"]

    return tower(64 * scale, 5), labeled(scale), loss


class Hooked(nn.Module):
    """Gradients that hooks rescale: of parameters, of a block and of activations."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.inside = tower(wide, wide)
        self.out = nn.Linear(wide, 5)
        for parameter in self.inside[1].parameters():
            parameter.register_hook(lambda gradient: 0.5 * gradient)
        self.inside[2].register_full_backward_hook(lambda _, into, out: (2 * into[0],))

    def forward(self, x: Tensor) -> Tensor:
        """Five scores."""
        x = self.inside(x)
        if x.requires_grad:
            x.register_hook(lambda g: g / g.norm(dim=-1, keepdim=True).clamp_min(1e-6))
        made: Tensor = self.out(x)
        return made


def _hooked(scale: int) -> Made:
    return Hooked(64 * scale), labeled(scale), classify


class Heads(nn.Module):
    """Two tasks over one body."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.body = tower(wide, wide)
        self.heads = nn.ModuleDict({"kind": nn.Linear(wide, 5), "size": nn.Linear(wide, 1)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """An output for each."""
        inside = self.body(x)
        return {name: head(inside) for name, head in self.heads.items()}


def _heads(scale: int) -> Made:
    """Not every example has both labels, so that each task is a mean over others."""
    inputs, kinds = labeled(scale)
    known = {"kind": torch.rand(len(inputs)) < 0.7, "size": torch.rand(len(inputs)) < 0.4}
    batch = {"inputs": inputs, "kind": kinds, "size": torch.randn(len(inputs)), "known": known}

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        made, known = model(batch["inputs"]), batch["known"]
        kind = F.cross_entropy(made["kind"], batch["kind"], reduction="none")
        size = F.smooth_l1_loss(made["size"][:, 0], batch["size"], reduction="none")
        terms = {"kind": kind, "size": size}
        means = ((t * known[n]).sum() / known[n].sum() for n, t in terms.items())
        return torch.stack(list(means)).sum()

    return Heads(64 * scale), batch, loss


@dataclass
class Weighed:
    """A batch in fields."""

    inputs: Tensor
    labels: Tensor
    weight: Tensor


def _weighed(scale: int) -> Made:
    inputs, labels = labeled(scale)

    def loss(model: nn.Module, batch: Weighed) -> Tensor:
        each = F.cross_entropy(model(batch.inputs), batch.labels, reduction="none")
        return (each * batch.weight).sum() / batch.weight.sum()

    return tower(64 * scale, 5), Weighed(inputs, labels, torch.rand(len(inputs))), loss


def _trimmed(scale: int) -> Made:
    """The largest tenth of a batch counts as much as the next smaller."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return torch.minimum(each, each.detach().sort()[0][len(each) * 9 // 10]).mean()

    return tower(64 * scale, 5), labeled(scale), loss


class ExpertsChoose(nn.Module):
    """Every expert takes the rows of the batch that it wants most."""

    def __init__(self, wide: int, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(wide, experts)
        self.experts = nn.ModuleList(Layer(wide) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        wanted, out = self.gate(x).softmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight, rows = wanted[:, number].topk(max(len(x) // 8, 1))
            out = out.index_add(0, rows, weight.unsqueeze(1) * expert(x[rows]))
        return x + out


def _experts_choose(scale: int) -> Made:
    wide = 64 * scale
    blocks = (ExpertsChoose(wide) for _ in range(2))
    model = nn.Sequential(nn.Linear(48, wide), *blocks, nn.Linear(wide, 5))
    return model, labeled(scale), classify


class Packed(nn.Module):
    """Sequences one after the other in one row of tokens, and where each begins."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 48)
        self.body, self.out = tower(wide, wide), nn.Linear(wide, 2)

    def forward(self, tokens: Tensor, starts: Tensor) -> Tensor:
        """Two scores a sequence."""
        inside, lengths = self.body(self.words(tokens)), starts[1:] - starts[:-1]
        owner = torch.repeat_interleave(torch.arange(len(lengths), device=tokens.device), lengths)
        sums = inside.new_zeros(len(lengths), inside.shape[1]).index_add(0, owner, inside)
        made: Tensor = self.out(sums / lengths.unsqueeze(1))
        return made


def _packed(scale: int) -> Made:
    lengths = torch.arange(32 * scale) % 9 + 3
    starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    tokens = torch.randint(0, 50, (int(starts[-1]),))
    batch = tokens, starts, torch.arange(len(lengths)) % 2
    return Packed(64 * scale), batch, lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2])


def _balanced(scale: int) -> Made:
    """Targets that are balanced over the batch (Sinkhorn's steps)."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        scores = model(x)
        target = (scores.detach() / 0.5).exp()
        for _ in range(3):
            target = target / target.sum(0, keepdim=True)
            target = target / target.sum(1, keepdim=True)
        return -(target * scores.log_softmax(-1)).sum(-1).mean()

    return tower(64 * scale, 16), torch.randn(128 * scale, 48), loss


def _jacobian(scale: int) -> Made:
    """The gradient of every output by every input, small."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        weights = dict(model.named_parameters())

        def one(x: Tensor) -> Tensor:
            made: Tensor = functional_call(model, weights, (x.unsqueeze(0),)).squeeze(0)
            return made

        return classify(model, batch) + 0.01 * vmap(jacrev(one))(batch[0]).square().mean()

    model = nn.Sequential(nn.Linear(48, 64 * scale), nn.Tanh(), nn.Linear(64 * scale, 5))
    return model, labeled(scale), loss


class TiedSpectral(nn.Module):
    """Words in and out by one matrix; the layers between have spectral norm."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.words = nn.Embedding(97, wide)
        self.blocks = nn.ModuleList(Layer(wide) for _ in range(3))
        for block in self.blocks:
            spectral_norm(block.up)

    def forward(self, tokens: Tensor) -> Tensor:
        """A score for each word."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        made: Tensor = x @ self.words.weight.t()
        return made


def _tied_spectral(scale: int) -> Made:
    tokens = torch.randint(0, 97, (24 * scale, 20))
    labels = tokens.roll(-1, 1)
    labels[:, -1], labels[3, 5:] = -100, -100

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return TiedSpectral(64 * scale), (tokens, labels), loss


STATEFUL = [
    Stranger("moving-codes", "mlp", _codes),
    Stranger("moving-scale", "mlp", _scaled),
    Stranger("shared-blocks", "mlp", _shared),
    Stranger("running-normalizer", "mlp", _normalizer),
    Stranger("gradient-hooks", "mlp", _hooked),
    Stranger("masked-heads", "mlp", _heads),
    Stranger("weighed-fields", "mlp", _weighed),
    Stranger("trimmed-loss", "mlp", _trimmed),
    Stranger("experts-choose", "mixture of experts", _experts_choose),
    Stranger("packed-tokens", "language", _packed),
    Stranger("balanced-targets", "contrastive", _balanced),
    Stranger("jacobian", "mlp", _jacobian),
    Stranger("tied-spectral", "language", _tied_spectral),
]
