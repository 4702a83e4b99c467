"""Models that are more than layers, and batches that are more than rows."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils.parametrizations import weight_norm

from .base import Layer, Made, Stranger, classify, labeled, tower

# -- models ----------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A decoder that is its encoder turned over."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(48, wide), nn.Linear(wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        """A reconstruction."""
        h = F.gelu(self.two(F.gelu(self.one(x))))
        h = F.gelu(F.linear(h, self.two.weight.t()))
        return F.linear(h, self.one.weight.t())


def _tied(scale: int) -> Made:
    return Tied(128 * scale), torch.randn(256 * scale, 48), lambda m, x: F.mse_loss(m(x), x)


class Hyper(nn.Module):
    """Each example has weights of its own, made from its description."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.wide, self.make = wide, nn.Sequential(nn.Linear(8, 32), nn.GELU(),
                                                   nn.Linear(32, wide * 16))  # fmt: skip
        self.leave = nn.Linear(wide, 5)

    def forward(self, x: Tensor, described: Tensor) -> Tensor:
        """Classes."""
        weights = self.make(described).unflatten(1, (self.wide, 16))
        return self.leave(torch.einsum("bwi,bi->bw", weights, x).relu())


def _hyper(scale: int) -> Made:
    rows = 64 * scale
    batch = {"x": torch.randn(rows, 16), "d": torch.randn(rows, 8), "y": torch.arange(rows) % 5}
    return Hyper(48 * scale), batch, lambda m, b: F.cross_entropy(m(b["x"], b["d"]), b["y"])


def _weight_norm(scale: int) -> Made:
    wide = 64 * scale
    model = nn.Sequential(
        weight_norm(nn.Linear(48, wide)), nn.ReLU(), weight_norm(nn.Linear(wide, wide)), nn.ReLU(),
        weight_norm(nn.Linear(wide, wide)), nn.ReLU(), weight_norm(nn.Linear(wide, 5)),
    )  # fmt: skip
    return model, labeled(scale, 256), classify


class Ensemble(nn.Module):
    """Four networks as one, by `vmap` over their stacked parameters."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        members = [tower(wide, 5, 2) for _ in range(4)]
        stacked, _ = stack_module_state(members)
        self.names = list(stacked)
        self.stacked = nn.ParameterList(nn.Parameter(t.detach()) for t in stacked.values())
        self.__dict__["one"] = copy.deepcopy(members[0]).to("meta")

    def forward(self, x: Tensor) -> Tensor:
        """Classes, by member."""

        def call(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            made: Tensor = functional_call(self.__dict__["one"], parameters, (x,))
            return made

        given = dict(zip(self.names, self.stacked, strict=True))
        return vmap(call, in_dims=(0, None))(given, x)


def _ensemble(scale: int) -> Made:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        made = model(batch[0])
        return torch.stack([F.cross_entropy(m, batch[1]) for m in made]).mean()

    return Ensemble(32 * scale), labeled(scale), loss


class Fourier(nn.Module):
    """Mixes positions by a complex weight for each frequency."""

    def __init__(self, length: int, wide: int) -> None:
        super().__init__()
        kept = torch.randn(length // 2 + 1, wide, dtype=torch.complex64)
        self.filter, self.layer = nn.Parameter(kept * 0.02), Layer(wide)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        turned = torch.fft.rfft(x, dim=1) * self.filter
        made: Tensor = self.layer(x + torch.fft.irfft(turned, n=x.shape[1], dim=1))
        return made


def _fourier(scale: int) -> Made:
    wide, rows = 32 * scale, 24 * scale
    model = nn.Sequential(nn.Linear(8, wide), *(Fourier(32, wide) for _ in range(3)),
                          nn.Linear(wide, 8))  # fmt: skip
    return model, torch.randn(rows, 32, 8), lambda m, x: F.mse_loss(m(x), x.flip(1))


class Adapted(nn.Module):
    """A frozen layer with a low-rank one beside it, behind dropout."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.base = nn.Linear(wide, wide).requires_grad_(False)
        self.down, self.up = nn.Linear(wide, 4, bias=False), nn.Linear(4, wide, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + F.gelu(self.base(x) + 2.0 * self.up(self.down(self.drop(x))))


def _adapted(scale: int) -> Made:
    wide = 96 * scale
    model = nn.Sequential(nn.Linear(48, wide).requires_grad_(False),
                          *(Adapted(wide) for _ in range(5)), nn.Linear(wide, 5))  # fmt: skip
    return model, labeled(scale), classify


class Frozen(nn.Sequential):
    """Its BatchNorm layers stay as they were trained, whatever mode it is in."""

    def train(self, mode: bool = True) -> Frozen:
        """All but BatchNorm."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


def _frozen(scale: int) -> Made:
    wide = 16 * scale
    model = Frozen(
        nn.Conv2d(3, wide, 3, 2, 1), nn.BatchNorm2d(wide), nn.ReLU(),
        nn.Conv2d(wide, 2 * wide, 3, 2, 1), nn.BatchNorm2d(2 * wide), nn.ReLU(),
        nn.Conv2d(2 * wide, wide, 1), nn.BatchNorm2d(wide), nn.ReLU(), nn.Flatten(),
        nn.Linear(wide * 64, 5),
    ).train()  # fmt: skip
    rows = 24 * scale
    return model, (torch.randn(rows, 3, 32, 32), torch.arange(rows) % 5), classify


class Masked(nn.Module):
    """Attention under a mask for each example."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(wide), nn.Linear(wide, 3 * wide)
        self.leave = nn.Linear(wide, wide)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """The same shape."""
        parts = (t.unflatten(-1, (4, -1)).transpose(1, 2)
                 for t in self.mix(self.norm(x)).chunk(3, -1))  # fmt: skip
        made = F.scaled_dot_product_attention(*parts, attn_mask=mask)
        return x + self.leave(made.transpose(1, 2).flatten(2))


class Reader(nn.Module):
    """Tokens under their masks."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(100, wide), nn.Linear(wide, 100)
        self.blocks = nn.ModuleList(Masked(wide) for _ in range(3))

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Logits."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def _counted(scale: int) -> Made:
    rows, length = 12 * scale, 24
    lengths = torch.randint(4, length, (rows,))
    inside = torch.arange(length) < lengths[:, None]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    mask = (inside[:, None, None, :] & causal) | torch.eye(length, dtype=torch.bool)
    batch = {"tokens": torch.randint(0, 100, (rows, length)), "mask": mask,
             "inside": inside, "count": inside.sum()}  # fmt: skip

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        made = model(batch["tokens"], batch["mask"])
        each = F.cross_entropy(made.flatten(0, 1), batch["tokens"].flatten(), reduction="none")
        return (each * batch["inside"].flatten()).sum() / batch["count"]

    return Reader(32 * scale), batch, loss


# -- batches ---------------------------------------------------------------------------------------


def _time_first(scale: int) -> Made:
    class Steps(nn.Module):
        """An LSTM over (time, examples, numbers)."""

        def __init__(self) -> None:
            super().__init__()
            self.cell, self.leave = nn.LSTM(16, 48 * scale), nn.Linear(48 * scale, 5)

        def forward(self, x: Tensor) -> Tensor:
            """Classes at the last step."""
            return self.leave(self.cell(x)[0][-1])

    rows = 24 * scale
    return Steps(), (torch.randn(rows, rows, 16), torch.arange(rows) % 5), classify


def _lists(scale: int) -> Made:
    rows = 96 * scale
    batch = {"views": [torch.randn(rows, 48) for _ in range(3)], "names": ["a", "b", "c"],
             "target": [torch.randn(rows, 8), None], "epoch": 3}  # fmt: skip

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        made = torch.stack([model(view) for view in batch["views"]]).mean(0)
        return F.mse_loss(made, batch["target"][0])

    return tower(64 * scale, 8), batch, loss


def _ragged(scale: int) -> Made:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 30, (48 * scale,), generator=generator).tolist()
    batch = ([torch.randn(n, 48) for n in lengths], torch.arange(len(lengths)) % 5)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        pooled = torch.stack([model(one).mean(0) for one in batch[0]])
        return F.cross_entropy(pooled, batch[1])

    return tower(64 * scale, 5, 2), batch, loss


def _one_hot(scale: int) -> Made:
    x, labels = labeled(scale)
    soft = F.one_hot(labels, 5).float() * 0.9 + 0.02

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, None]) -> Tensor:
        return -(batch[1] * model(batch[0]).log_softmax(-1)).sum(-1).mean()

    return tower(64 * scale, 5), (x, soft, None), loss


def _correlated(scale: int) -> Made:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        made, aim = model(batch[0])[:, 0], batch[1]
        made, aim = made - made.mean(), aim - aim.mean()
        return 1 - (made * aim).sum() / (made.norm() * aim.norm() + 1e-6)

    return tower(64 * scale, 1), (torch.randn(128 * scale, 48), torch.randn(128 * scale)), loss


def _survival(scale: int) -> Made:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, _, died = batch  # sorted by time, the longest first
        risk = model(x)[:, 0]
        return -((risk - risk.logcumsumexp(0)) * died).sum() / died.sum()

    rows = 128 * scale
    times = torch.rand(rows).sort(descending=True)[0]
    died = (torch.rand(rows) < 0.6).float()
    return tower(64 * scale, 1), (torch.randn(rows, 48), times, died), loss


def _gumbel(scale: int) -> Made:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        picked = F.gumbel_softmax(model(x), tau=0.7, hard=True)
        return (picked @ x.new_ones(32, 4).cumsum(0) / 32 - x[:, :4]).square().mean()

    return tower(64 * scale, 32), torch.randn(128 * scale, 48), loss


UNUSUAL = [
    Stranger("tied-autoencoder", "mlp", _tied),
    Stranger("hypernetwork", "mlp", _hyper),
    Stranger("weight-norm", "mlp", _weight_norm, "sgd"),
    Stranger("stacked-ensemble", "mlp", _ensemble),
    Stranger("complex-filter", "language", _fourier),
    Stranger("lora-dropout", "lora", _adapted, random=True),
    Stranger("frozen-batch-norm", "vision", _frozen, "sgd"),
    Stranger("counted-tokens", "language", _counted),
    Stranger("time-first", "recurrent", _time_first),
    Stranger("lists-and-none", "mlp", _lists),
    Stranger("ragged-list", "mlp", _ragged),
    Stranger("soft-labels", "mlp", _one_hot),
    Stranger("correlation", "mlp", _correlated),
    Stranger("survival", "mlp", _survival),
    Stranger("gumbel", "mlp", _gumbel, random=True),
]
