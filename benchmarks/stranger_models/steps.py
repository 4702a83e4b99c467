"""Steps that do more than a forward pass: teachers, penalties, inner loops, random depth."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from .base import Layer, Made, Stranger, classify, labeled, tower


def _teacher(scale: int) -> Made:
    model = tower(64 * scale, 32)
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():  # follows the model at every call
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast.to(slow), 0.1)
        return F.mse_loss(model(x + 0.1), teacher(x).detach())

    return model, torch.randn(128 * scale, 48), loss


class Averaged(nn.Module):
    """A student and its teacher, which follows it inside the forward pass."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.student = tower(wide, 32)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Their distance, by example."""
        with torch.no_grad():
            pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
            for slow, fast in pairs:
                slow.lerp_(fast, 0.1)
            aim = self.teacher(x)
        return (self.student(x + 0.1) - aim).square().mean(1)


def _averaged(scale: int) -> Made:
    return Averaged(64 * scale), torch.randn(128 * scale, 48), lambda m, x: m(x).mean()


def _penalty(scale: int) -> Made:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        real, fake = batch
        between = (0.3 * real + 0.7 * fake).requires_grad_()
        slope = torch.autograd.grad(model(between).sum(), between, create_graph=True)[0]
        fit = model(fake).mean() - model(real).mean()
        return fit + 10 * (slope.norm(dim=1) - 1).square().mean()

    rows = 96 * scale
    return tower(64 * scale, 1), (torch.randn(rows, 48), torch.randn(rows, 48)), loss


def _inner_loop(scale: int) -> Made:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        weights = dict(model.named_parameters())
        near, far = batch[0].chunk(2, 1)
        first = F.mse_loss(functional_call(model, weights, (near,)), batch[1])
        slopes = torch.autograd.grad(first, list(weights.values()), create_graph=True)
        moved = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), slopes, strict=True)}
        return F.mse_loss(functional_call(model, moved, (far,)), batch[1])

    model = nn.Sequential(nn.Linear(24, 64 * scale), nn.Tanh(), nn.Linear(64 * scale, 4))
    return model, (torch.randn(128 * scale, 48), torch.randn(128 * scale, 4)), loss


class Equilibrium(nn.Module):
    """A fixed point, found by as many steps as it takes."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.enter, self.mix, self.leave = (
            nn.Linear(48, wide), nn.Linear(wide, wide), nn.Linear(wide, 5),
        )  # fmt: skip
        nn.init.normal_(self.mix.weight, std=0.3 / wide**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Classes of the fixed point."""
        given = self.enter(x)
        z = torch.zeros_like(given)
        with torch.no_grad():
            for _ in range(30):
                after = torch.tanh(self.mix(z) + given)
                if float((after - z).norm() / after.norm()) < 1e-4:
                    break
                z = after
        for _ in range(3):
            z = torch.tanh(self.mix(z) + given)
        return self.leave(z)


def _equilibrium(scale: int) -> Made:
    return Equilibrium(128 * scale), labeled(scale), classify


class Skipping(nn.Module):
    """Blocks that Python's own random numbers leave out."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(48, wide), nn.Linear(wide, 5)
        self.blocks = nn.ModuleList(Layer(wide) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        """Classes."""
        x = self.enter(x)
        for block in self.blocks:
            if random.random() < 0.7:
                x = block(x)
        return self.leave(x)


def _skipping(scale: int) -> Made:
    return Skipping(64 * scale), labeled(scale), classify


class Carried(nn.Module):
    """A GRU that goes on from the state that the last step left."""

    def __init__(self, wide: int, rows: int) -> None:
        super().__init__()
        self.cell, self.leave = nn.GRU(16, wide, batch_first=True), nn.Linear(wide, 5)
        self.register_buffer("state", torch.zeros(1, rows, wide), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Classes at the last step."""
        made, state = self.cell(x, self.state)
        self.state = state.detach()
        return self.leave(made[:, -1])


def _carried(scale: int) -> Made:
    rows = 32 * scale
    batch = (torch.randn(rows, 20, 16), torch.arange(rows) % 5)
    return Carried(48 * scale, rows), batch, classify


class Warming(nn.Module):
    """The loss's second term grows with a count of calls."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.net = tower(wide, 5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Classes and the share of the second term."""
        self.calls += 1
        return self.net(x), (self.calls / 10).clamp(max=1.0)


def _warming(scale: int) -> Made:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        made, share = model(batch[0])
        return F.cross_entropy(made, batch[1]) + share * made.square().mean()

    return Warming(64 * scale), labeled(scale), loss


class Aside(nn.Module):
    """Blocks that leave a term of the loss on themselves."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.layer, self.gate = Layer(wide), nn.Linear(wide, 8)
        self.aside: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        self.aside = self.gate(x).softmax(-1).square().sum(-1).mean()
        made: Tensor = self.layer(x)
        return made


def _aside(scale: int) -> Made:
    wide = 64 * scale
    model = nn.Sequential(nn.Linear(48, wide), *(Aside(wide) for _ in range(4)),
                          nn.Linear(wide, 5))  # fmt: skip

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        value = classify(model, batch)
        asides = [m.aside for m in model.modules() if isinstance(m, Aside)]
        return value + 0.1 * torch.stack(asides).sum()

    return model, labeled(scale), loss


class Reversed(nn.Module):
    """Gradients turned by a hook on a tensor, as domain adaptation does."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.body, self.head, self.domain = tower(wide, wide), nn.Linear(wide, 5), Layer(wide)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Classes and domains."""
        h = self.body(x)
        turned = h.clone()
        if turned.requires_grad:
            turned.register_hook(lambda g: -0.3 * g)
        return self.head(h), self.domain(turned)


def _reversed(scale: int) -> Made:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        made, domain = model(batch[0])
        return F.cross_entropy(made, batch[1]) + domain.square().mean()

    return Reversed(64 * scale), labeled(scale), loss


class Scaled(torch.autograd.Function):
    """Rounded going forward, straight through and scaled going back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        """Quarters."""
        ctx.save_for_backward(x)
        ctx.scale = scale
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Where x is small."""
        (x,) = ctx.saved_tensors
        return grad * ctx.scale * (x.abs() < 2), None


class Quantized(nn.Module):
    """A block between two functions of its own."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.layer = Layer(wide)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        made: Tensor = x + Scaled.apply(self.layer(x), 0.5)
        return made


def _quantized(scale: int) -> Made:
    wide = 64 * scale
    model = nn.Sequential(nn.Linear(48, wide), *(Quantized(wide) for _ in range(4)),
                          nn.Linear(wide, 5))  # fmt: skip
    return model, labeled(scale), classify


class Whole(nn.Module):
    """Statistics of the batch by hand, as a synchronized BatchNorm has them."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.net = tower(wide, wide)
        self.leave = nn.Linear(wide, 5)
        self.register_buffer("mean", torch.zeros(wide))

    def forward(self, x: Tensor) -> Tensor:
        """Classes."""
        x = self.net(x)
        mean = x.mean(0)
        with torch.no_grad():
            self.mean.lerp_(mean, 0.1)
        return self.leave((x - mean) / (x.var(0) + 1e-5).sqrt())


def _whole(scale: int) -> Made:
    return Whole(64 * scale), labeled(scale), classify


STEPS = [
    Stranger("teacher-in-the-loss", "contrastive", _teacher),
    Stranger("teacher-in-the-model", "contrastive", _averaged),
    Stranger("gradient-penalty", "gan", _penalty),
    Stranger("inner-loop", "meta", _inner_loop),
    Stranger("equilibrium", "implicit", _equilibrium),
    Stranger("python-random-depth", "mlp", _skipping, random=True),
    Stranger("carried-state", "recurrent", _carried),
    Stranger("warming-term", "mlp", _warming),
    Stranger("terms-aside", "mixture of experts", _aside),
    Stranger("gradient-reversal", "mlp", _reversed),
    Stranger("own-function", "mlp", _quantized),
    Stranger("whole-statistics", "mlp", _whole),
]
