"""Models written by hand, as examples and papers write them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Layer, Made, Stranger, classify, labeled, tower


class Variational(nn.Module):
    """PyTorch's own example: 784 → 400 → 20 and back."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.one, self.mean = nn.Linear(784, wide), nn.Linear(wide, 20)
        self.spread, self.three, self.four = (
            nn.Linear(wide, 20), nn.Linear(20, wide), nn.Linear(wide, 784),
        )  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Reconstruction, mean and log variance."""
        hidden = F.relu(self.one(x))
        mean, spread = self.mean(hidden), self.spread(hidden)
        code = mean + torch.randn_like(spread) * torch.exp(0.5 * spread)
        return torch.sigmoid(self.four(F.relu(self.three(code)))), mean, spread


def _vae(scale: int) -> Made:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        made, mean, spread = model(x)
        lost = F.binary_cross_entropy(made, x, reduction="sum")
        return lost - 0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())

    return Variational(64 * scale), torch.rand(512 * scale, 784), loss


class Denoiser(nn.Module):
    """A small U-Net with time embedded, GroupNorm and dropout."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, wide), nn.SiLU(), nn.Linear(wide, wide))
        self.enter = nn.Conv2d(3, wide, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, wide), nn.SiLU(), nn.Dropout(0.1),
                          nn.Conv2d(wide, wide, 3, padding=1))
            for _ in range(4)
        )  # fmt: skip
        self.leave = nn.Conv2d(wide, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """The noise that is in x at this time."""
        angles = time[:, None] * torch.exp(-torch.arange(8, device=x.device) / 2)
        emb = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        hidden = self.enter(x) + emb[:, :, None, None]
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.leave(hidden)


def _diffusion(scale: int) -> Made:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        time = torch.randint(0, 1000, (x.shape[0],), device=x.device)
        noise = torch.randn_like(x)
        share = torch.cos(time / 1000 * 1.57)[:, None, None, None]
        return F.mse_loss(model(share * x + (1 - share**2).sqrt() * noise, time), noise)

    return Denoiser(16 * scale), torch.randn(16 * scale, 3, 16, 16), loss


def _gan(scale: int) -> Made:
    torch.manual_seed(1)
    wide = 16 * scale
    judge = nn.Sequential(
        nn.Conv2d(3, wide, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(wide, wide, 4, 2, 1),
        nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(wide * 16, 1),
    )  # fmt: skip
    model = nn.Sequential(
        nn.Linear(32, wide * 16), nn.Unflatten(1, (wide, 4, 4)), nn.InstanceNorm2d(wide),
        nn.ReLU(), nn.ConvTranspose2d(wide, wide, 4, 2, 1), nn.ReLU(),
        nn.ConvTranspose2d(wide, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    model.__dict__["judge"] = judge  # beside the model, not in it

    def loss(model: nn.Module, noise: Tensor) -> Tensor:
        if judge[0].weight.device != noise.device:
            judge.to(noise.device)
        return F.softplus(-judge(model(noise))).mean()

    return model, torch.randn(64 * scale, 32), loss


class Attending(nn.Module):
    """Graph attention over a dense neighborhood (Velickovic et al., 2018)."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.mix, self.a, self.b = nn.Linear(wide, wide), nn.Linear(wide, 1), nn.Linear(wide, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Every node from its neighbors."""
        h = self.mix(x)
        score = F.leaky_relu(self.a(h) + self.b(h).transpose(1, 2), 0.2)
        return F.elu(score.masked_fill(~edges, -1e9).softmax(-1) @ h) + x


class Graph(nn.Module):
    """Graphs of some nodes, classified by their mean."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.enter = nn.Linear(8, wide)
        self.layers = nn.ModuleList(Attending(wide) for _ in range(4))
        self.leave = nn.Linear(wide, 5)

    def forward(self, nodes: Tensor, edges: Tensor, there: Tensor) -> Tensor:
        """A class for each graph."""
        x = self.enter(nodes)
        for layer in self.layers:
            x = layer(x, edges)
        return self.leave((x * there[..., None]).sum(1) / there.sum(1, keepdim=True))


def _graph(scale: int) -> Made:
    rows, nodes = 48 * scale, 12 * scale
    there = (torch.arange(nodes)[None] < torch.randint(4, nodes, (rows, 1))).float()
    edges = (torch.rand(rows, nodes, nodes) < 0.3) | torch.eye(nodes, dtype=torch.bool)
    batch = {"nodes": torch.randn(rows, nodes, 8), "edges": edges, "there": there,
             "y": torch.arange(rows) % 5}  # fmt: skip

    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(b["nodes"], b["edges"], b["there"]), b["y"])

    return Graph(32 * scale), batch, loss


class WordLstm(nn.Module):
    """A word-level language model with dropout between layers."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.words = nn.Embedding(99, wide)
        self.lstm = nn.LSTM(wide, wide, 2, batch_first=True, dropout=0.2)
        self.leave = nn.Linear(wide, 99)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next word."""
        return self.leave(self.lstm(self.words(tokens))[0])


def _padded_tokens(scale: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, 99, (32 * scale, 20 * scale))
    for row in range(len(tokens)):
        tokens[row, tokens.shape[1] - row % 13 :] = 0
    return tokens, torch.roll(tokens, -1, 1)


def _recurrent(scale: int) -> Made:
    def loss(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(b[0])
        return F.cross_entropy(logits.flatten(0, 1), b[1].flatten(), ignore_index=0)

    return WordLstm(32 * scale), _padded_tokens(scale), loss


def _masked_mean(scale: int) -> Made:
    """A mean written by hand: what the padding mask leaves."""

    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        lost = F.cross_entropy(model(b["x"]).transpose(1, 2), b["y"], reduction="none")
        return (lost * b["mask"]).sum() / b["mask"].sum()

    x, y = _padded_tokens(scale)
    model = nn.Sequential(nn.Embedding(99, 32 * scale), *(Layer(32 * scale) for _ in range(3)),
                          nn.Linear(32 * scale, 99))  # fmt: skip
    return model, {"x": x, "y": y, "mask": (x != 0).float()}, loss


def _simclr(scale: int) -> Made:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        views = [F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2)]
        target = torch.arange(len(x), device=x.device)
        return F.cross_entropy(views[0] @ views[1].T / 0.2, target)

    return tower(32 * scale, 16), torch.randn(128 * scale, 48), loss


def _byol(scale: int) -> Made:
    """The target network lies beside the model; nothing compares examples."""
    torch.manual_seed(2)
    model = tower(32 * scale, 16)
    target = copy.deepcopy(model).requires_grad_(False)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if next(target.parameters()).device != x.device:
            target.to(x.device)
        with torch.no_grad():
            seen = F.normalize(target(x + 0.1 * torch.randn_like(x)), dim=1)
        made = F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
        return 2 - 2 * (made * seen).sum(1).mean()

    return model, torch.randn(128 * scale, 48), loss


def _triplet(scale: int) -> Made:
    def loss(model: nn.Module, b: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.triplet_margin_loss(*(model(part) for part in b))

    batch = tuple(torch.randn(128 * scale, 48) for _ in range(3))
    return tower(32 * scale, 16), batch, loss


class Switch(nn.Module):
    """One expert for each token, and a loss that balances them (Fedus et al., 2021)."""

    def __init__(self, wide: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(wide, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, wide))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens, and how unbalanced they were."""
        shares = self.gate(x).softmax(-1)
        share, best = shares.max(-1)
        out = torch.stack([expert(x) for expert in self.experts], -2)
        picked = out.gather(-2, best[..., None, None].expand(*best.shape, 1, x.shape[-1]))[
            ..., 0, :
        ]
        used = F.one_hot(best, len(self.experts)).to(x.dtype)
        unbalanced = (used.mean((0, 1)) * shares.mean((0, 1))).sum() * len(self.experts)
        return x + share[..., None] * picked, unbalanced


class Switches(nn.Module):
    """A classifier of tokens with experts."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.enter = nn.Linear(8, wide)
        self.layers = nn.ModuleList(Switch(wide, 4) for _ in range(3))
        self.leave = nn.Linear(wide, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and the sum of what the layers add to the loss."""
        x, extra = self.enter(x), x.new_zeros(())
        for layer in self.layers:
            x, more = layer(x)
            extra = extra + more
        return self.leave(x.mean(1)), extra


def _switch(coefficient: float) -> Any:
    def build(scale: int) -> Made:
        def loss(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
            logits, extra = model(b[0])
            return F.cross_entropy(logits, b[1]) + coefficient * extra

        rows = 48 * scale
        batch = torch.randn(rows, 10, 8), torch.arange(rows) % 5
        return Switches(32 * scale), batch, loss

    return build


class Flow(nn.Module):
    """Coupling layers (Dinh et al., 2017)."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(24, wide), nn.Tanh(), nn.Linear(wide, 48)) for _ in range(6)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The code and the log determinant."""
        total = x.new_zeros(len(x))
        for net in self.nets:
            a, b = x.chunk(2, 1)
            scale, shift = net(a).chunk(2, 1)
            total = total + scale.tanh().sum(1)
            x = torch.cat([b * scale.tanh().exp() + shift, a], 1)
        return x, total


def _flow(scale: int) -> Made:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        code, volume = model(x)
        return (0.5 * code.square().sum(1) - volume).mean()

    return Flow(64 * scale), torch.randn(512 * scale, 48), loss


def _physics(scale: int) -> Made:
    """Second derivatives in the loss (a PINN of u'' = −sin)."""
    wide = 32 * scale
    model = nn.Sequential(nn.Linear(1, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh(),
                          nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, 1))  # fmt: skip

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = model(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return (second + x.sin()).square().mean()

    return model, torch.rand(256 * scale, 1) * 6, loss


class Skipping(nn.Module):
    """Layers that are left out at random (Huang et al., 2016)."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.enter = nn.Linear(48, wide)
        self.layers = nn.ModuleList(Layer(wide) for _ in range(6))
        self.leave = nn.Linear(wide, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Some layers, drawn for all examples together."""
        x = self.enter(x)
        for layer in self.layers:
            if torch.rand(()).item() > 0.2:
                x = layer(x)
        return self.leave(x)


def _weighted(scale: int) -> Made:
    """Class weights: a mean over weights."""

    def loss(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        weight = torch.tensor([1.0, 2, 3, 4, 5], device=b[0].device, dtype=b[0].dtype)
        return F.cross_entropy(model(b[0]), b[1], weight=weight)

    return tower(32 * scale, 5), labeled(scale), loss


class Counting(nn.Module):
    """Keeps a running mean by assignment, as many hand-written normalizations do."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(48))
        self.tower = tower(wide, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Centered by what was seen before."""
        out = self.tower(x - self.mean)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return out


def _batch_norm(scale: int) -> Made:
    wide = 32 * scale
    layers = [nn.Sequential(nn.Linear(wide, wide), nn.BatchNorm1d(wide), nn.ReLU())
              for _ in range(4)]  # fmt: skip
    model = nn.Sequential(nn.Linear(48, wide), *layers, nn.Linear(wide, 5))
    return model, labeled(scale), classify


def _seq2seq(scale: int) -> Made:
    """GRU encoder, attention, GRU decoder."""
    wide = 32 * scale

    class Translate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(99, wide)
            self.read = nn.GRU(wide, wide, batch_first=True)
            self.write = nn.GRU(wide, wide, batch_first=True)
            self.leave = nn.Linear(2 * wide, 99)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            keys, last = self.read(self.words(source))
            out, _ = self.write(self.words(target), last)
            seen = (out @ keys.transpose(1, 2) / wide**0.5).softmax(-1) @ keys
            return self.leave(torch.cat([out, seen], -1))

    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        logits = model(b["source"], b["target"][:, :-1])
        aim = b["target"][:, 1:]
        return F.cross_entropy(logits.transpose(1, 2), aim, ignore_index=0)

    source, target = _padded_tokens(scale)
    return Translate(), {"source": source, "target": target}, loss


HANDWRITTEN = (
    Stranger("vae-summed", "diffusion", _vae, random=True),
    Stranger("diffusion-unet", "diffusion", _diffusion, random=True),
    Stranger("gan-generator", "gan", _gan),
    Stranger("graph-attention", "graph", _graph),
    Stranger("lstm-words-padded", "recurrent", _recurrent, random=True),
    Stranger("gru-attention-padded", "recurrent", _seq2seq),
    Stranger("masked-mean", "language", _masked_mean),
    Stranger("simclr", "contrastive", _simclr, random=True),
    Stranger("byol", "contrastive", _byol, random=True),
    Stranger("triplet", "contrastive", _triplet),
    Stranger("switch-balanced", "moe", _switch(0.01)),
    Stranger("switch", "moe", _switch(0.0)),
    Stranger("flow", "diffusion", _flow),
    Stranger("physics", "other", _physics),
    Stranger("stochastic-depth", "other",
             lambda s: (Skipping(32 * s), labeled(s), classify), random=True),
    Stranger("class-weights", "other", _weighted),
    Stranger("assigned-buffer", "other",
             lambda s: (Counting(32 * s), labeled(s), classify), "sgd"),
    Stranger("batch-norm-mlp", "other", _batch_norm, "sgd"),
)  # fmt: skip
