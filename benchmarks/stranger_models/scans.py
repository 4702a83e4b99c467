"""Loops over time, lattices, graphs and equations, written by hand."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from .base import Layer, Made, Stranger, classify, labeled, tower


class ConformerBlock(nn.Module):
    """Half a feed-forward, attention, a convolution over time, half a feed-forward."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.one, self.two = Layer(wide), Layer(wide)
        self.norms = nn.ModuleList(nn.LayerNorm(wide) for _ in range(3))
        self.attend = nn.MultiheadAttention(wide, 4, batch_first=True)
        self.enter, self.over = (
            nn.Linear(wide, 2 * wide),
            nn.Conv1d(wide, wide, 7, padding=3, groups=wide),
        )
        self.batch, self.leave = nn.BatchNorm1d(wide), nn.Linear(wide, wide)

    def forward(self, x: Tensor, silent: Tensor) -> Tensor:
        """The same shape."""
        x = self.one(x)
        h = self.norms[0](x)
        x = x + self.attend(h, h, h, key_padding_mask=silent, need_weights=False)[0]
        h = F.glu(self.enter(self.norms[1](x))).masked_fill(silent[..., None], 0)
        h = F.silu(self.batch(self.over(h.transpose(1, 2)))).transpose(1, 2)
        return self.norms[2](self.two(x + self.leave(h)))


class Conformer(nn.Module):
    """Sounds → scores of letters, a quarter as many."""

    def __init__(self, wide: int = 32) -> None:
        super().__init__()
        self.enter = nn.Conv1d(20, wide, 5, 2, 2)
        self.blocks = nn.ModuleList(ConformerBlock(wide) for _ in range(3))
        self.leave = nn.Linear(wide, 12)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Log probabilities and their lengths."""
        x = self.enter(x.transpose(1, 2)).transpose(1, 2)
        lengths = (lengths + 1) // 2
        silent = torch.arange(x.shape[1])[None] >= lengths[:, None]
        for block in self.blocks:
            x = block(x, silent)
        return self.leave(x).log_softmax(-1), lengths


def _conformer(scale: int) -> Made:
    rows = 8 * scale
    lengths = 30 + torch.arange(rows) * 7 % 31
    batch = {
        "x": torch.randn(rows, 60, 20),
        "lengths": lengths,
        "y": torch.randint(1, 12, (rows, 8)),
        "y_lengths": 3 + torch.arange(rows) % 6,
    }

    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        made, lengths = model(b["x"], b["lengths"])
        return F.ctc_loss(made.transpose(0, 1), b["y"], lengths, b["y_lengths"], zero_infinity=True)

    return Conformer(), batch, loss


class Transducer(nn.Module):
    """Every time joined with every letter so far."""

    def __init__(self, wide: int = 24) -> None:
        super().__init__()
        self.hear, self.words = nn.GRU(12, wide, batch_first=True), nn.Embedding(9, wide)
        self.say, self.leave = nn.LSTM(wide, wide, batch_first=True), nn.Linear(wide, 9)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """(rows, times, letters + 1, symbols)."""
        before = F.pad(y, (1, 0))
        joint = self.hear(x)[0][:, :, None] + self.say(self.words(before))[0][:, None]
        return self.leave(joint.tanh()).log_softmax(-1)


def _transducer(scale: int) -> Made:
    rows = 8 * scale
    batch = torch.randn(rows, 16, 12), torch.randint(1, 9, (rows, 6))

    def loss(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        made = model(*b)
        blank = made[..., 0]
        letter = made[:, :, :-1].gather(3, b[1][:, None, :, None].expand(-1, made.shape[1], -1, 1))
        row = [torch.zeros(len(made))]
        for u in range(b[1].shape[1]):
            row.append(row[-1] + letter[:, 0, u, 0])
        for t in range(1, made.shape[1]):
            after = [row[0] + blank[:, t - 1, 0]]
            for u in range(1, len(row)):
                stay, go = row[u] + blank[:, t - 1, u], after[-1] + letter[:, t, u - 1, 0]
                after.append(torch.logaddexp(stay, go))
            row = after
        return -(row[-1] + blank[:, -1, -1]).mean()

    return Transducer(), batch, loss


class Speaker(nn.Module):
    """A decoder that looks where it looked before, with dropout that never rests."""

    def __init__(self, wide: int = 32) -> None:
        super().__init__()
        self.words, self.before = nn.Embedding(30, wide), nn.Linear(10, wide)
        self.cell, self.ask = nn.LSTMCell(2 * wide, wide), nn.Linear(wide, wide)
        self.where, self.score = nn.Conv1d(1, wide, 5, padding=2), nn.Linear(wide, 1)
        self.leave, self.stop = nn.Linear(2 * wide, 10), nn.Linear(2 * wide, 1)

    def forward(self, words: Tensor, sounds: Tensor) -> tuple[Tensor, Tensor]:
        """Sounds, and when to stop."""
        keys = self.words(words)
        h, c = torch.zeros(2, *keys[:, 0].shape).unbind()
        look, seen = torch.zeros(keys.shape[:2]), torch.zeros_like(keys[:, 0])
        made, ends, frame = [], [], torch.zeros_like(sounds[:, 0])
        for step in range(sounds.shape[1]):
            x = F.dropout(F.relu(self.before(frame)), 0.5, training=True)
            h, c = self.cell(torch.cat([x, seen], 1), (h, c))
            place = self.where(look[:, None]).transpose(1, 2)
            look = self.score((self.ask(h)[:, None] + keys + place).tanh())[..., 0].softmax(1)
            seen = (look[:, None] @ keys)[:, 0]
            both = torch.cat([h, seen], 1)
            made.append(self.leave(both))
            ends.append(self.stop(both)[:, 0])
            frame = sounds[:, step]
        return torch.stack(made, 1), torch.stack(ends, 1)


def _speaker(scale: int) -> Made:
    rows = 16 * scale
    batch = torch.randint(0, 30, (rows, 12)), torch.randn(rows, 20, 10)

    def loss(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        made, ends = model(*b)
        aim = torch.zeros_like(ends)
        aim[:, -1] = 1
        return F.mse_loss(made, b[1]) + F.binary_cross_entropy_with_logits(
            ends, aim, pos_weight=torch.tensor(5.0)
        )

    return Speaker(), batch, loss


class Tagger(nn.Module):
    """A GRU from both sides; the loss sums over all paths of tags."""

    def __init__(self, wide: int = 32, tags: int = 6) -> None:
        super().__init__()
        self.words, self.leave = nn.Embedding(50, wide), nn.Linear(2 * wide, tags)
        self.gru = nn.GRU(wide, wide, 2, batch_first=True, bidirectional=True)
        self.go = nn.Parameter(torch.randn(tags, tags) * 0.1)

    def forward(self, words: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        """Minus the log likelihood, by row."""
        scores = self.leave(self.gru(self.words(words))[0])
        all_ = scores[:, 0]
        path = scores[:, 0].gather(1, tags[:, :1])[:, 0]
        for t in range(1, words.shape[1]):
            step = (all_[:, :, None] + self.go[None]).logsumexp(1) + scores[:, t]
            all_ = torch.where(mask[:, t, None], step, all_)
            now = (
                scores[:, t].gather(1, tags[:, t : t + 1])[:, 0]
                + self.go[tags[:, t - 1], tags[:, t]]
            )
            path = path + now * mask[:, t]
        return all_.logsumexp(1) - path


def _tagger(scale: int) -> Made:
    rows = 24 * scale
    lengths = 4 + torch.arange(rows) * 5 % 11
    batch = {
        "words": torch.randint(0, 50, (rows, 14)),
        "tags": torch.randint(0, 6, (rows, 14)),
        "mask": torch.arange(14)[None] < lengths[:, None],
    }
    return Tagger(), batch, lambda m, b: m(**b).sum() / b["mask"].sum()


class Cell(nn.Module):
    """An LSTM cell with layer normalization."""

    def __init__(self, enter: int, wide: int) -> None:
        super().__init__()
        self.mix, self.norm, self.state = (
            nn.Linear(enter + wide, 4 * wide),
            nn.LayerNorm(4 * wide),
            nn.LayerNorm(wide),
        )

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One step."""
        h, c = state
        i, f, g, o = self.norm(self.mix(torch.cat([x, h], -1))).chunk(4, -1)
        c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(self.state(c))
        return h, (h, c)


class Stacked(nn.Module):
    """Cells in a loop; goes on from the state that the last batch left, kept as an attribute."""

    def __init__(self, wide: int = 32, *, carries: bool = False) -> None:
        super().__init__()
        self.words, self.leave = nn.Embedding(40, wide), nn.Linear(wide, 40)
        self.cells = nn.ModuleList(Cell(wide, wide) for _ in range(2))
        self.carries, self.kept = carries, None

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores."""
        x, after = self.words(tokens), []
        zero = torch.zeros(len(x), x.shape[-1])
        kept = self.kept if self.carries and self.kept is not None else [(zero, zero)] * 2
        for cell, state in zip(self.cells, kept, strict=True):
            made = []
            for step in x.unbind(1):
                h, state = cell(step, state)
                made.append(h)
            x = torch.stack(made, 1)
            after.append(tuple(s.detach() for s in state))
        self.kept = after if self.carries else None
        return self.leave(x)


def _stacked(carries: bool) -> Any:
    def build(scale: int) -> Made:
        tokens = torch.randint(0, 40, (16 * scale, 13))

        def loss(model: nn.Module, tokens: Tensor) -> Tensor:
            return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

        return Stacked(carries=carries), tokens, loss

    return build


class Convolved(nn.Module):
    """A diagonal state space, as one long convolution by FFT."""

    def __init__(self, wide: int, states: int = 8) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.rand(wide) * 2 - 4)
        self.decay = nn.Parameter(torch.zeros(wide, states))
        self.turn = nn.Parameter(math.pi * torch.arange(states).repeat(wide, 1))
        self.read = nn.Parameter(torch.randn(wide, states, dtype=torch.cfloat) * 0.5)
        self.skip, self.mix, self.norm = (
            nn.Parameter(torch.ones(wide)),
            nn.Linear(wide, 2 * wide),
            nn.LayerNorm(wide),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        length, u = x.shape[1], self.norm(x).transpose(1, 2)
        poles = -self.decay.exp() + 1j * self.turn
        at = poles * self.step.exp()[:, None]
        powers = torch.exp(at[..., None] * torch.arange(length))
        kernel = 2 * torch.einsum("hn,hnl->hl", self.read * (at.exp() - 1) / poles, powers).real
        y = torch.fft.irfft(torch.fft.rfft(u, 2 * length) * torch.fft.rfft(kernel, 2 * length))
        y = F.gelu(y[..., :length] + self.skip[:, None] * u).transpose(1, 2)
        return x + F.glu(self.mix(y))


def _convolved(scale: int) -> Made:
    class Long(nn.Module):
        """State spaces over numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(2, 32), nn.Linear(32, 5)
            self.blocks = nn.ModuleList(Convolved(32) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            """Classes."""
            x = self.enter(x)
            for block in self.blocks:
                x = block(x)
            return self.leave(x.mean(1))

    rows = 16 * scale
    return Long(), (torch.randn(rows, 48, 2), torch.arange(rows) % 5), classify


class Scanned(nn.Module):
    """Gated linear attention; what came before, by cumulative sums."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm, self.all, self.leave = (
            nn.RMSNorm(wide),
            nn.Linear(wide, 4 * wide),
            nn.Linear(wide, wide),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        q, k, v, gate = self.all(self.norm(x)).chunk(4, -1)
        fade = F.logsigmoid(gate).cumsum(1)
        state = torch.einsum("bld,ble->blde", k * (-fade).clamp(max=8).exp(), v).cumsum(1)
        return x + self.leave(torch.einsum("bld,blde->ble", q * fade.exp(), state) / x.shape[1])


def _scanned(scale: int) -> Made:
    class Words(nn.Module):
        """Scans over words; the last layer is the first one's matrix."""

        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(60, 24)
            self.blocks = nn.Sequential(*(Scanned(24) for _ in range(3)))
            self.leave = nn.Linear(24, 60, bias=False)
            self.leave.weight = self.words.weight

        def forward(self, *, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
            """The loss, and numbers for a log."""
            made = self.leave(self.blocks(self.words(tokens)))
            lost = F.cross_entropy(made[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            right = (made[:, :-1].argmax(-1) == labels[:, 1:]).float().mean().item()
            return {
                "loss": lost,
                "metrics": {"accuracy": right, "perplexity": math.exp(lost.item())},
            }

    tokens = torch.randint(0, 60, (8 * scale, 24))
    labels = tokens.clone()
    labels[1::2, 15:] = -100
    return Words(), {"tokens": tokens, "labels": labels}, lambda m, b: m(**b)["loss"]


class Adjoint(torch.autograd.Function):
    """Runge-Kutta; its gradient goes back along the path and keeps nothing of it."""

    @staticmethod
    def forward(ctx: Any, field: Any, x: Tensor, steps: int, *weights: Tensor) -> Tensor:
        """x at time 1."""
        ctx.field, ctx.steps = field, steps
        with torch.no_grad():
            for _ in range(steps):
                x = _runge_kutta(field, x, 1 / steps)
        ctx.save_for_backward(x, *weights)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Solved backwards."""
        x, *weights = ctx.saved_tensors
        total = [torch.zeros_like(w) for w in weights]
        for _ in range(ctx.steps):
            with torch.no_grad():
                x = _runge_kutta(ctx.field, x, -1 / ctx.steps)
            with torch.enable_grad():
                start = x.detach().requires_grad_()
                end = _runge_kutta(ctx.field, start, 1 / ctx.steps)
            gradient, *more = torch.autograd.grad(end, [start, *weights], gradient)
            total = [t + m for t, m in zip(total, more, strict=True)]
        return (None, gradient, None, *total)


def _runge_kutta(field: Any, x: Tensor, size: float) -> Tensor:
    one = field(x)
    two = field(x + size / 2 * one)
    three = field(x + size / 2 * two)
    four = field(x + size * three)
    return x + size / 6 * (one + 2 * two + 2 * three + four)


class Flowing(nn.Module):
    """A field, followed for a while."""

    def __init__(self, wide: int, *, adjoint: bool) -> None:
        super().__init__()
        self.enter, self.leave, self.adjoint = nn.Linear(48, wide), nn.Linear(wide, 5), adjoint
        self.field = nn.Sequential(nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, wide))

    def forward(self, x: Tensor) -> Tensor:
        """Classes."""
        x = self.enter(x)
        if self.adjoint:
            x = Adjoint.apply(self.field, x, 4, *self.field.parameters())
        else:
            for _ in range(4):
                x = _runge_kutta(self.field, x, 0.25)
        return self.leave(x)


class Written(nn.Module):
    """A network writes the weights of another, for each layer from a code."""

    def __init__(self, wide: int = 48) -> None:
        super().__init__()
        self.__dict__["body"] = nn.Sequential(
            nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, wide)
        ).to("meta")
        self.sizes = [p.shape for p in self.__dict__["body"].parameters()]
        self.names = [n for n, _ in self.__dict__["body"].named_parameters()]
        total = sum(s.numel() for s in self.sizes)
        self.codes, self.write = nn.Parameter(torch.randn(3, 8)), nn.Linear(8, total)
        nn.init.normal_(self.write.weight, std=0.01)
        self.leave = nn.Linear(wide, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Classes."""
        for code in self.codes:
            pieces = self.write(code).split([s.numel() for s in self.sizes])
            weights = {n: p.view(s) for n, p, s in zip(self.names, pieces, self.sizes, strict=True)}
            x = x + functional_call(self.__dict__["body"], weights, (x,))
        return self.leave(x)


def _tasks(scale: int) -> Made:
    def loss(model: nn.Module, tasks: dict[str, Tensor]) -> Tensor:
        lost = []
        for x, y in zip(tasks["x"], tasks["y"], strict=True):
            weights = dict(model.named_parameters())
            for _ in range(2):
                near = F.mse_loss(functional_call(model, weights, (x[:8],)), y[:8])
                slopes = torch.autograd.grad(near, list(weights.values()), create_graph=True)
                weights = {
                    n: w - 0.05 * g for (n, w), g in zip(weights.items(), slopes, strict=True)
                }
            lost.append(F.mse_loss(functional_call(model, weights, (x[8:],)), y[8:]))
        return torch.stack(lost).mean()

    model = nn.Sequential(
        nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )
    rows = 8 * scale
    return model, {"x": torch.randn(rows, 16, 4), "y": torch.randn(rows, 16, 1)}, loss


def _mixture(scale: int) -> Made:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        share, mean, spread = model(batch[0]).view(len(batch[0]), 3, 5).unbind(1)
        each = torch.distributions.Normal(mean, spread.exp())
        mixed = torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(logits=share), each
        )
        return -mixed.log_prob(batch[1]).mean()

    return tower(64 * scale, 15), (torch.randn(128 * scale, 48), torch.randn(128 * scale)), loss


class Atoms(nn.Module):
    """An energy of points; neighbors send messages along edges."""

    def __init__(self, wide: int = 32) -> None:
        super().__init__()
        self.kinds = nn.Embedding(5, wide)
        self.messages = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * wide + 8, wide), nn.SiLU(), nn.Linear(wide, wide))
            for _ in range(3)
        )
        self.leave = nn.Sequential(nn.Linear(wide, wide), nn.SiLU(), nn.Linear(wide, 1))
        self.register_buffer("centers", torch.linspace(0, 4, 8, dtype=torch.float64))

    def forward(self, kinds: Tensor, places: Tensor, edges: Tensor, owner: Tensor) -> Tensor:
        """For each molecule."""
        x, (one, two) = self.kinds(kinds), edges
        far = (places[one] - places[two]).norm(dim=-1)
        waves = torch.exp(-((far[:, None] - self.centers.float()) ** 2))
        for message in self.messages:
            sent = message(torch.cat([x[one], x[two], waves], 1))
            x = x + torch.zeros_like(x).index_add(0, two, sent)
        return torch.zeros(int(owner.max()) + 1).index_add(0, owner, self.leave(x)[:, 0])


def _atoms(scale: int) -> Made:
    each, rows = 6, 12 * scale
    owner = torch.arange(rows).repeat_interleave(each)
    pairs = torch.tensor([(i, j) for i in range(each) for j in range(each) if i != j]).t()
    edges = torch.cat([pairs + each * n for n in range(rows)], 1)
    batch = {
        "kinds": torch.randint(0, 5, (rows * each,)),
        "places": torch.randn(rows * each, 3),
        "edges": edges,
        "owner": owner,
        "energy": torch.randn(rows),
        "forces": torch.randn(rows * each, 3),
    }

    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        places = b["places"].clone().requires_grad_()
        energy = model(b["kinds"], places, b["edges"], b["owner"])
        forces = -torch.autograd.grad(energy.sum(), places, create_graph=True)[0]
        return F.mse_loss(energy, b["energy"]) + 10 * F.mse_loss(forces, b["forces"])

    return Atoms(), batch, loss


class Edges(nn.Module):
    """Points look at their nearest neighbors, which each layer finds anew."""

    def __init__(self, wide: int = 16) -> None:
        super().__init__()
        sizes = [3, wide, wide, wide]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * i, o, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.2))
            for i, o in pairwise(sizes)
        )
        self.turn, self.leave = nn.Linear(3, 9), nn.Linear(3 * wide, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Classes of clouds (rows, points, 3)."""
        turn = self.turn(x).amax(1).view(-1, 3, 3) * 0.1 + torch.eye(3)
        x, seen = (x @ turn).transpose(1, 2), []
        for layer in self.layers:
            with torch.no_grad():
                near = torch.cdist(x.transpose(1, 2), x.transpose(1, 2)).topk(6, largest=False)[1]
            at = near.flatten(1)[:, None].expand(-1, x.shape[1], -1)
            beside = x.gather(2, at).unflatten(2, (-1, 6))
            self_ = x[..., None].expand_as(beside)
            x = layer(torch.cat([self_, beside - self_], 1)).amax(-1)
            seen.append(x)
        return self.leave(torch.cat(seen, 1).amax(-1))


def _edges(scale: int) -> Made:
    rows = 8 * scale
    return Edges(), (torch.randn(rows, 48, 3), torch.arange(rows) % 5), classify


class Gathered(nn.Module):
    """The largest, the sum and the mean of what neighbors say, over one graph."""

    def __init__(self, wide: int = 24) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(12, wide), nn.Linear(wide, 4)
        self.layers = nn.ModuleList(nn.Linear(4 * wide, wide) for _ in range(3))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Scores of nodes."""
        x, (one, two) = self.enter(x), edges
        for layer in self.layers:
            sent, at = x[one], two[:, None].expand(-1, x.shape[1])
            ways = [
                torch.zeros_like(x).scatter_reduce(0, at, sent, how, include_self=False)
                for how in ("amax", "sum", "mean")
            ]
            x = x + layer(torch.cat([x, *ways], 1)).relu()
        return self.leave(x)


def _gathered(scale: int) -> Made:
    nodes = 96 * scale
    batch = {
        "x": torch.randn(nodes, 12),
        "edges": torch.randint(0, nodes, (2, 6 * nodes)),
        "y": torch.randint(0, 4, (nodes,)),
        "train": torch.rand(nodes) < 0.3,
    }

    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(b["x"], b["edges"])[b["train"]], b["y"][b["train"]])

    return Gathered(), batch, loss


class Energies(nn.Module):
    """Langevin steps with its own gradient find where it is low."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.net = tower(wide, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Energies."""
        return self.net(x)[:, 0]

    def low(self, x: Tensor) -> Tensor:
        """Places with less energy."""
        for _ in range(3):
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                slope = torch.autograd.grad(self(x).sum(), x)[0]
            x = x - 0.1 * slope
        return x.detach()


def _energies(scale: int) -> Made:
    def loss(model: Any, x: Tensor) -> Tensor:
        fake = model.low(x.flip(1))
        real, made = model(x), model(fake)
        return real.mean() - made.mean() + 0.1 * (real.square() + made.square()).mean()

    return Energies(64 * scale), torch.randn(96 * scale, 48), loss


SCANS = (
    Stranger("conformer-ctc", "speech", _conformer),
    Stranger("transducer", "speech", _transducer),
    Stranger("speaker", "speech", _speaker, random=True),
    Stranger("paths-of-tags", "recurrent", _tagger),
    Stranger("cells-in-a-loop", "recurrent", _stacked(False)),
    Stranger("state-as-attribute", "recurrent", _stacked(True)),
    Stranger("long-convolution", "state space", _convolved),
    Stranger("scan-with-metrics", "state space", _scanned),
    Stranger(
        "runge-kutta", "implicit", lambda s: (Flowing(64 * s, adjoint=False), labeled(s), classify)
    ),
    Stranger(
        "adjoint", "implicit", lambda s: (Flowing(64 * s, adjoint=True), labeled(s), classify)
    ),
    Stranger("written-weights", "mlp", lambda s: (Written(), labeled(s), classify)),
    Stranger("tasks", "meta", _tasks),
    Stranger("mixture-density", "other", _mixture),
    Stranger("forces", "graph", _atoms),
    Stranger("edge-convolution", "graph", _edges, "sgd"),
    Stranger("scatter-reduce", "graph", _gathered),
    Stranger("langevin", "other", _energies),
)
