"""Ways to train: gradients of other kinds, wrapped models, batches in fields, optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .base import Layer, Made, Stranger, classify, labeled, tower

# -- gradients -------------------------------------------------------------------------------------


class Rounded(nn.Linear):
    """8-bit weights and inputs, straight through; the range of inputs is watched."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """As `Linear`."""
        if self.training:
            with torch.no_grad():
                self.low.copy_(torch.minimum(self.low, x.min()))
                self.high.copy_(torch.maximum(self.high, x.max()))
        step = (self.high - self.low) / 255
        x = x + ((x / step).round() * step - x).detach()
        size = self.weight.detach().abs().amax() / 127
        weight = torch.fake_quantize_per_tensor_affine(self.weight, float(size), 0, -127, 127)
        return F.linear(x, weight, self.bias)


def _rounded(scale: int) -> Made:
    wide = 64 * scale
    blocks = [m for _ in range(4) for m in (Rounded(wide, wide), nn.GELU())]
    return (
        nn.Sequential(nn.Linear(48, wide), *blocks, nn.Linear(wide, 5)),
        labeled(scale),
        classify,
    )


class Recommender(nn.Module):
    """Gradients of words that were not seen do not exist."""

    def __init__(self, wide: int = 16) -> None:
        super().__init__()
        self.who, self.what = (nn.Embedding(2000, wide, sparse=True) for _ in range(2))
        self.net = nn.Sequential(
            nn.Linear(2 * wide, 64), nn.ReLU(), *(Layer(64) for _ in range(3)), nn.Linear(64, 1)
        )

    def forward(self, who: Tensor, what: Tensor) -> Tensor:
        """A score."""
        return self.net(torch.cat([self.who(who), self.what(what)], 1))[:, 0]


def _recommender(scale: int) -> Made:
    rows = 192 * scale
    batch = (
        torch.randint(0, 2000, (rows,)),
        torch.randint(0, 2000, (rows,)),
        torch.rand(rows).round(),
    )
    return Recommender(), batch, lambda m, b: F.binary_cross_entropy_with_logits(m(*b[:2]), b[2])


def _forward_mode(scale: int) -> Made:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        made, along = torch.func.jvp(model, (batch[0],), (torch.ones_like(batch[0]),))
        return F.cross_entropy(made, batch[1]) + 0.1 * along.square().mean()

    wide = 64 * scale
    model = nn.Sequential(
        nn.Linear(48, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, 5)
    )
    return model, labeled(scale), loss


def _by_example(scale: int) -> Made:
    """The norms of gradients of single examples, small."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        weights = dict(model.named_parameters())

        def one(weights: Any, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(model, weights, (x[None],)), y[None])

        each = torch.func.vmap(torch.func.grad(one), (None, 0, 0))(weights, *batch)
        norms = sum(g.flatten(1).square().sum(1) for g in each.values())
        return classify(model, batch) + 1e-3 * norms.mean()

    wide = 32 * scale
    model = nn.Sequential(nn.Linear(48, wide), nn.Tanh(), nn.Linear(wide, 5))
    return model, labeled(scale, 64), loss


class Again(nn.Module):
    """Blocks that recompute themselves, as their author wants it."""

    def __init__(self, wide: int, *, reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(48, wide), nn.Linear(wide, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(Layer(wide), nn.Dropout(dropout)) for _ in range(5)
        )
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Classes."""
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=self.reentrant) if number % 2 else block(x)
        return self.leave(x)


# -- precision -------------------------------------------------------------------------------------


class Narrow(nn.Module):
    """A body in bf16 between layers in FP32; a buffer in FP64 counts what passes."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(48, wide), nn.Linear(wide, 5)
        self.body = nn.Sequential(*(Layer(wide) for _ in range(4))).bfloat16()
        self.register_buffer("total", torch.zeros(wide, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Classes."""
        x = self.body(self.enter(x).bfloat16()).float()
        if self.training:
            self.total += x.detach().double().sum(0)
        return self.leave(x)


def _autocast(scale: int) -> Made:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            made = model(batch[0])
        return F.cross_entropy(made.float(), batch[1])

    wide = 16 * scale
    blocks = [
        m
        for _ in range(4)
        for m in (nn.Conv2d(wide, wide, 3, 1, 1), nn.GroupNorm(4, wide), nn.SiLU())
    ]
    model = nn.Sequential(
        nn.Conv2d(3, wide, 3, 2, 1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(wide, 5),
    )
    return model, (torch.randn(16, 3, 32, 32), torch.arange(16) % 5), loss


class Turned(nn.Module):
    """Complex weights."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(i, o, dtype=torch.cfloat)
            for i, o in ((24, wide), (wide, wide), (wide, wide), (wide, 5))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Classes."""
        x = torch.view_as_complex(x.view(len(x), 24, 2).contiguous())
        for layer in self.layers[:-1]:
            x = layer(x)
            x = torch.polar(F.relu(x.abs() - 0.01), x.angle())
        return self.layers[-1](x).abs()


# -- models that change or are wrapped -------------------------------------------------------------


class Curriculum(nn.Module):
    """Grows deeper with the number of its calls, a Python number."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(48, wide), nn.Linear(wide, 5)
        self.blocks = nn.ModuleList(Layer(wide) for _ in range(6))
        self.calls, self.deep = 0, 4

    def forward(self, x: Tensor) -> Tensor:
        """Classes."""
        self.calls += 1
        x = self.enter(x)
        for block in self.blocks[: self.deep]:
            x = block(x)
        return self.leave(x)


def _curriculum(scale: int) -> Made:
    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        made = model(batch[0])
        return F.cross_entropy(made, batch[1]) + 0.01 * model.calls * made.square().mean()

    return Curriculum(64 * scale), labeled(scale), loss


class Methods(nn.Module):
    """A loss that calls two methods of the model and never the model."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.one, self.two = (
            tower(wide, 8, 3),
            nn.Sequential(nn.Linear(8, wide), Layer(wide), nn.Linear(wide, 48)),
        )

    def encode(self, x: Tensor) -> Tensor:
        """A short code."""
        return self.one(x)

    def decode(self, z: Tensor) -> Tensor:
        """And back."""
        return self.two(z)


def _methods(scale: int) -> Made:
    def loss(model: Any, x: Tensor) -> Tensor:
        z = model.encode(x)
        return F.mse_loss(model.decode(z + 0.1 * torch.randn_like(z)), x) + z.square().mean()

    return Methods(64 * scale), torch.randn(128 * scale, 48), loss


class Frozen(nn.Module):
    """Half of it is frozen and in evaluation mode, BatchNorm included."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(48, wide), nn.BatchNorm1d(wide), nn.ReLU(), Layer(wide), nn.Dropout(0.3)
        )
        self.head = nn.Sequential(Layer(wide), Layer(wide), nn.Linear(wide, 5))
        self.body.requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> Any:
        """The body stays as it is."""
        super().train(mode)
        self.body.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Classes."""
        return self.head(self.body(x))


def _parallel(scale: int) -> Made:
    return nn.DataParallel(tower(64 * scale, 5)), labeled(scale), classify


def _compiled(scale: int) -> Made:
    return torch.compile(tower(64 * scale, 5), backend="eager"), labeled(scale), classify


class Views(nn.Module):
    """Writes in place: into slices, through views, after adding."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(48, wide), nn.Linear(wide, 5)
        self.layers = nn.ModuleList(nn.Linear(wide, wide) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Classes."""
        x = self.enter(x)
        for layer in self.layers:
            h = layer(x)
            h[:, ::2].relu_()
            out = torch.empty_like(x)
            out[:, : x.shape[1] // 2] = h[:, : x.shape[1] // 2]
            out[:, x.shape[1] // 2 :] = h[:, x.shape[1] // 2 :].sigmoid()
            x = out.add_(x).t().contiguous().t()
        return self.leave(x)


# -- batches ---------------------------------------------------------------------------------------


class Scene(NamedTuple):
    """A batch by name."""

    picture: Tensor
    words: dict[str, Tensor]
    kind: Tensor
    name: str = "scene"


class Pair(nn.Module):
    """Pictures and words, every one of a batch against every other."""

    def __init__(self, wide: int = 32) -> None:
        super().__init__()
        self.see = nn.Sequential(
            nn.Conv2d(3, wide, 4, 4),
            nn.GELU(),
            nn.Conv2d(wide, wide, 3, 1, 1),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(wide, wide),
        )
        self.words = nn.Embedding(50, wide)
        self.read = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(wide, 4, 64, 0.0, batch_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.sharp, self.off = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(-3.0))

    def forward(self, *, picture: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """Scores of all pairs."""
        seen = F.normalize(self.see(picture), dim=-1)
        read = self.read(self.words(ids), src_key_padding_mask=~mask)
        said = F.normalize((read * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)
        return self.sharp.exp() * seen @ said.t() + self.off


def _pair(*, pairs: bool) -> Any:
    def build(scale: int) -> Made:
        rows = 16 * scale
        mask = torch.arange(10)[None] < (4 + torch.arange(rows) % 6)[:, None]
        batch = Scene(
            torch.randn(rows, 3, 32, 32),
            {"ids": torch.randint(0, 50, (rows, 10)), "mask": mask},
            torch.arange(rows) % 2,
        )

        def loss(model: nn.Module, b: Scene) -> Tensor:
            made = model(picture=b.picture, **b.words)
            if not pairs:
                return F.binary_cross_entropy_with_logits(made.diagonal(), b.kind.float())
            sign = 2 * torch.eye(len(made)) - 1
            return -F.logsigmoid(sign * made).sum() / len(made)

        return Pair(), batch, loss

    return build


@dataclass
class Graphs:
    """Graphs of different sizes, one after the other."""

    nodes: list[Tensor]
    links: list[Tensor]
    target: Tensor
    split: str = "train"


def _graphs(scale: int) -> Made:
    generator = torch.Generator().manual_seed(2)
    sizes = [4 + n % 9 for n in range(32 * scale)]
    links = [(torch.rand(n, n, generator=generator) < 0.4).float() + torch.eye(n) for n in sizes]
    batch = Graphs([torch.randn(n, 48) for n in sizes], links, torch.randn(len(sizes)))

    def loss(model: nn.Module, b: Graphs) -> Tensor:
        made = [
            model(link @ node / link.sum(1, keepdim=True)).mean()
            for node, link in zip(b.nodes, b.links, strict=True)
        ]
        return F.mse_loss(torch.stack(made), b.target)

    return tower(64 * scale, 1, 3), batch, loss


def _nested(scale: int) -> Made:
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randn(3 + n % 7, 48, generator=generator) for n in range(32 * scale)]
    batch = torch.nested.nested_tensor(rows, layout=torch.jagged), torch.arange(len(rows)) % 5

    def loss(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        values, at = b[0].values(), b[0].offsets()
        owner = torch.repeat_interleave(torch.arange(len(at) - 1), at.diff())
        made = model(values)
        return F.cross_entropy(torch.zeros(len(at) - 1, 5).index_add(0, owner, made), b[1])

    return tower(64 * scale, 5, 3), batch, loss


# -- optimizers ------------------------------------------------------------------------------------


class Signs(torch.optim.Optimizer):
    """Steps of one size, by the sign of a mean of gradients (Lion)."""

    def __init__(self, parameters: Iterable[Any], lr: float = 1e-3, decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Once."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            near, far = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_((near * state["mean"] + (1 - near) * p.grad).sign(), alpha=-group["lr"])
                state["mean"].lerp_(p.grad, 1 - far)
        return loss


def _by(name: str, **more: Any) -> Any:
    def made(model: nn.Module) -> torch.optim.Optimizer:
        parameters = [p for p in model.parameters() if p.requires_grad]
        return getattr(torch.optim, name)(parameters, **more)

    return made


def _groups(model: nn.Module) -> torch.optim.Optimizer:
    """Biases without decay, the last layer faster, a schedule for all."""
    last = list(model[-1].parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in last)]
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
        {"params": last, "lr": 3e-3, "betas": (0.8, 0.9)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-3, 1e-3, 3e-3], total_steps=50)
    return optimizer


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-3)


def _sparse(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def _plain(scale: int) -> Made:
    return tower(64 * scale, 5), labeled(scale, 256), classify


_OPTIMIZERS = {
    "sgd-alone": _by("SGD", lr=0.1),
    "sgd-fused": _by("SGD", lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "sgd-maximize": _by("SGD", lr=0.01, momentum=0.9, dampening=0.5, maximize=True),
    "rmsprop": _by("RMSprop", lr=1e-3, centered=True, momentum=0.9),
    "adagrad": _by("Adagrad", lr=1e-2),
    "adamax": _by("Adamax", lr=1e-3),
    "nadam": _by("NAdam", lr=1e-3, decoupled_weight_decay=True),
    "radam": _by("RAdam", lr=1e-3),
    "adadelta": _by("Adadelta", lr=0.5),
    "asgd": _by("ASGD", lr=0.01, t0=1.0),
    "rprop": _by("Rprop", lr=1e-3),
    "adafactor": _by("Adafactor", lr=1e-2),
    "amsgrad-foreach": _by("Adam", lr=1e-3, amsgrad=True, foreach=True),
    "adamw-fused": _by("AdamW", lr=1e-3, fused=True),
    "adam-rate-tensor": _by("Adam", lr=torch.tensor(1e-3), foreach=False),
    "signs": lambda m: Signs(m.parameters()),
    "groups-and-schedule": _groups,
    "muon-matrices": _muon,
}

MECHANICS = (
    Stranger("rounded-weights", "mlp", _rounded),
    Stranger("sparse-gradients", "other", _recommender, _sparse),
    Stranger("forward-mode", "other", _forward_mode),
    Stranger("norms-by-example", "other", _by_example),
    Stranger(
        "own-checkpoints", "mlp", lambda s: (Again(64 * s, reentrant=False), labeled(s), classify)
    ),
    Stranger(
        "own-checkpoints-reentrant",
        "mlp",
        lambda s: (Again(64 * s, reentrant=True), labeled(s), classify),
    ),
    Stranger(
        "own-checkpoints-dropout",
        "mlp",
        lambda s: (Again(64 * s, reentrant=False, dropout=0.2), labeled(s), classify),
        random=True,
    ),
    Stranger("bf16-body-autocast", "mlp", lambda s: (Narrow(64 * s), labeled(s), classify)),
    Stranger("convolutions-autocast", "vision", _autocast),
    Stranger("complex-weights", "other", lambda s: (Turned(48 * s), labeled(s), classify)),
    Stranger("curriculum", "mlp", _curriculum),
    Stranger("methods-only", "other", _methods, random=True),
    Stranger("frozen-half", "mlp", lambda s: (Frozen(64 * s), labeled(s), classify)),
    Stranger("data-parallel", "mlp", _parallel),
    Stranger("compiled", "mlp", _compiled),
    Stranger("written-views", "mlp", lambda s: (Views(64 * s), labeled(s), classify)),
    Stranger("named-tuple", "contrastive", _pair(pairs=False)),
    Stranger("all-pairs", "contrastive", _pair(pairs=True)),
    Stranger("graphs-in-lists", "graph", _graphs),
    Stranger("nested-rows", "other", _nested),
    *(
        Stranger(f"optimizer-{name}", "optimizers", _plain, how)
        for name, how in _OPTIMIZERS.items()
    ),
)
